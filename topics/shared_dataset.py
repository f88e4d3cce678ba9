"""Topic: a data set in memory, once on a node, for all of its ranks.

shared  with mp.spawn the parent loads it into shared memory, which all ranks get without a copy
mmap    rank 0 writes a file and all ranks map it: with torchrun, which loads nothing, the first
        rank of each node can do so
copy    each rank loads it: N ranks hold N copies

All GPUs, or 2 CPU processes:  python -m topics.shared_dataset
126 MB of images:              python -m topics.shared_dataset --nproc 4 --dataset fake:10240
A file that all map:           the same with --storage mmap
A copy in each rank:           the same with --storage copy
What changed:                  diff -U0 -w 01_single_node_multi_gpu.py topics/shared_dataset.py
Budget: +62 -5 because more than half of it measures whose pages of memory the data is in.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def storages(sets):
    """Return {address: bytes} of the memory behind these data sets."""
    parts = [tensor.untyped_storage() for part in sets for tensor in part.tensors]
    return {part.data_ptr(): part.nbytes() for part in parts}  # two tensors may share one


def resident_bytes(process, storages):
    """Return how many bytes of these storages count as this process's.

    A page of memory that n processes have in use counts 1/n in each (Linux: Pss; Rss counts 1).
    """
    total, smaps = 0, Path(f"/proc/{process}/smaps").read_text()
    for found in re.findall(r"^(\w+)-(\w+) .*?^Rss: +(\d+).*?^Pss: +(\d+)", smaps, re.M | re.S):
        first, end, rss, pss = int(found[0], 16), int(found[1], 16), int(found[2]), int(found[3])
        for address, size in storages.items():
            inside = min(min(end, address + size) - max(first, address), rss * 1024)
            total += inside * pss / rss if inside > 0 else 0
    return total


def main(rank, world_size, args, shared, parents):
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    if args.storage == "mmap":
        file = Path(tempfile.gettempdir(), f"data-{os.environ['MASTER_PORT']}.pt")
        if rank == 0:  # the first rank of the node; its own copy is gone when it has written
            with checks.writing(file, "TMPDIR"), open(file, "wb") as out:
                torch.save([part.tensors for part in common.load_datasets(args)], out)
        dist.barrier()  # all ranks: the file is whole
        shared = [TensorDataset(*tensors) for tensors in torch.load(file, mmap=True)]
        dist.barrier()  # all ranks have mapped it, so its name can go; the pages stay
        if rank == 0:
            with suppress(PermissionError):  # Windows keeps it
                file.unlink()
    train_set, test_set = shared or common.load_datasets(args)
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

    local = storages([train_set, test_set])
    for part in (train_set, test_set):
        for tensor in part.tensors:
            tensor.sum()  # a page counts when it has been used
    dist.barrier()  # all ranks have used all pages
    copies = "an unknown number of"
    if sys.platform == "linux":
        sums = torch.tensor(float(resident_bytes(os.getpid(), local)), device=device)
        sums += resident_bytes(os.getppid(), parents) if rank == 0 else 0
        dist.all_reduce(sums)
        copies = f"{sums / sum(local.values()):.2f}"
    if rank == 0:
        text = f"{world_size} ranks and their parent hold {copies} copies of the data"
        print(f"{args.storage}: {text} ({sum(local.values()) / 1e6:.1f} MB)", flush=True)
    ways = {"copy": f"{world_size}, one a rank", "mmap": "1 file", "shared": "1 in /dev/shm"}
    checks.conclude(
        f"{copies} copies of the data with {args.storage}",
        ways[args.storage],
        f"{world_size} rank{'s take' if world_size > 1 else ' takes'} the memory of {copies}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    kinds = ("shared", "mmap", "copy")
    args = common.parse_args("spawn", nproc=common.gpu_count() or 2, storage=kinds)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=checks.free_port())  # they meet there
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or every rank takes all cores
    sets = common.load_datasets(args) if args.storage == "shared" else []
    room = shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else float("inf")
    if sum(storages(sets).values()) > room:
        checks.fail(f"/dev/shm has room for {room} bytes: use --storage mmap, or docker --shm-size")
    for part in sets:
        for tensor in part.tensors:
            tensor.share_memory_()  # moves it there; what one process writes, all read
    mp.spawn(main, args=(args.nproc, args, sets, storages(sets)), nprocs=args.nproc)
