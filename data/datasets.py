"""The data sets beside the digits: those of torchvision, downloaded, and noise of any size.

A machine without a network takes what another one has downloaded. Where there is one:

    python data/datasets.py MNIST
    python data/datasets.py CIFAR10 --data-dir /scratch/me
"""

import sys
from argparse import Namespace
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))  # the repo's root
import checks

DIGITS = Path(__file__).with_name("digits.npz")
DOWNLOADS = Path(__file__).with_name("downloads")
# name -> training images, channels, pixels a side
SIZES = {"digits": (4_000, 1, 28), "MNIST": (60_000, 1, 28), "FashionMNIST": (60_000, 1, 28)}
SIZES |= {"CIFAR10": (50_000, 3, 32), "fake": (2_048, 3, 64)}


def load(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of (image uint8 (channels, pixels, pixels), label int64 ())."""
    if args.dataset.startswith("fake"):  # noise, brighter for a higher label
        labels = torch.arange(args.train_size) % 10
        shape, seed = (256, 3, args.image_size, args.image_size), torch.Generator().manual_seed(0)
        noise = torch.randint(128, shape, dtype=torch.uint8, generator=seed)
        images = noise[torch.arange(args.train_size) % len(noise)]
        images += (labels * 12).to(torch.uint8)[:, None, None, None]
        return TensorDataset(images, labels), TensorDataset(images[::4], labels[::4])
    sets = []
    for part in find_or_download(args.dataset, Path(args.data_dir)):
        # (N, pixels, pixels) or (N, pixels, pixels, channels)
        images = torch.as_tensor(part.data).reshape(len(part), *part.data.shape[1:3], -1)
        sets.append(TensorDataset(images.movedim(-1, 1), torch.as_tensor(part.targets).long()))
    return tuple(sets)


def find_or_download(name: str, folder: Path) -> list:
    """Return torchvision's training and test set. Of the processes on a node one downloads.

    To read needs no permission to write: only who downloads takes the lock.
    """
    from torchvision import datasets  # here, not above: it takes a second

    def make(download: bool) -> list:
        return [
            getattr(datasets, name)(folder, train, download=download) for train in (True, False)
        ]

    try:
        return make(download=False)
    except RuntimeError:  # not found, or not complete
        pass
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=1800):  # seconds
            return make(download=True)
    except (OSError, RuntimeError) as error:  # filelock's Timeout is an OSError
        where = "" if folder == DOWNLOADS else f" --data-dir {folder}"
        command = f"python data/datasets.py {name}{where}"
        checks.fail(f"cannot download {name} ({error}). Where there is a network, run: {command}")


if __name__ == "__main__":
    parser = checks.Parser()
    names = [name for name in SIZES if name not in ("digits", "fake")]
    parser.add_argument("dataset", choices=names)
    parser.add_argument("--data-dir", type=Path, default=DOWNLOADS)
    args = parser.parse_args()
    find_or_download(args.dataset, args.data_dir)
    print(f"{args.dataset} is in {args.data_dir}")
