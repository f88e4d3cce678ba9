"""Topic: the optimizer's state is sharded over the ranks; the model stays whole.

ZeroRedundancyOptimizer steps only the weights of its shard, and then sends them to the others. The
numbers stay. Adam would save two numbers a weight, SGD with momentum saves one. Before saving, rank
0 gathers all shards, so the file is like any other, and 00 can resume from it.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.zero_optimizer
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/zero_optimizer.py
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
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
    settings = {"lr": args.lr, "momentum": 0.9}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **settings)
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
        if args.checkpoint:
            optimizer.consolidate_state_dict(to=0)  # all ranks send their shards
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    shards = optimizer.optim.state.values()
    local = sum(value.numel() for shard in shards for value in shard.values())
    sizes, held = [weights.numel() for weights in model.parameters()], [None] * world_size
    dist.all_gather_object(held, local)  # all ranks
    each = sum(sizes) // world_size
    but = "but" if max(sizes) > each else "and"
    dealt = "whole tensors are dealt out" if world_size > 1 else "nothing is dealt out"
    checks.conclude(
        f"{held} of {sum(sizes)} numbers of momentum on the ranks",
        f"{each} each if tensors were split, {but} the largest has {max(sizes)}",
        f"{dealt}, and the fullest rank keeps {max(held) / sum(sizes):.0%}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun"))
