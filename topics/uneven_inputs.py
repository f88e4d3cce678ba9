"""Topic: ranks with different numbers of batches, which would wait for each other for ever.

Rank 0 has all its batches, each further rank a batch less than the one before. Where a rank has no
batch left, the others wait for its gradients. --join 1 lets it answer their all-reduces with zeros.
The mean is then over the ranks that still train (divide_by_initial_world_size=False), so the last
batches weigh more for each sample: the lost samples are not made up for. At the end Join gives all
ranks the weights of the rank that trained longest, but not its momentum: that is sent here.

Step: it is indented because Join is a context around the loop.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.uneven_inputs
The hang, for 10 seconds:   the same with --join 0 --timeout 10
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/uneven_inputs.py
Budget: +24 -2 because it counts each rank's batches.
"""

import os
import sys
import time
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
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
    if len(train_loader) < world_size - 1:  # the last rank leaves out so many
        lack = f"{len(train_loader)} batches are too few for {world_size} ranks"
        checks.fail(f"{lack}: use a smaller --batch-size", all_ranks=True)
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
        batches = islice(train_loader, len(train_loader) - rank)
        with Join([model], enable=bool(args.join), divide_by_initial_world_size=False):
            for images, labels in batches:
                images = images.to(device, non_blocking=True)
                labels = labels.to(device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                # Summed on the device: to read the loss at every step would stop the GPU each time.
                sums[0] += loss.detach() * len(labels)
                sums[1] += len(labels)
        took = torch.zeros(world_size, device=device)  # batches of each rank
        took[rank] = sums[1] / batch
        for weight in model.parameters():  # all ranks: take rank 0's momentum too
            state = optimizer.state[weight]
            dist.broadcast(state.setdefault("momentum_buffer", torch.zeros_like(weight)), src=0)
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(took)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if start_epoch < args.epochs:
        wanted = [len(train_loader) - number for number in range(world_size)]
        checks.conclude(
            f"{took.int().tolist()} batches an epoch on the ranks",
            f"{wanted}",
            f"{'no' if took.tolist() == wanted else 'a'} batch is missing, and no rank still waits",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", join=(1, 0)))
