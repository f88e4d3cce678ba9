"""Topic: the same effective batch in less memory: several small batches before each step.

Each rank splits its batch into micro-batches, one for each of the --accumulation-steps. DDP would
average the gradients after each; no_sync() leaves that to the last one. It has to be around forward
*and* backward: DDP decides in forward. The loss of a micro-batch is weighted by its share of the
batch, so micro-batches of any size give the same sum.

Step: the optimizer steps once for all micro-batches because only then the gradient is whole.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.gradient_accumulation
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
The memory that it saves:   the same with --model resnet50 --dataset fake
                                --accumulation-steps 1, 2, 4 ...
What changed:               diff -U0 -w 02_torchrun.py topics/gradient_accumulation.py
Budget: +26 -3 because it counts what is sent and kept.
"""

import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


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
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    model = DDP(model)  # all ranks: takes the weights of rank 0
    averaged = backwards = largest = 0  # all-reduces of gradients, backward passes, images in one

    def average(state, bucket):
        nonlocal averaged
        averaged += bucket.is_last()  # the others are parts of the same
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, average)  # DDP's own way, counted

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
            micro_images = images.chunk(args.accumulation_steps)
            micro_labels = labels.chunk(args.accumulation_steps)
            for images, targets in zip(micro_images, micro_labels, strict=True):
                with nullcontext() if targets is micro_labels[-1] else model.no_sync():
                    loss = F.cross_entropy(model(images), targets) * len(targets) / len(labels)
                    loss.backward()
                    sums[0] += loss.detach() * len(labels)
                backwards, largest = backwards + 1, max(largest, len(targets))
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
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
    memory = f", {torch.cuda.max_memory_allocated() / 1e6:.0f} MB at most" * (device.type == "cuda")
    steps = (args.epochs - start_epoch) * len(train_loader)
    more = "no more" if averaged == steps else "more than once a step"
    checks.conclude(
        f"{averaged} all-reduces of gradients in {backwards} backward passes{memory}",
        f"one for each of {steps} steps",
        f"a rank keeps the activations of {largest} of {batch} images, and sends {more}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", accumulation_steps=4))
