"""Does the data loader keep up? A script's samples/s against its own step on one resident batch.

    python benchmarks/data_loading.py --model resnet50 --image-size 224 --batch-size 256
    python benchmarks/data_loading.py --script topics/fast.py --extra=--without=ddp
    python benchmarks/data_loading.py --feeds          each way of topics/feeding.py, in one process

A ratio near 1 means that the device never waits for its next batch. Of topics/fast.py the resident
step is the bare one: floats, which nobody has to make of bytes, in channels_last; autotune, fused,
on a GPU bf16, and compiled unless --extra takes that away. --feeds measures against it too, without
compile; the ways take turns, window by window, and must all give the same batches.

It adds a row to results/data_loading.jsonl, --feeds a row for each way to results/feeding.csv.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import RandomSampler, TensorDataset
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402
import tour  # noqa: E402

import common  # noqa: E402
from data import datasets  # noqa: E402
from topics import feeding  # noqa: E402


class Jpegs(torch.utils.data.Dataset):
    """The images as JPEG files, which are read and decoded each time that they are asked for."""

    def __init__(self, folder: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.labels, self.files = labels, [f"{folder}/{i}.jpg" for i in range(len(labels))]
        for image, file in zip(images, self.files, strict=True):
            to_pil_image(image).save(file)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return pil_to_tensor(Image.open(self.files[index])), self.labels[index]


def rung_speed(args: argparse.Namespace) -> list[float]:
    """Return the samples/s of each epoch of the script but the first, which warms up."""
    options = ["--dataset", args.dataset, "--model", args.model]
    options += ["--image-size", args.image_size, "--batch-size", args.batch_size]
    options += ["--num-workers", args.num_workers, "--epochs", args.windows + 1, *args.extra]
    with tempfile.TemporaryDirectory() as folder:
        command = [*tour.commands(args.script, 1, 1)[0], *options, "--log-json", f"{folder}/log"]
        subprocess.run([str(word) for word in command], cwd=ROOT, check=True)
        lines = Path(folder, "log").read_text().splitlines()
    return [json.loads(line)["samples_per_second"] for line in lines][1:]


def make_step(
    args: argparse.Namespace,
    device: torch.device,
    fast: bool,
    compiled: bool,
    floats: bool,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    after_backward: Callable[[torch.nn.Module], None] = lambda model: None,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that trains on a batch. fast: as topics/fast.py; floats: not of bytes.

    wrap: makes the module that is called of the model; after_backward: gets the model itself.
    """
    layout = torch.channels_last if fast else torch.contiguous_format
    if fast:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    model = common.build_model(args).to(device, memory_format=layout).train()
    model = model[1:] if floats else model
    forward = torch.compile(model) if compiled else wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, fused=fast)
    bf16 = fast and device.type == "cuda"

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        after_backward(model)
        optimizer.step()

    return step


def resident_batch(
    args: argparse.Namespace, device: torch.device, floats: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch on the device: bytes, or floats, as the model's first layer makes them."""
    args = SimpleNamespace(**vars(args) | {"dataset": "fake", "train_size": args.batch_size})
    images, labels = (tensor.to(device) for tensor in common.load_datasets(args)[0].tensors)
    images = images[:, : args.channels]
    if floats:
        images = common.BytesToFloats(args.channels, args.image_size)(images)
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels


def speed(step: Callable, batches: Iterable, device: torch.device) -> float:
    """Return the samples/s of one pass over the batches."""
    start, count = time.perf_counter(), 0
    for images, labels in batches:
        step(images, labels)
        count += len(labels)
    return count / common.seconds_since(start, device)


def resident_speed(args: argparse.Namespace) -> list[float]:
    """Return the samples/s of the same step, window by window, on a batch that never moves."""
    device, fast = common.take_device(), args.script == "topics/fast.py"
    compiled = fast and "compile" not in " ".join(args.extra)
    step = make_step(args, device, fast, compiled, floats=fast)
    batches = [resident_batch(args, device, fast)] * (args.images // args.batch_size)
    return [speed(step, batches, device) for _ in range(args.windows + 1)][1:]


def compare(args: argparse.Namespace) -> None:
    """Measure a script against its resident step, and record it."""
    rung, resident = rung_speed(args), resident_speed(args)
    ratio = statistics.median(rung) / statistics.median(resident)
    names = ("script", "model", "image_size", "batch_size", "images", "num_workers")
    row = machine.describe() | {name: getattr(args, name) for name in names}
    row |= {"options": " ".join(args.extra), "rung": rung, "resident": resident}
    row = machine.sealed(row | {"ratio": round(ratio, 4)})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        print(json.dumps(row), file=file)
    print(f"{args.script} {row['options']}: {ratio:.4f} of its step on a resident batch")


def ways(workers: list[int], on_gpu: bool) -> list[dict]:
    """Return what --feeds compares, as columns of its rows."""
    names = ("feed", "num_workers", "pinned", "store")
    found = [(feed, n, "yes", "memory") for feed in ("samples", "batches") for n in workers]
    found += [(feed, 0, "yes", "memory") for feed in ("prefetched", "resident")]
    found += [(feed, workers[-1], "no", "memory") for feed in ("samples", "batches") if on_gpu]
    found += [(feed, workers[-1], "yes", "file") for feed in ("samples", "batches")]
    found += [("prefetched", 0, "yes", "file")]
    found += [("samples", n, "yes", "JPEG files") for n in workers[1:]]
    return [dict(zip(names, way, strict=True)) for way in found]


def feeds(args: argparse.Namespace, folder: str) -> None:
    """Measure each way of topics/feeding.py, in turns, and record them."""
    device, order = common.take_device(), torch.Generator()
    fast = device.type == "cuda"
    bare = make_step(args, device, fast, False, floats=True)
    step = make_step(args, device, fast, False, floats=False)
    data = common.load_datasets(args)[0]
    jpegs = Jpegs(folder, *data.tensors)
    images = torch.stack([jpegs[index][0] for index in range(len(jpegs))])
    data = TensorDataset(images, jpegs.labels)  # what is decoded is the data of all ways
    np.save(f"{folder}/images.npy", data.tensors[0].numpy())
    mapped = torch.from_numpy(np.load(f"{folder}/images.npy", mmap_mode="c"))
    stores = {"memory": data, "file": TensorDataset(mapped, data.tensors[1]), "JPEG files": jpegs}
    sampler, batch = RandomSampler(data, generator=order), args.batch_size
    work = [({"feed": "bare"}, bare, [resident_batch(args, device, True)] * (len(data) // batch))]
    for way in ways(args.workers, fast):
        options = common.loader_options(SimpleNamespace(**way), device)
        loader = feeding.feed(
            SimpleNamespace(**way), stores[way["store"]], batch, sampler, device, options
        )
        work.append((way, step, loader))

    def move(*parts: torch.Tensor) -> None:
        for part in parts:
            part.to(device, non_blocking=True)

    # To warm up, and for what else is to be known: are the batches right, how fast is it alone?
    alone, fed = [None], []
    speed(bare, work[0][2], device)
    for _, _, loader in work[1:]:
        sums: list[torch.Tensor] = []

        def look(images: torch.Tensor, labels: torch.Tensor, sums: list = sums) -> None:
            step(images, labels)
            images, labels = images.to(device), labels.to(device)
            sums.append(images.sum(dtype=torch.int64) + labels.sum() * 10**6)

        order.manual_seed(0)
        speed(look, loader, device)
        fed.append(torch.stack(sums).tolist())
        alone.append(round(speed(move, loader, device), 1))
    assert all(sums == fed[0] for sums in fed), "not all of them give the same batches"

    found: list[list[float]] = [[] for _ in work]
    for window in range(args.windows):
        for (_, train, loader), speeds in zip(work, found, strict=True):
            order.manual_seed(window)
            speeds.append(speed(train, loader, device))
    for (way, *_), speeds, quickest in zip(work, found, alone, strict=True):
        middle = statistics.median(speeds)
        share = middle / statistics.median(found[0])
        row = dict.fromkeys(("feed", "num_workers", "pinned", "store")) | way
        row |= {name: getattr(args, name) for name in ("model", "image_size", "batch_size")}
        row |= {"dataset": args.dataset, "precision": "bf16" if fast else "fp32"}
        row |= {"threads": torch.get_num_threads(), "device": device.type}
        row |= {"windows": len(speeds), "alone": quickest} | scaling.median_of(speeds)
        row |= {"of_bare": round(share, 4)}
        scaling.append(args.csv, row | machine.describe())
        print(*way.values(), f"| {middle:.0f} samples/s, {share:.3f} of the bare step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", default="00_single_gpu.py")
    parser.add_argument("--extra", action="append", default=[], help="one option more of it")
    parser.add_argument("--model", default="small")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=512, help="training images an epoch")
    parser.add_argument("--dataset", help="default: fake, of --images")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 8], help="of --feeds")
    parser.add_argument("--windows", type=int, default=3, help="measured after one to warm up")
    parser.add_argument("--feeds", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "data_loading.jsonl")
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "feeding.csv")
    args = parser.parse_args()
    args.dataset = args.dataset or f"fake:{args.images}"
    size, args.channels, _ = datasets.SIZES[args.dataset.partition(":")[0]]
    args.train_size = args.images = args.images if ":" in args.dataset else size
    left_out = {part for words in args.extra for part in words.partition("=")[2].split(",")}
    fixed = {"tf32", "bf16", "channels_last", "autotune", "fused"}
    if args.script == "topics/fast.py" and left_out & fixed:
        parser.error("the resident step has these on: --extra takes away compile, ddp, prefetch")
    if not args.feeds:
        return compare(args)
    with tempfile.TemporaryDirectory() as folder:
        feeds(args, folder)


if __name__ == "__main__":
    main()
