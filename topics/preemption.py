"""Topic: a run that is told to stop saves its state in the middle of an epoch, and resumes there.

SIGTERM or SIGUSR1 to any rank only sets a flag. After each step the ranks compare flags, so all
stop at the same step. Exit code 75 means: stopped on request, start me again. The mid-epoch state
is a number of samples over all ranks, so a run may resume with more or fewer ranks and workers:
each sample counts once, and the end is that of a run that was never stopped. A request during the
evaluation waits for its end: the time between signal and kill must be enough for both.
Budget: +42 -2 because signal, flag, mid-epoch state and exit code make sense only together.

On a cluster:               sbatch slurm/requeue.sbatch
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.preemption \
                                --checkpoint checkpoints/preemption.pt --epochs 50 &
                            sleep 10; kill $!; wait
To resume:                  torchrun --standalone --nproc-per-node=2 -m topics.preemption \
                                --checkpoint checkpoints/preemption.pt --epochs 50
All GPUs, or one process:   the same with --nproc-per-node=gpu, or =1
What changed:               diff -U0 -w 03_multinode.py topics/preemption.py
"""

import os
import signal
import socket
import sys
import time
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


class ResumableSampler(DistributedSampler):
    skip = 0  # this many samples of the rank are behind it already

    def __iter__(self):
        return islice(super().__iter__(), self.skip, None)


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    stop_requested = []  # a handler does next to nothing: it may interrupt a collective
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop_requested.append(True))
    device = common.take_device(local_rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    # A group for the flags, on the CPU: to read one must not stop the GPU.
    control = dist.new_group(backend="gloo", timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    sampler = ResumableSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    where = f"local rank {local_rank} on {socket.gethostname()} | {device}"
    print(f"rank {rank} of {world_size} | {where} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Rank 0 reads its own disk and tells the others: no rank may start at another epoch.
    state = common.read_checkpoint(args) if rank == 0 else None
    state = checks.from_rank_0(state, model)  # all ranks; the weights are sent by DDP
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    # The mid-epoch state is saved with the optimizer's. Between epochs it is empty.
    mid_epoch = state["optimizer"].get("mid_epoch", {}) if state else {}
    optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"mid_epoch": mid_epoch})
    model = DDP(model)  # all ranks: takes the weights of rank 0

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter() - mid_epoch.get("seconds", 0)
        sampler.skip = mid_epoch.get("samples", 0) // world_size
        if mid_epoch and rank == 0:
            sums += mid_epoch["sums"].to(device)
        mid_epoch = {}
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
            stop = torch.tensor(len(stop_requested))
            dist.all_reduce(stop, group=control)  # all ranks: a request to one stops them all
            if stop:
                dist.all_reduce(sums)
                checks.loss_is_finite(args, epoch, sums)
                if rank == 0:
                    mid_epoch = {"samples": round(sums[1].item()), "sums": sums.cpu()}
                    mid_epoch["seconds"] = common.seconds_since(start, device)
                    common.save_checkpoint(args, epoch, model.module, optimizer)
                    samples = mid_epoch["samples"]
                    print(f"stopped in epoch {epoch + 1} after {samples} samples", flush=True)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun's: it ends all with the first
                dist.barrier(control)  # no rank ends before the file is there
                dist.destroy_process_group()
                sys.exit(75)
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
        wanted = len(train_loader) * args.batch_size
        checks.conclude(
            f"{sums[1]:.0f} samples in the last epoch, its stops counted in",
            f"{wanted}",
            f"{'no' if sums[1] == wanted else 'a'} stop has cost or doubled a sample",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("multinode"))
