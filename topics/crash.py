"""Topic: a rank dies at a random step, and torchrun restarts all ranks from the checkpoint.

The ranks roll the same dice: one of them kills itself, in the first attempt only.
Without the variable, a restart on the CPU can fail or hang: the new ranks find old addresses.

Two processes on the CPU:   export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
                            torchrun --standalone --nproc-per-node=2 --max-restarts=3 \
                                -m topics.crash --checkpoint checkpoints/crash.pt
All GPUs:                   the same with --nproc-per-node=gpu
One process:                the same with --nproc-per-node=1
Once more from the start:   rm checkpoints/crash.pt
What changed:               diff -U0 -w 02_torchrun.py topics/crash.py
"""

import os
import random
import signal
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

    # The run's id is the seed of the dice: all ranks roll the same, each run rolls something else.
    dice = random.Random(os.environ["TORCHELASTIC_RUN_ID"])
    victim, steps_left = dice.randrange(world_size), dice.randrange(args.epochs * len(train_loader))
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels in common.progress(train_loader, epoch):
            if rank == victim and steps_left == 0 and not restarted:
                print(f"rank {rank}: kill -9 in epoch {epoch + 1}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)  # no handler, no traceback, no goodbye
            steps_left -= 1
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
    cost = "the epoch that it was in" if args.checkpoint else "all epochs, without --checkpoint"
    checks.conclude(
        f"restarts: {os.environ['TORCHELASTIC_RESTART_COUNT']}, resumed after epoch {start_epoch}",
        "1 restart",
        f"a crash costs {cost}" if restarted else "nobody has died",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun"))
