"""How much of the all-reduce hides behind the backward pass? One step of DDP, bucket by bucket.

    torchrun --standalone --nproc-per-node=2 benchmarks/overlap.py --model wide
    torchrun --standalone --nproc-per-node=gpu benchmarks/overlap.py --model resnet50 \\
        --image-size 224 --batch-size 256 --precision bf16 --trace trace.json

--batch-size is each rank's. Of --steps steps, all with equal work, it adds the median one of rank 0
to results/overlap.jsonl. --trace also keeps a trace for chrome://tracing or ui.perfetto.dev.

hidden:  the time in which a bucket travels while the device computes.
exposed: the time in which it travels and the device waits.
On GPUs both come from the kernels' times in a profile; an NCCL kernel also runs while it waits for
a slower rank. On the CPU the clock is read when a bucket is ready and when its sum has arrived.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile, record_function

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402

import common  # noqa: E402


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans (start, end) sorted, with those that touch made one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(spans: list[tuple[float, float]]) -> float:
    """Return the time that is in at least one of the spans."""
    return sum(end - start for start, end in union(spans))


def shares(network: list, compute: list) -> dict[str, float]:
    """Return how long buckets travel and the device computes, and how much of it is at once."""
    communication, busy = length(network), length(compute)
    hidden = communication + busy - length(network + compute)
    times = {"communication_ms": communication, "compute_ms": busy}
    return times | {"hidden_ms": hidden, "exposed_ms": communication - hidden}


def exposed(network: list, compute: list) -> list[tuple[float, float]]:
    """Return the spans in which a bucket travels and the device does not compute."""
    left = union(network)
    for begin, stop in union(compute):
        parts = [(start, min(end, begin)) for start, end in left]
        parts += [(max(start, stop), end) for start, end in left]
        left = union([(start, end) for start, end in parts if start < end])
    return left


def kernels(trace: dict) -> tuple[list, list, list]:
    """Return the spans, in ms from the step's start, of all-reduces, all of NCCL, and the rest.

    NCCL also broadcasts the buffers of batch norm. The barrier before the step does not count.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    zero = min(event["ts"] for event in events if event["name"] == "step")
    reduces, nccl, other = [], [], []
    for event in events:
        name, start = event["name"], (event["ts"] - zero) / 1e3
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and start >= 0:
            span = (start, start + event["dur"] / 1e3)
            (nccl if name.startswith("nccl") else other).append(span)
            if name.startswith("nccl") and "AllReduce" in name:
                reduces.append(span)
    return sorted(reduces), nccl, other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--bucket-mb", type=float, help="default: DDP's, 1 for the first, then 25")
    parser.add_argument("--steps", type=int, default=5, help="measured, after 5 to warm up")
    parser.add_argument("--trace", type=Path, help="keep the Chrome trace of the last step here")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "overlap.jsonl")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --standalone --nproc-per-node=2 " + sys.argv[0])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    on_gpu, clock = device.type == "cuda", time.perf_counter
    torch.backends.cudnn.allow_tf32 = args.precision != "fp32"
    torch.set_float32_matmul_precision("highest" if args.precision == "fp32" else "high")

    args.dataset, args.channels, args.train_size = "fake", 3, args.batch_size
    images, labels = (tensor.to(device) for tensor in common.load_datasets(args)[0].tensors)
    model = DDP(common.build_model(args).to(device), bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    buckets: list[dict] = []  # of the step that runs, in the order in which DDP sends them

    def average(_, bucket):
        """What DDP does by itself, with a look at the clock before and after."""
        entry = {"bytes": bucket.buffer().nbytes, "start": clock()}
        buckets.append(entry)
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)

        def arrived(future):
            entry["end"] = clock()
            return future.value()[0]

        return work.get_future().then(arrived)

    model.register_comm_hook(None, average)

    def step() -> dict:
        """Run one step; return its times in ms from its start."""
        buckets.clear()
        dist.barrier()
        common.seconds_since(0, device)
        marks = {"start": clock()}
        with record_function("step"):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(model(images), labels)
            common.seconds_since(0, device)  # so that the backward pass has a start on the clock
            marks["backward_start"] = clock()
            loss.backward()  # ends when all sums have arrived
            common.seconds_since(0, device)
            marks["backward_end"] = clock()
            optimizer.step()
            common.seconds_since(0, device)
        marks["step"] = clock()
        zero = marks.pop("start")
        times = {f"{name}_ms": (value - zero) * 1e3 for name, value in marks.items()}
        return times | {"zero": zero}

    for _ in range(5):
        step()
    results = []
    for number in range(args.steps):
        keep = args.trace if number == args.steps - 1 and rank == 0 else None
        if on_gpu or keep:
            with profile() as profiler:
                result = step()
            with tempfile.TemporaryDirectory() as folder:
                path = keep or Path(folder, "trace.json")
                profiler.export_chrome_trace(str(path))
                trace = json.loads(path.read_text())
        else:
            result = step()
        zero = result.pop("zero")
        if on_gpu:
            spans, network, compute = kernels(trace)
        else:
            spans = [((b["start"] - zero) * 1e3, (b["end"] - zero) * 1e3) for b in buckets]
            network = spans
            compute = [(0, spans[-1][0]), (result["backward_end_ms"], result["step_ms"])]
        sizes = [bucket["bytes"] for bucket in buckets]
        assert len(spans) == len(sizes), f"{len(spans)} all-reduces for {len(sizes)} buckets"
        result["buckets"] = [
            {"bytes": size, "start_ms": round(start, 3), "end_ms": round(end, 3)}
            for size, (start, end) in zip(sizes, spans, strict=True)
        ]
        gaps = [[round(moment, 3) for moment in span] for span in exposed(network, compute)]
        results.append(result | shares(network, compute) | {"exposed": gaps})
    if rank == 0:
        middle = statistics.median_low(result["step_ms"] for result in results)
        result = next(result for result in results if result["step_ms"] == middle)
        result = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
        row = {"model": args.model, "image_size": args.image_size, "precision": args.precision}
        row |= {"per_rank_batch": args.batch_size, "devices": world_size, "device": device.type}
        row |= {"backend": backend, "bucket_mb": args.bucket_mb, **result, **machine.describe()}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            print(json.dumps(machine.sealed(row)), file=file)
        for bucket in result["buckets"]:
            size, start, end = bucket.values()
            print(f"{size:>12} bytes {start:9.2f} to {end:9.2f} ms")
        words = (f"{name} {result[f'{name}_ms']:.2f} ms" for name in ("step", "hidden", "exposed"))
        print(*words, sep=" | ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
