"""Topic: who feeds the GPU? Four ways to get the next batch to the device.

samples     the DataLoader takes sample after sample from the data set, and stacks them
batches     a data set with __getitems__: one index operation a batch, and nothing to stack
prefetched  a thread does that one batch ahead, in pinned memory that is used again and again; a
            stream of its own copies the batch to the GPU while the one before is computed
resident    all data are on the device: where they fit, nobody has to feed it
The first two also take --num-workers, which are processes, and --pinned no. --file FILE writes the
images to one array on the disk and maps it: then a batch is read when it is asked for.

One process:                torchrun --standalone --nproc-per-node=1 -m topics.feeding
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.feeding \
                                --feed batches --num-workers 1
All GPUs:                   torchrun --standalone --nproc-per-node=gpu -m topics.feeding \
                                --model resnet50 --dataset fake --image-size 224
All of them, as shares of the speed without any feeding:
                            python benchmarks/data_loading.py --feeds
What changed:               diff -U0 -w 02_torchrun.py topics/feeding.py
Budget: +91 -3 because the thread and its buffers are what fast.py feeds from.
"""

import os
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

AHEAD = 2  # batches that are on their way while the device computes


class Batches(TensorDataset):
    def __getitems__(self, indices):  # a DataLoader calls it, where there is one, for a whole batch
        return [tensor[indices] for tensor in self.tensors]


class Resident:
    """Batches of tensors that are on the device, in the sampler's order."""

    def __init__(self, tensors, batch, sampler):
        self.tensors, self.batch, self.sampler = tensors, batch, sampler

    def __len__(self):
        return len(self.sampler) // self.batch

    def indices(self):
        order = torch.tensor(list(self.sampler), device=self.tensors[0].device)
        return order[: len(self) * self.batch].view(-1, self.batch)

    def __iter__(self):
        for indices in self.indices():
            yield [tensor.index_select(0, indices) for tensor in self.tensors]


class Prefetched(Resident):
    """Batches of tensors in host memory, sent to the device ahead of the step that needs them."""

    def __init__(self, tensors, batch, sampler, device):
        super().__init__(tensors, batch, sampler)
        self.device, self.slots = device, cycle([None])
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # Made once: new memory for each batch would cost more than to fill it (page faults).
            self.slots = cycle([self.slot() for _ in range(AHEAD + 1)])

    def slot(self):
        """Return pinned buffers for a batch, and an event for the copy from them."""
        buffers = [tensor[: self.batch].clone().pin_memory() for tensor in self.tensors]
        return buffers, torch.cuda.Event()

    def load(self, indices, slot):
        """In the thread: gather a batch and start its copy; index_select lets Python go on."""
        if slot is None:
            return [
                tensor.index_select(0, indices).to(self.device) for tensor in self.tensors
            ], None
        buffers, sent = slot
        sent.synchronize()  # the last copy from these buffers has ended
        for tensor, buffer in zip(self.tensors, buffers, strict=True):
            torch.index_select(tensor, 0, indices, out=buffer)
        with torch.cuda.stream(self.stream):
            batch = [buffer.to(self.device, non_blocking=True) for buffer in buffers]
            sent.record()
        return batch, sent

    def received(self, job):
        """Return the batch of a job; what the device does from now on waits for its copy."""
        batch, sent = job.result()
        if sent:
            torch.cuda.current_stream().wait_event(sent)
            for tensor in batch:  # its memory is not free before the step has been done
                tensor.record_stream(torch.cuda.current_stream())
        return batch

    def __iter__(self):
        jobs = deque()
        with ThreadPoolExecutor(1) as thread:
            for indices in self.indices():
                jobs.append(thread.submit(self.load, indices, next(self.slots)))
                if len(jobs) > AHEAD:
                    yield self.received(jobs.popleft())
            while jobs:
                yield self.received(jobs.popleft())


def on_disk(args, rank, images):
    """All ranks: return the images as an array in --file, which is mapped, not read."""
    if rank == 0:
        with checks.writing(args.file, "--file"), open(args.file, "wb") as file:
            np.save(file, images.numpy())
    dist.barrier()  # all ranks: the file is whole
    return torch.from_numpy(np.load(args.file, mmap_mode="c"))  # c: not even by mistake written to


def feed(args, data, batch, sampler, device, options):
    """Return what the loop takes its batches from."""
    if args.feed == "prefetched":
        return Prefetched(data.tensors, batch, sampler, device)
    if args.feed == "resident":
        return Resident([tensor.to(device) for tensor in data.tensors], batch, sampler)
    options = options | {"pin_memory": options["pin_memory"] and args.pinned == "yes"}
    if args.feed == "batches":
        data, options = Batches(*data.tensors), options | {"collate_fn": list}  # it stacks nothing
    return DataLoader(data, batch, sampler=sampler, drop_last=True, **options)


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    if args.file:
        train_set = TensorDataset(on_disk(args, rank, train_set.tensors[0]), train_set.tensors[1])
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = feed(args, train_set, batch, sampler, device, options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    model = DDP(model)  # all ranks: takes the weights of rank 0

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels in common.progress(train_loader, epoch):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if start_epoch < args.epochs:
        start = time.perf_counter()
        for images, _ in train_loader:
            images.to(device, non_blocking=True)
        alone = common.seconds_since(start, device)
        checks.conclude(
            f"{alone:.2f} s to feed an epoch and do nothing else, {seconds:.2f} s to train one",
            "much less, or a feeder that works while the device computes",
            f"this feed could serve a step {seconds / alone:.1f} times as fast",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    feeds, pinned = ("prefetched", "samples", "batches", "resident"), ("yes", "no")
    main(common.parse_args("torchrun", feed=feeds, pinned=pinned, file=""))
