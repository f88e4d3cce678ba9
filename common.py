"""What the ladder does not teach: command line, data, model, evaluation, checkpoint file, output.

What a process does with the other processes is in the rungs. checks.py refuses what cannot work.
"""

import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import checks
from data import datasets


def parse_args(launcher: str = "python", **options: int | float | str | tuple) -> Namespace:
    """Return the options of the command line, with world_size and per_rank_batch.

    launcher: "python" (one process), "spawn", "torchrun", "multinode" (or srun) or "lightning".
    options: the script's own, as name=default; of a tuple of choices the first is the default.
    """
    add = (parser := checks.Parser()).add_argument
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=96, help="effective: of all ranks together")
    add("--lr", type=float, default=0.05, help="learning rate for that batch size")
    add("--seed", type=int, default=0)
    add("--dataset", default="digits", help=f"{', '.join(datasets.SIZES)}; fake:N has N images")
    add("--data-dir", default=datasets.DOWNLOADS, help="of the data sets that are downloaded")
    add("--model", default="small", help="small, wide or a torchvision classifier, as resnet50")
    add("--image-size", type=int, help="pixels a side; default: those of the data set")
    add("--num-workers", type=int, default=0, help="data loading processes of each rank")
    add("--checkpoint", metavar="FILE", help="save to FILE each epoch; resume where it exists")
    add("--log-json", metavar="FILE", help="append one object an epoch to FILE")
    add("--timeout", type=checks.seconds, default="300", help="longest wait for another rank")
    for name, default in options.items():
        choices = default if isinstance(default, tuple) else None
        first = choices[0] if choices else default
        add(f"--{name.replace('_', '-')}", type=type(first), default=first, choices=choices)
    return checks.check(parser.parse_args(), launcher)


def gpu_count() -> int:
    """Return how many GPUs this node's processes can share out (Apple's mps: 0, no collectives)."""
    return 0 if torch.backends.mps.is_available() else torch.accelerator.device_count()


def take_device(local_rank: int | None = None) -> torch.device:
    """Make GPU local_rank this process's current device and return it; the CPU without a GPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (local_rank is not None and not gpu_count()):
        return torch.device("cpu")
    # One GPU: the process is alone, or the scheduler shows each its own (srun --gpus-per-task=1).
    device = torch.device(accelerator.type, 0 if gpu_count() == 1 else local_rank or 0)
    torch.accelerator.set_device_index(device.index)
    return device


def load_datasets(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of (image uint8 (channels, pixels, pixels), label int64 ())."""
    if args.dataset != "digits":
        return datasets.load(args)  # torchvision's, or noise of any size
    digits = {name: torch.from_numpy(array) for name, array in np.load(datasets.DIGITS).items()}
    train_set = TensorDataset(digits["train_images"][:, None], digits["train_labels"].long())
    return train_set, TensorDataset(digits["test_images"][:, None], digits["test_labels"].long())


def loader_options(args: Namespace, device: torch.device) -> dict:
    """Return what all DataLoaders of a run share. A GPU copies pinned memory while it computes."""
    options = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    return options | {"pin_memory": device.type == "cuda", "worker_init_fn": checks.ignore_signals}


class BytesToFloats(nn.Module):
    """The first layer: uint8 images become floats of mean 0 and variance 1, of the model's size."""

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = nn.functional.layer_norm(images.to(torch.get_default_dtype()), images.shape[1:])
        if images.shape[-1] != self.size:
            images = nn.functional.interpolate(images, self.size, mode="bilinear")
        return images.expand(-1, self.channels, -1, -1)


def build_model(args: Namespace) -> nn.Module:
    """Return a network from uint8 images (N, channels, pixels, pixels) to logits (N, 10).

    The small one gives the same numbers at every world size. It has no kink, where a difference of
    rounding grows (so GELU, not ReLU), and nothing that depends on how a batch is split.
    """
    channels, size = args.channels, args.image_size
    if args.model == "small":
        layers = [nn.Conv2d(channels, 16, 5, padding=2), nn.GELU(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(16, 32, 5, padding=2), nn.GELU(), nn.AvgPool2d(2), nn.Flatten()]
        layers += [nn.Linear(32 * (size // 4) ** 2, 64), nn.GELU(), nn.Linear(64, 10)]
    elif args.model == "wide":  # many weights, little arithmetic: communication-bound
        layers = [nn.Flatten(), nn.Linear(channels * size**2, 4096), nn.GELU()]
        layers += [nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)]
    else:
        from torchvision.models import get_model  # here, not above: it takes a second

        vit = {"image_size": size} if args.model.startswith("vit") else {}
        channels, layers = 3, [get_model(args.model, weights=None, num_classes=10, **vit)]
    return nn.Sequential(BytesToFloats(channels, size), *layers)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> torch.Tensor:
    """Return (2,): correct samples and all samples of this loader. No communication."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        sums[0] += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        sums[1] += len(labels)
    return sums


def save_checkpoint(args: Namespace, epochs: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the state after that many epochs to --checkpoint; at every moment the file is whole."""
    if not args.checkpoint:
        return
    state = {name: getattr(args, name) for name in checks.RESUME_KEYS} | {"epochs": epochs}
    state |= {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    state |= {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng}
    path = Path(args.checkpoint).resolve()  # the file itself, where this is a link to it
    temporary = path.with_name(f"{path.name}.tmp")  # on the same disk, for os.replace
    with checks.saving(state, temporary), open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the new name with nothing behind it
    os.replace(temporary, path)


def read_checkpoint(args: Namespace) -> dict | None:
    """Return the state in --checkpoint, on the CPU; None where there is no such file."""
    if not args.checkpoint or not os.path.lexists(args.checkpoint):
        return None
    with checks.reading(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    return checks.resumable(state, args)


def resume(state: dict, args: Namespace, model: nn.Module, optimizer: Optimizer) -> int:
    """Load a state of read_checkpoint; return the epochs that are behind it."""
    with checks.reading(args.checkpoint):
        model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args.lr  # not that of the first part
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"])
    return state["epochs"]


def print_start(args: Namespace, device: torch.device) -> None:
    """Print the start line: what runs, on what, with which effective batch."""
    ranks = f"{Path(sys.argv[0]).name} | world size {args.world_size}"
    batch = f"batch {args.per_rank_batch} x {args.world_size} = {args.batch_size} | lr {args.lr}"
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    where = f"device {device.type} | backend {backend} | threads {torch.get_num_threads()}"
    print(f"{ranks} | {batch} | {where} | torch {torch.__version__}\n", end="", flush=True)


def progress(loader: DataLoader, epoch: int) -> tqdm:
    """Return the loader with a progress bar, which shows on rank 0 and on a terminal only."""
    return tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=checks.rank() > 0 or None)


def seconds_since(start: float, device: torch.device) -> float:
    """Return the seconds since time.perf_counter() was start, once the device has done its work."""
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


def log_epoch(args: Namespace, epoch: int, sums: torch.Tensor, seconds: float) -> None:
    """Print the metric line, append to --log-json.

    sums (4,), over all ranks: train loss times samples, train samples, correct, test samples.
    """
    loss, trained, correct, tested = sums.tolist()
    loss, accuracy, speed = loss / trained, correct / tested, trained / seconds
    line = f"train loss {loss:.4f} | test accuracy {accuracy:.1%} | {speed:.0f} samples/s"
    print(f"epoch {epoch + 1}/{args.epochs} | {line}\n", end="", flush=True)
    if args.log_json:
        entry = vars(args) | {"rung": Path(sys.argv[0]).name, "epoch": epoch + 1}
        entry |= {"train_loss": loss, "test_accuracy": accuracy, "test_samples": int(tested)}
        entry |= {"samples_per_second": speed, "device": sums.device, "torch": torch.__version__}
        checks.append_line(json.dumps(entry, default=str), args.log_json)
