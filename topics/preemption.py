"""Topic: a run that is told to stop saves its place in the middle of an epoch, and goes on later.

SIGTERM or SIGUSR1 to any rank only sets a flag. After each step the ranks compare flags, so all
stop at the same step. Exit code 75 means: stopped as asked, start me again. The run that goes on
ends with the numbers of a run that was never stopped. Needs: pip install torchdata
Budget: +32 -2 because signal, flag, place in the data and exit code make sense only together.

On a cluster:               sbatch slurm/requeue.sbatch
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.preemption &
                            sleep 10; kill $!; wait
To go on:                   torchrun --standalone --nproc-per-node=2 -m topics.preemption
All GPUs, or one process:   the same with --nproc-per-node=gpu, or =1
What changed:               diff -U0 -w 03_multinode.py topics/preemption.py
"""

import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import common

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    common.fail("needs torchdata: pip install torchdata")


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    asked = []  # a handler does next to nothing: it may interrupt a collective
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: asked.append(True))
    device = common.pick_device(local_rank)
    print(f"rank {rank} | local rank {local_rank} | {socket.gethostname()} | {device}", flush=True)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    timeout = timedelta(seconds=args.timeout)  # the longest wait for a rank in a collective
    dist.init_process_group(backend, timeout=timeout)
    control = dist.new_group(backend="gloo")  # for flags: to read one must not stop the GPU
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    batch = args.per_rank_batch
    train_loader = StatefulDataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Rank 0 reads its own disk and tells the others: no rank may start at another epoch.
    state = [common.read_checkpoint(args) if rank == 0 else None]
    dist.broadcast_object_list(state)  # all ranks
    start_epoch = common.restore(state[0], args, model, optimizer)
    # The place in the data is saved with the optimizer's state. Between epochs it is empty.
    place = state[0]["optimizer"].get("place", {}) if state[0] else {}
    optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"place": place})
    model = DDP(model)  # all ranks: takes the weights of rank 0

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter() - place.get("seconds", 0)
        if place:  # in the middle of this epoch
            train_loader.load_state_dict(place["loader"])
            sums += place["sums"].to(device) if rank == 0 else 0
            place = {}
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
            stop = torch.tensor(len(asked))
            dist.all_reduce(stop, group=control)  # all ranks: one that was asked stops them all
            if stop:
                dist.all_reduce(sums)
                if rank == 0:
                    place = {"loader": train_loader.state_dict(), "sums": sums.cpu()}
                    place |= {"seconds": time.perf_counter() - start}
                    common.save_checkpoint(args, epoch, model.module, optimizer)
                    print(f"stopped in epoch {epoch + 1} after {sums[1]:.0f} samples", flush=True)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun's: it ends all after the first
                dist.barrier(control)  # no rank ends before the file is there
                dist.destroy_process_group()
                sys.exit(75)
        seconds = common.seconds_since(start, device)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("multinode"))
