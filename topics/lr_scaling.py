"""Topic: the effective batch grows with the number of ranks. What should the learning rate do?

--lr is right for --base-batch. With --batch-size k times as large there are k times fewer steps.
none:   the rate stays, as if nothing had happened
linear: k times the rate (Goyal et al. 2017, arXiv:1706.02677)
sqrt:   the square root of k times the rate (Krizhevsky 2014, arXiv:1404.5997)
The rate climbs to its target during --warmup-epochs: a high one breaks a young network.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.lr_scaling \
                                --base-batch 24 --lr 0.005 --batch-size 384 --rule sqrt
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
All rules, 1, 4, 16 times:  python benchmarks/batch_and_lr.py
What changed:               diff -U0 -w 02_torchrun.py topics/lr_scaling.py
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    k = args.batch_size / args.base_batch
    rules = {"none": 1, "linear": k, "sqrt": k**0.5}

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
    warmup, target = args.warmup_epochs * len(train_loader), args.lr * rules[args.rule]
    if rank == 0:
        print(f"{args.rule}: learning rate {args.lr} to {target:.4g} in {warmup} steps", flush=True)

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        steps = epoch * len(train_loader)
        for images, labels in common.progress(train_loader, epoch):
            steps += 1
            share = min(1, steps / warmup) if warmup else 1
            optimizer.param_groups[0]["lr"] = args.lr + (target - args.lr) * share
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
    rate, target = (f"{value:.4g}" for value in (optimizer.param_groups[0]["lr"], target))
    checks.conclude(
        f"a rate of {rate} at the end, with {k:g} times the base batch",
        f"{target} by the rule {args.rule}",
        "the rule's rate is reached" if rate == target else "the warm-up has not ended yet",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    rules = ("linear", "sqrt", "none")
    main(common.parse_args("torchrun", rule=rules, base_batch=96, warmup_epochs=2))
