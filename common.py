"""What the ladder does NOT teach: command line, data, model, evaluation, checkpoint file, output.

What a process does with its device and with the other processes stands in the rungs themselves.
"""

import atexit
import json
import logging
import os
import shutil
import socket
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch import nn
from torch.multiprocessing import ProcessExitedException
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

DATA = Path(__file__).parent / "data"
# name -> training images, channels, pixels a side
DATASETS = {"digits": (4_000, 1, 28), "MNIST": (60_000, 1, 28), "FashionMNIST": (60_000, 1, 28)}
DATASETS |= {"CIFAR10": (50_000, 3, 32), "fake": (2_048, 3, 64)}
# Lightning's strategies that make all ranks' processes from this one, and its precisions.
FORKS = ("ddp_spawn", "ddp_fork", "ddp_notebook")
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
# What a resumed run must have in common with the first part of it.
SETTINGS = ("model", "dataset", "image_size", "batch_size", "seed")

if sys.platform == "win32":  # torch for Windows has no libuv, and its rendezvous would ask for it
    os.environ.setdefault("USE_LIBUV", "0")

# ---- this process --------------------------------------------------------------------------------


def rank() -> int:
    """Return this process's rank, 0 where it is alone: rank 0 prints and writes files."""
    told = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return dist.get_rank() if dist.is_initialized() else int(next(filter(None, told), 0))


def fail(message: str) -> NoReturn:
    """Exit with code 2 and one line on stderr: a user's mistake needs no traceback.

    A node's first process speaks. The others give it 10 s, because a launcher ends them all as soon
    as one has ended.
    """
    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", rank()))) > 0:
        time.sleep(10)
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _excepthook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Spare the user a traceback that is not about our code."""
    if not issubclass(kind, (ProcessExitedException, KeyboardInterrupt)):
        sys.__excepthook__(kind, error, trace)
    elif getattr(error, "exit_code", None) != 2:  # else a rank has called fail()
        print(f"{Path(sys.argv[0]).name}: {str(error) or 'interrupted'}", file=sys.stderr)


sys.excepthook = _excepthook
# A Gloo thread that drops its last tensor when Python is already shutting down aborts the process
# ("terminate called without an active exception"). This lets it do that before.
atexit.register(time.sleep, 0.2)


def gpu_count() -> int:
    """Return how many GPUs the processes of this node can share out (mps: 0, no collectives)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator and accelerator.type != "mps" else 0


def pick_device(local_rank: int | None = None) -> torch.device:
    """Make this process's device the current one and return it. None: the process is alone.

    Where a scheduler shows each process its own GPU only (srun --gpus-per-task=1), that is number 0
    for all of them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or (local_rank is not None and not gpu_count()):
        return torch.device("cpu")
    own_gpu = gpu_count() == 1 and "LOCAL_WORLD_SIZE" not in os.environ
    device = torch.device(accelerator.type, 0 if own_gpu else local_rank or 0)
    torch.accelerator.set_device_index(device.index)
    return device


def free_port() -> str:
    """Return a TCP port that nobody listens on: two runs on one machine must not collide."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


# ---- command line --------------------------------------------------------------------------------


def parse_args(launcher: str = "python", **options: int | float | str) -> Namespace:
    """Read a script's command line and refuse, with one line, what cannot work.

    launcher: who starts the processes: "python" (there is one), "spawn", "torchrun" (one node),
    "multinode" (torchrun or srun, any number of nodes) or "lightning".
    options: what this script takes beside the common options, as name=default.
    """
    parser = ArgumentParser(formatter_class=RawDescriptionHelpFormatter)
    parser.description, parser.error = sys.modules["__main__"].__doc__, fail
    add, stem = parser.add_argument, Path(sys.argv[0]).stem
    add("--epochs", type=int, default=5)
    add("--batch-size", type=int, default=96, help="effective: of all ranks together")
    add("--lr", type=float, default=0.05, help="learning rate for that batch size")
    add("--seed", type=int, default=0)
    add("--dataset", default="digits", help=f"{', '.join(DATASETS)}; fake:N has N training images")
    add("--model", default="small", help="small, wide or a torchvision classifier, as resnet50")
    add("--image-size", type=int, help="pixels a side; default: those of the data set")
    add("--num-workers", type=int, default=0, help="data loading processes of each rank")
    add("--checkpoint", default=f"checkpoints/{stem}.pt", help="'' turns saving off")
    add("--log-json", metavar="FILE", help="append one object an epoch to FILE")
    add("--local-rank", "--local_rank", help=SUPPRESS)  # torch.distributed.launch adds it
    if launcher != "python":
        add("--timeout", type=float, default=120, help="seconds a rank waits for the others")
    for name, default in options.items():
        add(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()

    _check_work(args)
    if launcher == "lightning":
        _check_lightning(args, options["num_nodes"])
    _check_launch(launcher, args)
    try:  # now, not after the first epoch
        for path in filter(None, (args.checkpoint, args.log_json)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if not os.access(Path(path).parent, os.W_OK):
                raise PermissionError("its folder is read-only")
            if os.path.exists(path):
                open(path, "rb").close()
    except OSError as error:
        fail(f"cannot use {path}: {error}")
    return args


def _check_work(args: Namespace) -> None:
    """Add the sizes of the data set; refuse numbers, data and models that cannot work."""
    name, _, size = args.dataset.partition(":")
    if name not in DATASETS or (size and not (name == "fake" and size.isdecimal())):
        fail(f"no --dataset {args.dataset}: use {', '.join(DATASETS)} or fake:N")
    train_size, args.channels, native_size = DATASETS[name]
    args.train_size, args.image_size = int(size or train_size), args.image_size or native_size
    counts = ("epochs", "batch_size", "nproc", "devices", "num_nodes", "pieces", "base_batch")
    for name in (*counts, "lr", "timeout"):
        if not getattr(args, name, 1) > 0:
            fail(f"--{name.replace('_', '-')} must be more than 0")
    if args.num_workers < 0:
        fail("--num-workers must be 0 or more")
    if args.batch_size > args.train_size:
        fail(f"--batch-size {args.batch_size} is more than the {args.train_size} training images")
    if args.model != "small" or args.image_size != native_size:
        try:  # a dry run: meta tensors have shapes, but neither memory nor arithmetic
            with torch.device("meta"):
                build_model(args)(torch.zeros(2, args.channels, *[args.image_size] * 2)).argmax(1)
        except Exception as error:
            fail(f"--model {args.model} with --image-size {args.image_size} does not work: {error}")


def _check_launch(launcher: str, args: Namespace) -> None:
    """Add world_size and per_rank_batch; refuse numbers of processes that cannot work."""
    env, by_torchrun = os.environ, "TORCHELASTIC_RUN_ID" in os.environ
    tasks, nodes = (int(env.get(f"SLURM_STEP_NUM_{what}", 1)) for what in ("TASKS", "NODES"))
    at_most = nodes if by_torchrun else 1 if launcher in ("python", "spawn") else tasks
    if tasks > at_most:
        fail(f"srun has started it {tasks} times on {nodes} nodes: use --ntasks-per-node=1")
    if by_torchrun and launcher in ("python", "spawn"):
        fail("is not for torchrun: start it with python, or use 02_torchrun.py")
    if launcher in ("torchrun", "multinode"):
        needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := ", ".join(name for name in needed if name not in env):
            command = f"torchrun --standalone --nproc-per-node={gpu_count() or 2} {sys.argv[0]}"
            fail(f"no launcher has set {missing}. Start it with: {command}")
        args.world_size, on_node = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", 1))
        if launcher == "torchrun" and on_node != args.world_size:
            fail(f"is for one node; for {args.world_size} ranks on several use 03_multinode.py")
    else:
        on_node = getattr(args, "nproc", getattr(args, "devices", 1))
        args.world_size = on_node * getattr(args, "num_nodes", 1)
    if on_node > (gpus := gpu_count()) > 0:
        fail(f"{on_node} processes for {gpus} GPUs: start {gpus} (CUDA_VISIBLE_DEVICES= for CPU)")
    args.per_rank_batch, rest = divmod(args.batch_size, args.world_size)
    if rest:
        low = args.batch_size - rest
        sizes = f"{low} or {low + args.world_size}" if low else f"{args.world_size}"
        fail(f"--batch-size {args.batch_size} does not split into {args.world_size}: use {sizes}")


def _check_lightning(args: Namespace, nodes: int) -> None:
    """Refuse what cannot work or would wait for ever. nodes: those that the launcher has."""
    env, by_torchrun = os.environ, "TORCHELASTIC_RUN_ID" in os.environ
    ranks = int(env.get("WORLD_SIZE" if by_torchrun else "SLURM_NTASKS", 0))
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))  # of this srun; without srun 1
    started = by_torchrun or tasks > 1
    # By these names Lightning knows a shell, where it starts this node's ranks itself.
    shell = not by_torchrun and env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    each_a_rank = ranks > 1 and not (by_torchrun or shell)  # each task of Slurm
    on_node, told = (ranks or nodes) // nodes, "SLURM_NTASKS_PER_NODE" in env
    srun = "srun --job-name=train" if shell else "srun"
    srun += "" if told else f" --nodes={nodes} --ntasks-per-node={on_node}"
    alone_of_nodes = not (each_a_rank or started) and min(nodes, args.num_nodes) > 1
    if alone_of_nodes or (each_a_rank and ranks > tasks):
        fail(f"waits for the other tasks of the Slurm job: start it with {srun} python, not python")
    if shell and started:
        fail(f"each of {ranks} tasks would train alone: use {srun} python")
    if each_a_rank and not told:
        fail(f"Lightning needs --ntasks-per-node, not --ntasks: start it with {srun} python")
    if each_a_rank and on_node > gpu_count() == 1:
        seen = f"{on_node} tasks on a node, and each sees one GPU. In Lightning it must see all"
        fail(f"{seen}: use --gpus-per-node={on_node}, not --gpus-per-task")
    if ranks and not shell and (ranks, nodes) != (args.devices * args.num_nodes, args.num_nodes):
        asked = f"--devices {args.devices} on --num-nodes {args.num_nodes}"
        fail(f"{asked}, but {ranks} ranks have been started on {nodes}: make them equal")
    name = args.strategy
    for_gpus = {"fsdp": "topics.fsdp", "deepspeed_stage_2": "topics.zero_optimizer"}
    known = ("ddp", *FORKS, "sync_once", *for_gpus)
    if name not in known:
        fail(f"no --strategy {name}: use {', '.join(known)}")
    if name in FORKS and started:
        fail(f"--strategy {name} makes its own processes: start it with python, or use ddp")
    if name in for_gpus and not gpu_count():
        other = f"torchrun -m {for_gpus[name]}"
        fail(f"--strategy {name} is for GPUs only in Lightning: use {other}, or ddp")
    if name == "deepspeed_stage_2" and not find_spec("deepspeed"):
        fail("--strategy deepspeed_stage_2 needs deepspeed: pip install deepspeed")
    if args.precision not in PRECISIONS:
        fail(f"no --precision {args.precision}: use {', '.join(PRECISIONS)}")
    if args.checkpoint.endswith(".ckpt"):
        fail(f"{args.checkpoint} would be Lightning's own file: let --checkpoint end with .pt")


# ---- data, model, evaluation ---------------------------------------------------------------------


def load_datasets(args: Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of (image uint8 (channels, pixels, pixels), label int64 ()).

    Of the processes on a node the first one downloads; the others wait for its lock. Without a
    network: SystemExit, with the command to run elsewhere.
    """
    name = args.dataset.partition(":")[0]
    if name == "fake":  # noise, brighter for a higher label
        labels = torch.arange(args.train_size) % 10
        shape, seed = (256, 3, *[args.image_size] * 2), torch.Generator().manual_seed(0)
        noise = torch.randint(128, shape, dtype=torch.uint8, generator=seed)
        images = noise[torch.arange(len(labels)) % len(noise)]
        images += (labels * 12).to(torch.uint8)[:, None, None, None]
        return TensorDataset(images, labels), TensorDataset(images[::4], labels[::4])
    if name == "digits":
        file = np.load(DATA / "digits.npz")
        parts = [(file[f"{part}_images"], file[f"{part}_labels"]) for part in ("train", "test")]
    else:
        from torchvision import datasets  # here, not above: it takes a second

        make, folder = getattr(datasets, name), DATA / "downloads"
        try:
            folder.mkdir(exist_ok=True)
            with FileLock(folder / "lock", timeout=1800):
                found = [make(folder, train, download=True) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            command = f"python 00_single_gpu.py --dataset {name} --epochs 1"
            fail(f"cannot download {name} ({error}). Where there is a network, run: {command}")
        parts = [(part.data, part.targets) for part in found]
    sets = []
    for images, labels in parts:
        images = torch.as_tensor(images).reshape(len(labels), *images.shape[1:3], -1)
        sets.append(TensorDataset(images.movedim(-1, 1), torch.as_tensor(labels).long()))
    return tuple(sets)


def loader_options(args: Namespace, device: torch.device) -> dict:
    """Return what all DataLoaders of a run share. A GPU copies pinned memory while it computes."""
    pin, workers = device.type == "cuda", args.num_workers
    return {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": pin}


def _prepare(module: nn.Module, inputs: tuple, channels: int, size: int) -> torch.Tensor:
    """Turn uint8 images into floats of mean 0, variance 1, in the model's size and channels."""
    images = inputs[0].to(torch.get_default_dtype())
    images = F.layer_norm(images, images.shape[1:])
    if images.shape[-1] != size:
        images = F.interpolate(images, size, mode="bilinear")
    return images.expand(-1, channels, -1, -1)


def build_model(args: Namespace) -> nn.Module:
    """Return a network from images (N, channels, pixels, pixels) uint8 to logits (N, 10).

    The small one has no kink (GELU and average pooling, not ReLU and max pooling): where rounding
    flips a kink, a difference grows. It has no batch norm and no dropout: those depend on how a
    batch is split. So its numbers are the same at every world size.
    """
    if args.model == "small":
        channels, features = args.channels, 32 * (args.image_size // 4) ** 2
        layers = [nn.Conv2d(channels, 16, 5, padding=2), nn.GELU(), nn.AvgPool2d(2)]
        layers += [nn.Conv2d(16, 32, 5, padding=2), nn.GELU(), nn.AvgPool2d(2), nn.Flatten()]
        layers += [nn.Linear(features, 64), nn.GELU(), nn.Linear(64, 10)]
        model = nn.Sequential(*layers)
    elif args.model == "wide":  # many weights, little arithmetic: communication-bound
        channels, features = args.channels, args.channels * args.image_size**2
        layers = [nn.Flatten(), nn.Linear(features, 4096), nn.GELU(), nn.Linear(4096, 4096)]
        model = nn.Sequential(*layers, nn.GELU(), nn.Linear(4096, 10))
    else:
        from torchvision.models import get_model

        size = {"image_size": args.image_size} if args.model.startswith("vit") else {}
        channels, model = 3, get_model(args.model, weights=None, num_classes=10, **size)
    # Images travel as bytes, a quarter of the floats, and become floats on the device.
    model.register_forward_pre_hook(partial(_prepare, channels=channels, size=args.image_size))
    return model


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> torch.Tensor:
    """Return (2,): correct samples and all samples of this loader. No communication."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for images, labels in loader:
        sums[0] += (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        sums[1] += len(labels)
    return sums


# ---- checkpoint file -----------------------------------------------------------------------------


def save_checkpoint(args: Namespace, epochs: int, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the state after that many epochs; at every moment a whole file is there to be read.

    The one before it stays as FILE.previous. A kill leaves at most a FILE.PID.tmp behind.
    """
    if not args.checkpoint:
        return
    path = Path(args.checkpoint)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # on the same disk, for os.replace
    state = {name: getattr(args, name) for name in SETTINGS} | {"epochs": epochs}
    state |= {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["rng"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    with writing(temporary):
        if path.exists():
            shutil.copyfile(path, temporary)
            os.replace(temporary, f"{path}.previous")
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def writing(path: Path, option: str = "--checkpoint") -> Iterator[None]:
    """Turn a full disk or a spent quota into one line, and leave the file as it was."""
    size = path.stat().st_size if path.is_file() else 0
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError, and why in its context
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if path.is_file():
            os.truncate(path, size) if size else path.unlink()
        why = cause.strerror or cause
        fail(f"cannot write {path}: {why}. Make room, or use another {option}")


def set_up_lightning() -> None:
    """Silence Lightning's notes on how it starts, and let a kill leave no half of its .ckpt.

    It writes that file in /tmp, and where this is another disk it copies it from there.
    """
    from lightning.pytorch.plugins import TorchCheckpointIO

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in ("`isinstance.treespec", "The `srun` command", "Checkpoint directory .* not empty"):
        warnings.filterwarnings("ignore", text)

    def save_checkpoint(self, checkpoint, path, storage_options=None):  # rank 0 calls this
        temporary = Path(f"{path}.tmp")
        with writing(temporary):
            save(self, checkpoint, temporary, storage_options)
            os.replace(temporary, path)

    save, TorchCheckpointIO.save_checkpoint = TorchCheckpointIO.save_checkpoint, save_checkpoint


def read_checkpoint(args: Namespace) -> dict | None:
    """Return the state in --checkpoint, on the CPU, or None where there is none.

    A torn file is reported, and the one before it is used.
    """
    for path in (args.checkpoint, f"{args.checkpoint}.previous"):
        try:
            if args.checkpoint and os.path.exists(path):
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # a torn file: RuntimeError, EOFError, UnpicklingError ...
            if rank() == 0:
                print(f"warning: {path} is torn, going back to the one before it", file=sys.stderr)
    return None


def check(state: dict | None, args: Namespace) -> None:
    """Say what a state has behind it; refuse, with one line, one that does not fit this run."""
    if state is None:
        return
    if "weights" not in state:
        fail(f"{args.checkpoint} is not a checkpoint of these scripts. Use another --checkpoint")
    for name in SETTINGS:
        if state[name] != getattr(args, name):
            option = f"--{name.replace('_', '-')} {state[name]}"
            fail(f"{args.checkpoint} was made with {option}. Use that, or another --checkpoint")
    if rank() == 0:
        rest = "going on" if state["epochs"] < args.epochs else "nothing left to do: raise --epochs"
        print(f"{args.checkpoint}: has {state['epochs']} epochs, {rest}", flush=True)


def restore(state: dict | None, args: Namespace, model: nn.Module, optimizer: Optimizer) -> int:
    """Load a state of read_checkpoint; return the epochs that are behind it, 0 for None."""
    if state is None:
        return 0
    check(state, args)
    model.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    for group in optimizer.param_groups:
        group["lr"] = args.lr
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"])
    if rank() == 0 and state["epochs"] >= args.epochs:
        loader, device = DataLoader(load_datasets(args)[1], 100), next(model.parameters()).device
        correct, tested = evaluate(model, loader, device).tolist()
        print(f"{args.checkpoint}: test accuracy {correct / tested:.1%}", flush=True)
    return state["epochs"]


# ---- output, all of it on rank 0 -----------------------------------------------------------------


def print_start(args: Namespace, device: torch.device) -> None:
    """Print the start line: what runs, on what, with which effective batch."""
    ranks = f"{Path(sys.argv[0]).name} | world size {args.world_size}"
    batch = f"batch {args.per_rank_batch} x {args.world_size} = {args.batch_size} | lr {args.lr}"
    where = f"device {device.type} | backend {backend()} | threads {torch.get_num_threads()}"
    print(f"{ranks} | {batch} | {where} | torch {torch.__version__}", flush=True)


def backend() -> str:
    """Return the name of the library that carries the collectives, "none" where there are none."""
    return dist.get_backend() if dist.is_initialized() else "none"


def progress(loader: DataLoader, epoch: int) -> tqdm:
    """Return the loader with a progress bar, which shows on rank 0 and on a terminal only."""
    return tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=True if rank() else None)


def seconds_since(start: float, device: torch.device) -> float:
    """Return the seconds since time.perf_counter() was start, once the device has done its work.

    With RANK_LOG=FOLDER in the environment, as benchmarks/ sets it, each rank also writes them
    there, with its peak memory in bytes (of tensors on a GPU, else of the process).
    """
    if device.type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    if folder := os.environ.get("RANK_LOG"):
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            from resource import RUSAGE_SELF, getrusage  # not on Windows

            memory = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        with open(Path(folder, f"{rank()}.jsonl"), "a") as file:
            print(json.dumps({"seconds": seconds, "peak_memory": memory}), file=file)
    return seconds


def log_epoch(args: Namespace, epoch: int, sums: torch.Tensor, seconds: float) -> None:
    """Print the metric line, append to --log-json.

    sums (4,), over all ranks: train loss times samples, train samples, correct, test samples.
    """
    loss, trained, correct, tested = sums.tolist()
    loss, accuracy, speed = loss / trained, correct / tested, trained / seconds
    line = f"train loss {loss:.4f} | test accuracy {accuracy:.1%} | {speed:.0f} samples/s"
    print(f"epoch {epoch + 1}/{args.epochs} | {line}", flush=True)
    if args.log_json:
        names = ("world_size", "lr", "seed", "per_rank_batch")
        entry = {"rung": Path(sys.argv[0]).name} | {name: getattr(args, name) for name in names}
        entry |= {"effective_batch": args.batch_size, "epoch": epoch + 1, "train_loss": loss}
        entry |= {"test_accuracy": accuracy, "test_samples": int(tested)}
        entry |= {"samples_per_second": speed, "device": sums.device.type}
        entry |= {"backend": backend(), "torch": torch.__version__}
        with writing(Path(args.log_json), "--log-json"), open(args.log_json, "a") as file:
            print(json.dumps(entry), file=file)
