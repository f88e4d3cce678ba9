"""How fast is an all-reduce? Bus bandwidth over message sizes, added to results/allreduce.csv.

    torchrun --standalone --nproc-per-node=2 benchmarks/allreduce.py
    torchrun --standalone --nproc-per-node=gpu benchmarks/allreduce.py --largest 1073741824

Bus bandwidth is 2 (n - 1) / n * bytes / seconds: what each link of a ring of n ranks carries, so
numbers at different n can be compared. Source: nccl-tests, doc/PERFORMANCE.md.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402

import common  # noqa: E402


def seconds_of(tensor: torch.Tensor, repeats: int, device: torch.device) -> float:
    """Return the seconds of one all-reduce: the mean of a row of them, with one wait at the end."""
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    return common.seconds_since(start, device) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smallest", type=int, default=1024, help="bytes")
    parser.add_argument("--largest", type=int, default=2**26, help="bytes")
    parser.add_argument("--windows", type=int, default=5, help="measured, after one to warm up")
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "allreduce.csv")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    size = args.smallest
    while size <= args.largest:
        tensor = torch.zeros(size // 4, device=device)  # zeros: no sum overflows
        # About 50 MB a window, so that a small message is measured many times.
        repeats = max(2, min(100, 50_000_000 // size))
        seconds_of(tensor, repeats, device)
        windows = []
        for _ in range(args.windows):
            dist.barrier()
            windows.append(seconds_of(tensor, repeats, device))
        # The slowest rank's: an all-reduce has ended when all have it.
        slowest = torch.tensor(windows, device=device, dtype=torch.float32)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        windows = slowest.tolist()
        median = statistics.median(windows)
        row = {"bytes": size, "devices": world_size, "repeats": repeats, "seconds": median}
        row |= {"min": min(windows), "max": max(windows)}
        row |= {"bus_bandwidth_gb_s": 2 * (world_size - 1) / world_size * size / median / 1e9}
        row = {
            key: float(f"{value:.4g}") if "." in f"{value}" else value for key, value in row.items()
        }
        row |= {"device": device.type, "backend": backend, **machine.describe()}
        if rank == 0:
            print(f"{size:>12} bytes {median * 1e3:9.3f} ms {row['bus_bandwidth_gb_s']:8.3f} GB/s")
            scaling.append(args.csv, row)
        size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
