"""Does the data loader keep up? Rung 00's samples/s against the same step on one resident batch.

    python benchmarks/data_loading.py --model resnet50 --image-size 224 --batch-size 256

Prints one JSON object. A ratio near 1 means that the device never waits for its next batch.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402

import common  # noqa: E402


def rung_speed(args: argparse.Namespace) -> list[float]:
    """Return the samples/s of each epoch of 00 but the first, which warms up."""
    options = ["--dataset", f"fake:{args.images}", "--model", args.model]
    options += ["--image-size", args.image_size, "--batch-size", args.batch_size]
    options += ["--num-workers", args.num_workers, "--epochs", args.windows + 1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "00_single_gpu.py", *options, "--log-json", f"{folder}/log"]
        subprocess.run([str(word) for word in command], cwd=ROOT, check=True)
        lines = Path(folder, "log").read_text().splitlines()
    return [json.loads(line)["samples_per_second"] for line in lines][1:]


def resident_speed(args: argparse.Namespace) -> list[float]:
    """Return the samples/s of the same step, window by window, on a batch that never moves."""
    device = common.take_device()
    args.dataset, args.channels, args.train_size = "fake", 3, args.batch_size
    images, labels = (tensor.to(device) for tensor in common.load_datasets(args)[0].tensors)
    model = common.build_model(args).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    steps, speeds = args.images // args.batch_size, []
    for _ in range(args.windows + 1):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        speeds.append(steps * args.batch_size / common.seconds_since(start, device))
    return speeds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=512, help="training images an epoch")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--windows", type=int, default=3, help="measured after one to warm up")
    args = parser.parse_args()
    rung, resident = rung_speed(args), resident_speed(args)
    ratio = statistics.median(rung) / statistics.median(resident)
    result = {"rung": rung, "resident": resident, "ratio": round(ratio, 4)}
    names = ("model", "image_size", "batch_size", "images", "num_workers")
    row = machine.describe() | {name: getattr(args, name) for name in names} | result
    print(json.dumps(machine.sealed(row)))


if __name__ == "__main__":
    main()
