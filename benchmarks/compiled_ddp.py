"""torch.compile and DDP on several devices: which way is the quickest? It is what fast.py does.

    python benchmarks/compiled_ddp.py --model resnet50 --image-size 224 --batch-size 256
    python benchmarks/compiled_ddp.py --devices 2 --ways once inside --rounds 3

alone          the compiled step of one device: nothing is averaged
once           one all-reduce after the backward pass, by average() of topics/fast.py
registered     the same from memory that NCCL has registered (a "user buffer"): no copy of its own
inside         DDP(compile(model)): the graph is cut at the borders of DDP's buckets
outside        compile(DDP(model)): cut there as well
inside_whole   the same two with torch._dynamo.config.optimize_ddp = False: the graph is not cut,
outside_whole  so that all buckets leave at the end of the backward pass
inside_view    inside_whole, and the gradients are views into the buckets
plain          DDP(model), which nobody compiles

All train on a resident batch, as the bare step of data_loading.py. Each way has processes of its
own (models of one process would share compiled code), and the ways take turns, --rounds times. Each
turn adds a row to results/compiled_ddp.csv.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import data_loading  # noqa: E402
import machine  # noqa: E402
import scaling  # noqa: E402
import tour  # noqa: E402

import common  # noqa: E402
from topics.fast import average  # noqa: E402

WAYS = ["alone", "once", "registered", "inside", "outside", "inside_whole", "outside_whole"]
WAYS += ["inside_view", "plain"]


def wrapped(model: torch.nn.Module, way: str) -> torch.nn.Module:
    """Return the module that this way calls."""
    if way == "plain":
        return DDP(model)
    if way.startswith("outside"):
        return torch.compile(DDP(model))
    compiled = torch.compile(model)
    if way.startswith("inside"):
        return DDP(compiled, gradient_as_bucket_view=way == "inside_view")
    return compiled


def registered(device: torch.device) -> Callable[[torch.nn.Module], None]:
    """Return average(), but what it sends lies in a pool of memory that NCCL has registered."""
    backend = dist.group.WORLD._get_backend(device)  # there is no public name
    pool, known = torch.cuda.MemPool(backend.mem_allocator), []

    def call(model: torch.nn.Module) -> None:
        with torch.cuda.use_mem_pool(pool):
            average(model)
        if not known:  # from the first call on NCCL knows the ranks, and the pool has its memory
            backend.register_mem_pool(pool)
            known.append(pool)

    return call


def rank_main(args: argparse.Namespace) -> None:
    """One rank of one way: time windows of steps; rank 0 writes those of the slowest rank."""
    device = common.take_device(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    way = args.ways[0]
    torch._dynamo.config.optimize_ddp = not way.endswith(("_whole", "_view"))
    torch.manual_seed(0)  # all ranks have the same weights
    batch = data_loading.resident_batch(args, device, floats=True)
    more = {"wrap": lambda model: wrapped(model, way)}
    if way in ("once", "registered"):
        more["after_backward"] = average if way == "once" else registered(device)
    step = data_loading.make_step(args, device, fast=True, compiled=False, floats=True, **more)
    seconds = []
    for window in range(args.windows + 1):
        dist.barrier()
        common.seconds_since(0, device)
        start = time.perf_counter()
        for _ in range(args.steps if window else 5):
            step(*batch)
        seconds.append(common.seconds_since(start, device))
    slowest = torch.tensor(seconds[1:], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        images_done = args.steps * args.batch_size * dist.get_world_size()
        speeds = [images_done / some for some in slowest.tolist()]
        row = {"precision": "bf16" if device.type == "cuda" else "fp32", "device": device.type}
        row |= {"backend": backend, "windows": len(speeds)} | scaling.median_of(speeds)
        Path(args.json).write_text(json.dumps(row))
    if way == "registered":
        dist.barrier()
        os._exit(0)  # torch 2.11 aborts or hangs where it gives such memory back
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[common.gpu_count() or 2])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--model", default="small")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    parser.add_argument("--steps", type=int, default=40, help="of a window")
    parser.add_argument("--windows", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one way")
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "compiled_ddp.csv")
    parser.add_argument("--json", help=argparse.SUPPRESS)  # a rank: where the times go
    args = parser.parse_args()
    args.channels = 3
    if args.json:
        return rank_main(args)
    tour.end_like_ctrl_c()
    failed = False
    for devices in args.devices:
        for way in args.ways * args.rounds:
            if way == "alone" and devices > 1 or way == "registered" and not common.gpu_count():
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc-per-node={devices}", __file__, f"--json={folder}/row"]
                command += [f"--ways={way}", f"--model={args.model}", f"--steps={args.steps}"]
                command += [f"--image-size={args.image_size}", f"--batch-size={args.batch_size}"]
                command += [f"--windows={args.windows}"]
                wrong = scaling.run(command, {}, args.timeout)
                found = {} if wrong else json.loads(Path(folder, "row").read_text())
            words = f"{way} on {devices}: "
            print(words + (wrong or f"{found['samples_per_second']:.0f} samples/s"), flush=True)
            if wrong:
                failed = True
                continue
            row = {"way": way, "devices": devices, "model": args.model}
            row |= {"image_size": args.image_size, "per_rank_batch": args.batch_size}
            scaling.append(args.csv, row | found | machine.describe())
    sys.exit(failed)


if __name__ == "__main__":
    main()
