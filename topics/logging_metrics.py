"""Topic: whose loss is printed? Of one rank, of all ranks, or each of them.

rank-local  each rank has seen its share only, so the ranks' losses differ; rank 0's is not the loss
reduced     sums of loss and samples, added over the ranks: the loss
gathered    the ranks' own numbers, side by side: to see whether one is odd
A sub-group reduces over some ranks. All ranks must make it, also those that are not in it.
TensorBoard (--board FOLDER) gets one run, from rank 0.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.logging_metrics
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/logging_metrics.py
Budget: +28 -1 because it prints four numbers and writes a board.
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

    board = None
    if rank == 0 and args.board:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            checks.fail("--board needs TensorBoard: pip install tensorboard")
        board = SummaryWriter(args.board)
    # All ranks call this, members or not.
    even = dist.new_group(range(0, world_size, 2), timeout=args.timeout)

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
        local, gathered, part = sums[0] / sums[1], [None] * world_size, sums[:2].clone()
        dist.all_gather_object(gathered, round(local.item(), 4))  # all ranks
        if rank % 2 == 0:
            dist.all_reduce(part, group=even)  # its members only
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
            reduced = (sums[0] / sums[1]).item()
            print(f"rank-local {local:.4f} | reduced {reduced:.4f} | gathered {gathered}", end=" ")
            print(f"| even ranks {part[0] / part[1]:.4f}", flush=True)
            if board:
                board.add_scalar("train loss", reduced, epoch + 1)
    if board:
        board.close()
    if start_epoch < args.epochs:
        checks.conclude(
            f"a loss of {local:.4f} on rank 0 and of {sums[0] / sums[1]:.4f} over all ranks",
            "two numbers with several ranks",
            f"rank 0's own is off by {abs(local - sums[0] / sums[1]):.4f}",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", board=""))
