"""Measure on this machine what a prediction needs, and what it predicts; adds to measured.json.

One process:     python measure.py
Two processes:   torchrun --standalone --nproc-per-node=2 measure.py

Of each row of steps or all-reduces the quickest counts: whatever disturbs it makes it slower.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/../../..")  # the repo's root
import common

BATCH = 32  # much more, and the memory that each step gets anew is what takes the time


def quickest(device, rounds, *calls):
    """Return the quickest time of each call, in seconds. They take turns, to be fair."""
    seconds = [[] for _ in calls]
    for _ in range(rounds):
        for call, row in zip(calls, seconds, strict=True):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            call()
            row.append(common.seconds_since(start, device))
    return [min(row) for row in seconds]


def step_of(args, model, batch, device, alone=False):
    """Return a training step on a batch that is there already. alone: without any exchange."""
    args.train_size = batch
    images, labels = (tensor.to(device) for tensor in common.load_datasets(args)[0].tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model.module(images) if alone else model(images), labels).backward()
        optimizer.step()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="small")
    parser.add_argument("--image-size", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    args.dataset, args.channels = "fake", 3
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = common.take_device(rank if ranks > 1 else None)
    torch.set_num_threads(1)  # or one process would already use the cores of two
    model = common.build_model(args).to(device)
    size = sum(p.numel() for p in model.parameters()) * 4  # bytes of the gradients
    if ranks == 1:
        steps = [step_of(args, model, batch, device) for batch in (BATCH, BATCH // 2)]
        found = {"bytes": size}
        found["whole"], found["half"] = quickest(device, args.rounds, *steps)
    else:
        backend = dist.get_default_backend_for_device(device)
        gpu = device if device.type == "cuda" else None  # else its barriers would guess, and warn
        dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=gpu)
        small, large = torch.zeros(256, device=device), torch.zeros(size // 4, device=device)
        found = {"small_bytes": 1024, "large_bytes": size}
        found["small"], found["large"] = quickest(
            device,
            args.rounds,
            lambda: dist.all_reduce(small),
            lambda: dist.all_reduce(large),
        )
        ddp = DDP(model)
        steps = [step_of(args, ddp, BATCH // ranks, device, alone) for alone in (True, False)]
        found["apart"], found["together"] = quickest(device, args.rounds, *steps)
        dist.destroy_process_group()
    if rank == 0:
        file = Path("measured.json")
        rows = json.loads(file.read_text()) if file.exists() else {}
        rows.setdefault(args.model, {})[str(ranks)] = found
        file.write_text(json.dumps(rows, indent=1) + "\n")
        for name, value in found.items():
            bytes_ = name.endswith("bytes")
            print(f"{name:12} {value:>12} bytes" if bytes_ else f"{name:12} {value * 1e3:12.3f} ms")


if __name__ == "__main__":
    main()
