"""Topic: hang clinic. Four ways to make ranks wait for ever, and the tools that say why they do.

mismatch    the ranks call different collectives: the flight recorder names rank and line
stuck       the last rank sleeps, the others wait for it: py-spy shows who sits where
monitored   the same, but the barrier is one that names the missing rank
breakpoint  rank 0 stands in the debugger, the others wait at a barrier (c goes on; --timeout 3600)

Here "for ever" is --timeout: without one, Gloo waits 30 minutes. TORCH_DISTRIBUTED_DEBUG=DETAIL
before the command checks every collective first, and names a mismatch at once. But with it DDP()
itself is often a segmentation fault (torch 2.9 to 2.14): that is why hang() comes before it.

Two processes on the CPU:   export CUDA_VISIBLE_DEVICES=
                            torchrun --standalone --nproc-per-node=2 -m topics.debugging \
                                --timeout 10 --case mismatch
What it has recorded:       torchfrtrace checkpoints/flight -p rank_  (or --flight FOLDER)
What changed:               diff -U0 -w 02_torchrun.py topics/debugging.py
Budget: +46 -1 because it is four lessons in one file; the training around them is as ever.
"""

import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def hang(args, rank, world_size):
    print(f"rank {rank} | look inside it: py-spy dump --pid {os.getpid()}", flush=True)
    values, last = torch.ones(4), rank == world_size - 1
    too_long, start = 3 * args.timeout.total_seconds(), time.perf_counter()
    try:
        if args.case == "mismatch":  # what comes of an `if rank == 0:` around half of a program
            dist.all_reduce(values) if rank == 0 else dist.broadcast(values, src=0)
        elif args.case == "stuck":
            time.sleep(too_long) if last else dist.barrier()
        elif args.case == "monitored":  # Gloo only; the other ranks are told by rank 0
            time.sleep(too_long) if last else dist.monitored_barrier(timeout=args.timeout)
        elif args.case == "breakpoint":
            if rank == 0:
                breakpoint()  # only this rank reads the terminal
            dist.barrier()
    except RuntimeError:
        write_flight(rank, Path(args.flight))
        checks.conclude(
            f"an error after {time.perf_counter() - start:.0f} s of {args.case}",
            f"one after {args.timeout.total_seconds():g} s, or as soon as another rank has failed",
            f"a hang has an end, and {args.flight} has its cause",
        )
        time.sleep(2)  # torchrun ends all ranks with the first: let them write theirs as well
        raise


def write_flight(rank, folder):
    """Write what this rank's flight recorder has seen, in the form that torchfrtrace reads.

    Both names are private to torch. With NCCL torch writes the file itself, at a timeout.
    """
    flight = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    # With Gloo the group of all ranks is called "" here and "0" in the entries: the reader stops.
    if group := flight["pg_config"].get(""):
        flight["pg_config"]["0"] = group | {"name": "0"}
    for entry in flight["entries"][-1:]:
        line = next(f["line"] for f in entry["frames"] if f["filename"].endswith("debugging.py"))
        text = f"rank {rank} | flight recorder: the last is {entry['profiling_name']}, line {line}"
        print(f"{text}\n", end="", flush=True)
    file = folder / f"rank_{rank}"
    with checks.writing(file, "--flight"):
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(flight))


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
    hang(args, rank, world_size)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    cases = ("mismatch", "stuck", "monitored", "breakpoint")
    args = common.parse_args("torchrun", case=cases, flight="checkpoints/flight")
    if common.gpu_count() or args.world_size == 1:
        checks.fail("needs the CPU (CUDA_VISIBLE_DEVICES=) and more than one process")
    main(args)
