"""Topic: where does a step spend its time? torch.profiler on each rank, for five steps.

compute        the device works: kernels on a GPU, operators on the CPU
communication  an all-reduce is under way; it also waits for a slower rank
exposed        the part of it in which the device does nothing else: what the step pays for it
idle           neither: the device waits for data, or for Python to tell it what to do
The first steps are left out: in them memory is allocated, libraries are loaded, and DDP makes its
buckets anew. Look at trace.RANK.json, in the folder --traces, in ui.perfetto.dev or
chrome://tracing.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.profiling --epochs 1
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu --model resnet50 --dataset fake
Bucket by bucket:           torchrun --standalone --nproc-per-node=2 benchmarks/overlap.py
What changed:               diff -U0 -w 02_torchrun.py topics/profiling.py
Budget: +54 -1 because a profile is of no use to a reader before its spans are added up.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common
from benchmarks.overlap import length

STEPS = {"wait": 5, "warmup": 2, "active": 5}  # warmup: profiled, but not kept


def add_up(trace, device):
    """Return ms a step of a trace: all, compute, communication, exposed communication."""
    on_gpu = device.type == "cuda"
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op", "user_annotation")
    compute, communication = [], []
    for event in trace["traceEvents"]:
        if event.get("cat") in kinds:
            span = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
            if "nccl" in event["name"] or event["name"].startswith("gloo:"):
                communication.append(span)
            elif event["cat"] != "user_annotation":
                compute.append(span)
    both = compute + communication
    whole = max(end for _, end in both) - min(start for start, _ in both)
    exposed = length(both) - length(compute)
    times = (whole, length(compute), length(communication), exposed)
    return [time / STEPS["active"] for time in times]


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
    if len(train_loader) < sum(STEPS.values()):
        checks.fail(f"{len(train_loader)} steps an epoch are too few: use a smaller --batch-size")

    found = []

    def report(profiler):  # all ranks, after the last of those steps
        file = Path(args.traces, f"trace.{rank}.json")
        with checks.writing(file, "--traces"):
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        whole, compute, communication, exposed = add_up(json.loads(file.read_text()), device)
        print(
            f"rank {rank} | a step {whole:.3f} ms | compute {compute:.3f} | communication"
            f" {communication:.3f}, exposed {exposed:.3f} | idle {whole - compute - exposed:.3f}\n",
            end="",
            flush=True,
        )
        if rank == 0:
            order = f"self_{device.type}_time_total"
            print(profiler.key_averages().table(order, row_limit=8, max_name_column_width=40))
        found.extend((whole, communication, exposed))

    profiler = profile(schedule=schedule(**STEPS, repeat=1), on_trace_ready=report)
    profiler.start()

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
            profiler.step()
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    profiler.stop()
    if found:
        whole, communication, exposed = found
        checks.conclude(
            f"{exposed:.1f} of {communication:.1f} ms of communication exposed on rank 0",
            "little, where it hides behind the backward pass",
            f"the all-reduces cost {exposed / whole:.0%} of a step",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", traces="checkpoints/traces"))
