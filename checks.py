"""Refuses in one line what cannot work: wrong options, wrong launches, files that cannot be used.

Nobody needs to read this before it has spoken. common.parse_args calls check(); the rest is called
where a file is read or written, and, by the rungs, where all ranks have to agree.
"""

import errno
import logging
import math
import multiprocessing
import os
import re
import shlex
import signal
import socket
import sys
import time
import warnings
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from argparse import RawDescriptionHelpFormatter as Raw
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  before there is a group: its defaults would keep it alive

# What a resumed run must have in common with the first part of it.
RESUME_KEYS = ("model", "dataset", "image_size", "batch_size", "seed")
# What ranks may differ in: all else decides the numbers.
FREE = ("data_dir", "num_workers", "timeout", "checkpoint", "log_json", "local_rank", "nproc")
FREE += ("start_epoch",)  # of Lightning's rung, which is compared by another name
# Lightning's strategies that make all ranks' processes from this one, and its precisions.
FORKING_STRATEGIES = ("ddp_fork", "ddp_notebook")
MULTIPROCESSING_STRATEGIES = ("ddp_spawn", *FORKING_STRATEGIES)
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
FINISHED = False  # whether the checkpoint has left nothing to do: resumable() sets it

if sys.platform == "win32":  # torch for Windows has no libuv, and its rendezvous would ask for it
    os.environ.setdefault("USE_LIBUV", "0")


def rank() -> int:
    """Return this process's rank, 0 where it is alone."""
    from_env = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
    return dist.get_rank() if dist.is_initialized() else int(next(filter(None, from_env), 0))


def fail(message: str, code: int = 2, all_ranks: bool = False) -> NoReturn:
    """Exit with this code and one line on stderr: a user's mistake needs no traceback.

    A node's first process speaks. The others give it 10 s, because a launcher ends them all as soon
    as one has ended. all_ranks: they all call this, so that NCCL's group can be destroyed too.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank()
    alone_of_spawn = multiprocessing.parent_process() and not all_ranks
    if dist.is_initialized() and not alone_of_spawn and (all_ranks or dist.get_backend() == "gloo"):
        dist.destroy_process_group()
    if int(local_rank) > 0 and _launcher_ended() and all_ranks:
        sys.exit(code)  # rank 0 has been that launcher, and has said it
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    if alone_of_spawn:  # at once: mp.spawn must not hear first of those that lose this connection
        os._exit(code)
    sys.exit(code)


def _remember_launcher() -> None:
    """Note who has started this process: torchrun, srun, mp.spawn; rank 0 of Lightning's own."""
    global LAUNCHER
    LAUNCHER = os.getppid()


_remember_launcher()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_remember_launcher)


def _launcher_ended() -> bool:
    """Give the launcher 10 s to end this process. Return whether it has ended itself."""
    for _ in range(100):
        if os.getppid() != LAUNCHER:
            return True
        time.sleep(0.1)
    return False


class Parser(ArgumentParser):
    """argparse, with the script's docstring as its help and errors of one line."""

    def __init__(self):
        super().__init__(description=sys.modules["__main__"].__doc__, formatter_class=Raw)
        # torch.distributed.launch adds it; our scripts read LOCAL_RANK
        self.add_argument("--local-rank", "--local_rank", help=SUPPRESS)

    def error(self, message: str) -> NoReturn:
        text, choose, choices = message.partition("(choose from ")
        fail(text + choose + choices.replace("'", ""))  # some Pythons quote them


def free_port() -> str:
    """Return a TCP port that nobody listens on: two runs on one machine must not collide."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def seconds(text: str) -> timedelta:
    """Return the type of --timeout, which torch.distributed takes as a timedelta."""
    if not 0 < float(text) < 1e9:
        raise ArgumentTypeError("must be more than 0 seconds")
    return timedelta(seconds=float(text))


# ---- once, from parse_args -----------------------------------------------------------------------


def check(args: Namespace, launcher: str) -> Namespace:
    """Return the options, with sizes of data, world and batch; refuse those that cannot work."""
    _check_work(args)
    _check_launch(launcher, args)
    _check_files(args)
    sys.excepthook = _excepthook
    # A notebook keeps its own handlers, so not ddp_notebook.
    if launcher == "spawn" or getattr(args, "strategy", "") in ("ddp_spawn", "ddp_fork"):
        _end_ranks_with_me()
    elif launcher == "lightning" and rank() == 0:
        signal.signal(signal.SIGINT, _interrupted_in_lightning)
    elif launcher == "python":
        signal.signal(signal.SIGINT, _interrupted)
    return args


def _check_work(args: Namespace) -> None:
    """Add the sizes of the data set; refuse numbers, data and models that cannot work."""
    import common
    from data.datasets import SIZES

    name, _, size = args.dataset.partition(":")
    if name not in SIZES or (size and not (name == "fake" and size.isdecimal())):
        fail(f"no --dataset {args.dataset}: use {', '.join(SIZES)} or fake:N")
    train_size, args.channels, native_size = SIZES[name]
    args.train_size, args.image_size = int(size or train_size), args.image_size or native_size
    positive = ("epochs", "batch_size", "image_size", "nproc", "devices", "num_nodes")
    for name in (*positive, "accumulation_steps", "base_batch", "bucket_mb", "lr"):
        if not 0 < getattr(args, name, 1) < math.inf:
            fail(f"--{name.replace('_', '-')} must be more than 0")
    for name in ("num_workers", "sleep", "warmup_epochs"):
        if getattr(args, name, 0) < 0:
            fail(f"--{name.replace('_', '-')} must be 0 or more")
    if args.batch_size > args.train_size:
        fail(f"--batch-size {args.batch_size} is more than the {args.train_size} training images")
    if args.model != "small" or args.image_size != native_size:
        try:  # a dry run: meta tensors have shapes, but neither memory nor arithmetic
            with torch.device("meta"):
                images = torch.zeros(2, args.channels, args.image_size, args.image_size)
                common.build_model(args)(images).argmax(1)
        except Exception as error:
            fail(f"--model {args.model} with --image-size {args.image_size} does not work: {error}")


def _check_launch(launcher: str, args: Namespace) -> None:
    """Add world_size and per_rank_batch; refuse numbers of processes that cannot work."""
    import common

    env, by_torchrun = os.environ, "TORCHELASTIC_RUN_ID" in os.environ
    if launcher == "lightning":
        _check_lightning(args)
    tasks, nodes = _slurm_step()
    agents = int(env.get("GROUP_WORLD_SIZE", 1))  # of torchrun: the nodes that it knows of
    script = " ".join(map(shlex.quote, sys.argv))
    if by_torchrun and tasks > nodes:
        fail(f"srun has started {tasks} torchruns on {nodes} nodes: use --ntasks-per-node=1")
    if by_torchrun and tasks > agents:
        wanted = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-id=MY_JOB"
        wanted += " --rdzv-endpoint=HEAD_NODE:29400"
        fail(f"srun has started {tasks} torchruns that do not know each other: torchrun {wanted}")
    if not by_torchrun and launcher in ("python", "spawn") and tasks > 1:
        fail(f"srun has started it {tasks} times on {nodes} nodes: use --ntasks-per-node=1")
    if by_torchrun and launcher in ("python", "spawn"):
        fail("is not for torchrun: start it with python, or use 02_torchrun.py")
    gpus = common.gpu_count()
    if launcher in ("torchrun", "multinode"):
        needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := ", ".join(name for name in needed if not env.get(name)):
            spec = sys.modules["__main__"].__spec__  # python -m topics.NAME has one
            words = f"-m {spec.name} {' '.join(map(shlex.quote, sys.argv[1:]))}" if spec else script
            command = f"torchrun --standalone --nproc-per-node={gpus or 2} {words.rstrip()}"
            fail(f"no launcher has set {missing}. Start it with: {command}")
        args.world_size, on_node = int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE") or 1)
        if launcher == "torchrun" and on_node != args.world_size:
            fail(f"is for one node; for {args.world_size} ranks on several use 03_multinode.py")
        on_node = max(on_node, int(env["LOCAL_RANK"]) + 1 if gpus > 1 else 1)
    else:
        on_node = getattr(args, "nproc", getattr(args, "devices", 1))
        args.world_size = on_node * getattr(args, "num_nodes", 1)
    if on_node > gpus > 0:
        fail(f"{on_node} processes for {gpus} GPUs: start {gpus} (CUDA_VISIBLE_DEVICES= for CPU)")
    args.per_rank_batch, rest = divmod(args.batch_size, args.world_size)
    if rest:
        low = args.batch_size - rest
        sizes = f"{low} or {low + args.world_size}" if low else f"{args.world_size}"
        fail(f"--batch-size {args.batch_size} does not split into {args.world_size}: use {sizes}")
    tested = -(-args.train_size // 4) if args.dataset.startswith("fake") else args.world_size
    if launcher == "lightning" and tested < args.world_size:  # whose loop skips a rank without one
        fail(f"--dataset {args.dataset} tests {tested} images: too few for {args.world_size} ranks")


def _slurm_step() -> tuple[int, int]:
    """Return how many tasks srun has started, on how many nodes: 1, 1 where it was not srun.

    The shell of srun --pty has the variables of its step, but what is typed there runs once. What
    an srun in that shell starts is told from it by its task's stdin, which is no terminal.
    """
    stdin = os.path.realpath(f"/proc/{os.environ.get('SLURM_TASK_PID')}/fd/0")
    shell = "SLURM_PTY_PORT" in os.environ and stdin.startswith("/dev/pts/")
    env = {} if shell else os.environ
    return tuple(int(env.get(f"SLURM_STEP_NUM_{what}") or 1) for what in ("TASKS", "NODES"))


def _check_lightning(args: Namespace) -> None:
    """Refuse what Lightning cannot do, or would wait for for ever."""
    import common

    env, by_torchrun = os.environ, "TORCHELASTIC_RUN_ID" in os.environ
    # What the launcher has started; Lightning has to be told the same.
    nodes = int(env.get("GROUP_WORLD_SIZE") or env.get("SLURM_NNODES") or 1)
    ranks = int(env.get("WORLD_SIZE" if by_torchrun else "SLURM_NTASKS") or 0)
    tasks = _slurm_step()[0]
    started = by_torchrun or tasks > 1
    # By these names Lightning knows a shell, where it starts this node's ranks itself.
    shell = not by_torchrun and env.get("SLURM_JOB_NAME") in ("bash", "interactive")
    each_a_rank = ranks > 1 and not (by_torchrun or shell)  # each task of Slurm
    on_node, per_node_given = (ranks or nodes) // nodes, "SLURM_NTASKS_PER_NODE" in env
    srun = "srun --job-name=train" if shell else "srun"
    srun += "" if per_node_given else f" --nodes={nodes} --ntasks-per-node={on_node}"
    alone_of_nodes = not (each_a_rank or started) and min(nodes, args.num_nodes) > 1
    if alone_of_nodes or (each_a_rank and ranks > tasks):
        fail(f"waits for the other tasks of the Slurm job: start it with {srun} python, not python")
    if shell and started:
        fail(f"each of {ranks} tasks would train alone: use {srun} python")
    if each_a_rank and not per_node_given:
        fail(f"Lightning needs --ntasks-per-node, not --ntasks: start it with {srun} python")
    if each_a_rank and on_node > common.gpu_count() == 1:
        seen = f"{on_node} tasks on a node, and each sees one GPU. In Lightning it must see all"
        fail(f"{seen}: use --gpus-per-node={on_node}, not --gpus-per-task")
    if ranks and not shell and (ranks, nodes) != (args.devices * args.num_nodes, args.num_nodes):
        wanted = f"--devices {args.devices} on --num-nodes {args.num_nodes}"
        fail(f"{wanted}, but {ranks} ranks have been started on {nodes}: make them equal")
    name = args.strategy
    for_gpus = {"fsdp": "topics.fsdp", "deepspeed": "topics.deepspeed_zero"}
    for_gpus |= {"deepspeed_stage_2": "topics.deepspeed_zero"}
    if name in FORKING_STRATEGIES and not hasattr(os, "fork"):
        fail(f"--strategy {name} needs os.fork, which Windows has not: use ddp_spawn")
    if name in FORKING_STRATEGIES and torch.cuda.is_initialized():
        fail(f"--strategy {name} forks, but this process has used a GPU: start it in a new one")
    if name in MULTIPROCESSING_STRATEGIES and started:
        fail(f"--strategy {name} makes its own processes: start it with python, or use ddp")
    if name in for_gpus and not common.gpu_count():
        other = f"torchrun --standalone --nproc-per-node=2 -m {for_gpus[name]}"
        fail(f"--strategy {name} is for GPUs only in Lightning: use {other}, or ddp")
    if name.startswith("deepspeed") and not find_spec("deepspeed"):
        fail(f"--strategy {name} needs deepspeed: pip install deepspeed")


def _check_files(args: Namespace) -> None:
    """Make the folders of the files that will be written, and see now whether that can work."""
    try:
        for path in filter(None, (args.checkpoint, args.log_json, getattr(args, "plain", None))):
            folder = Path(path).resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, "its folder is read-only")
            if os.path.exists(path) and not getattr(args, "strategy", "").startswith("deepspeed"):
                open(path, "rb").close()  # of DeepSpeed it is a folder
    except OSError as error:
        fail(f"cannot use {path}: {error.strerror or error}")


def _interrupted(number: int, frame: object) -> NoReturn:
    """Ctrl-C needs no traceback."""
    fail(f"ended by {signal.Signals(number).name}", 128 + number)


def _interrupted_in_lightning(number: int, frame: object) -> NoReturn:
    """Lightning ends its ranks at this exception, without a word."""
    print(f"{Path(sys.argv[0]).name}: ended by SIGINT", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def _end_ranks_with_me() -> None:
    """The parent of spawned and forked ranks: end them at Ctrl-C and SIGTERM, with one line.

    A script's & has SIGINT ignored, in the parent and in the ranks: a handler undoes that.
    """

    def end_ranks(number: int, frame: object) -> NoReturn:
        if multiprocessing.parent_process():  # a forked rank: its parent speaks
            os._exit(128 + number)
        for process in multiprocessing.active_children():
            process.terminate()
        _interrupted(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_ranks)


def _excepthook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Spare the user a traceback that is not about our code; show all others."""
    name = Path(sys.argv[0]).name
    if kind is BrokenPipeError or "\nBrokenPipeError:" in str(error):  # `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain once more
        print(f"{name}: ends, because nobody reads its output any more", file=sys.stderr)
    elif isinstance(error, RuntimeError) and " by peer" in str(error):  # torch's, not a socket's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, which a topic may collect
        if _launcher_ended():  # another rank has failed, and says why
            text = "has lost its connection to another rank, and its launcher has ended"
            print(f"{name}: rank {rank()} {text}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
    elif not isinstance(error, torch.multiprocessing.ProcessExitedException):
        sys.__excepthook__(kind, error, trace)
    elif error.exit_code not in (1, 2):  # else that rank has called fail()
        print(f"{name}: {error}", file=sys.stderr)


# ---- where a file is read or written -------------------------------------------------------------


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn whatever makes a checkpoint unreadable into one line. Nothing is overwritten then."""
    try:
        yield
    except Exception as error:  # OSError, RuntimeError, EOFError, UnpicklingError ...
        refused = re.search(r"(?:GLOBAL|class) (\S+) was not an allowed global", str(error))
        why = f"it holds a {refused[1]}, and weights_only=True takes plain data" if refused else ""
        if "loading state_dict" in str(error):
            why = "its model has other layers than this one"
        why = why or getattr(error, "strerror", None) or str(error).partition("\n")[0]
        why = why or type(error).__name__  # an EOFError has no words
        fail(f"cannot read {path}: {why}. Use another --checkpoint, or delete it")


def resumable(state: dict, args: Namespace) -> dict:
    """Return the state; say what it has behind it; refuse one that does not fit this run."""
    if not isinstance(state, dict) or not {"epochs", *RESUME_KEYS} <= set(state):
        fail(f"{args.checkpoint} is not a checkpoint of these scripts. Use another --checkpoint")
    for name in RESUME_KEYS:
        if state[name] != getattr(args, name):
            option = f"--{name.replace('_', '-')} {state[name]}"
            fail(f"{args.checkpoint} was made with {option}. Use that, or another --checkpoint")
    global FINISHED
    epochs = state["epochs"]
    FINISHED = epochs >= args.epochs
    if rank() == 0:
        more = f"nothing left to do: it has {epochs} epochs. For more raise --epochs"
        text = more if FINISHED else f"resumes after epoch {epochs}"
        print(f"{args.checkpoint}: {text}", flush=True)
    return state


@contextmanager
def writing(path: str | Path, option: str = "--log-json") -> Iterator[None]:
    """Turn a full disk or a spent quota into one line, and leave the file as it was."""
    path = Path(path)
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


@contextmanager
def saving(state: dict, temporary: Path) -> Iterator[None]:
    """Write a checkpoint's temporary file; refuse weights that are not finite."""
    for name, weights in state["weights"].items():
        if weights.is_floating_point() and not weights.isfinite().all():
            fail(f"{name} is not finite after epoch {state['epochs']}: nothing was saved", 1)
    temporary.unlink(missing_ok=True)  # of a run that was killed while it wrote
    with writing(temporary, "--checkpoint"):
        yield


def append_line(line: str, path: str) -> None:
    """Append a whole line to the file, or nothing."""
    with writing(path), open(path, "a") as file:
        print(line, file=file)


# ---- by the rungs --------------------------------------------------------------------------------


def from_rank_0(state: dict | None, model: torch.nn.Module) -> dict | None:
    """Return, on all ranks, the state that rank 0 has read, or None. All ranks call it.

    Momentum, as large as the weights, is sent tensor by tensor; what is small is pickled. A rank's
    weights are not sent: they are those that its model has, and DDP replaces them by rank 0's.
    """
    small = [None]
    if state:
        small = [state | {"weights": None, "optimizer": state["optimizer"] | {"state": {}}}]
    dist.broadcast_object_list(small)
    if not small[0]:
        return None
    received = small[0] | {"weights": state["weights"] if state else model.state_dict()}
    for index, weight in enumerate(model.parameters()):
        momentum = torch.empty_like(weight, requires_grad=False)
        if state:
            momentum.copy_(state["optimizer"]["state"][index]["momentum_buffer"])
        dist.broadcast(momentum, src=0)
        received["optimizer"]["state"][index] = {"momentum_buffer": momentum}
    return received


def same_on_all_ranks(args: Namespace, epochs: int, train_set: Sized | None = None) -> None:
    """Refuse ranks that would train something else than rank 0, on every rank. All ranks call it.

    epochs: those behind this rank. The checkpoint of another node must not be ignored either.
    train_set: Lightning would pass over one without a full batch in silence.
    """
    if train_set is not None and len(train_set) < args.batch_size:
        _no_full_batch(args)
    own = {f"--{k.replace('_', '-')}": str(v) for k, v in vars(args).items() if k not in FREE}
    own |= {"epochs behind it": epochs}
    exists = bool(args.checkpoint) and os.path.exists(args.checkpoint)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (own, exists))
    for number, (other, other_exists) in enumerate(ranks):
        for name, value in other.items():
            if value != (first := ranks[0][0].get(name)):
                text = f"rank 0 has {name} {first}, rank {number} has {value}"
                fail(f"{text}: make them equal", all_ranks=True)
        if other_exists and not ranks[0][1]:
            text = f"{args.checkpoint} is there for rank {number}, but not for rank 0"
            text += ": copy it to rank 0's machine, or put it on a disk that all nodes see"
            fail(text, all_ranks=True)


def _no_full_batch(args: Namespace, kept: str = "") -> NoReturn:
    text = f"no full batch of {args.batch_size} in the training set: nothing to train on"
    fail(text + kept, all_ranks=True)


def loss_is_finite(
    args: Namespace, epoch: int, sums: torch.Tensor, model: torch.nn.Module | None = None
) -> None:
    """End all ranks, which have the same sums, before a useless epoch spoils the checkpoint.

    model: one that common.save_checkpoint does not save, and so does not look at.
    """
    loss, samples = sums[:2].tolist()
    exists = args.checkpoint and os.path.exists(args.checkpoint)
    kept = f"; {args.checkpoint} stays as it was" if exists else ""
    if not samples:
        _no_full_batch(args, kept)
    if not math.isfinite(loss):
        text = f"train loss {loss / samples} in epoch {epoch + 1}{kept}"
        fail(f"{text}. Try a smaller --lr than {args.lr}", 1, all_ranks=True)
    if model is not None:  # the last step may have spoiled it; of FSDP's weights a rank has shards
        own = [w.to_local() if hasattr(w, "to_local") else w for w in model.parameters()]
        finite = torch.tensor(float(all(w.isfinite().all() for w in own))).to(sums.device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            text = f"a weight is not finite after epoch {epoch + 1}: nothing was saved"
            fail(f"{text}{kept}", 1, all_ranks=True)


def ignore_signals(worker: int) -> None:
    """A DataLoader's worker ends with its rank, which may have to save first."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if number := getattr(signal, name, None):  # Windows has no USR1
            signal.signal(number, signal.SIG_IGN)


def conclude(measured: str, expected: str, therefore: str) -> None:
    """Print the last line of a topic, on rank 0: what this run has shown, if it has trained."""
    if rank() == 0 and not FINISHED:
        text = f"measured {measured}, expected {expected}, therefore {therefore}"
        print(f"{text}\n", end="", flush=True)
    # Gloo's threads need Python to drop what the last collective of objects has sent. In torch 2.9
    # the end of the process waits for them, and does not let them have it: a hang.
    time.sleep(0.1)


# ---- Lightning -----------------------------------------------------------------------------------

# No notes on how it starts. At import, not in a function: what ddp_spawn starts imports this too.
for name in ("pytorch.utilities", "fabric.utilities", "pytorch.accelerators"):
    logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
for text in ("`isinstance.treespec", "The `srun` command", "Checkpoint directory .* not empty"):
    warnings.filterwarnings("ignore", text)
warnings.filterwarnings("ignore", ".* does not have many workers")


def lightning_options() -> dict:
    """Return the options of 04 for parse_args.

    torchrun or srun may have started the processes: then there are as many as there are.
    """
    import common

    env = os.environ
    started = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE")
    nodes = int(env.get("GROUP_WORLD_SIZE") or env.get("SLURM_NNODES") or 1)
    options = {"devices": int(started or common.gpu_count() or 2), "num_nodes": nodes}
    strategies = ("ddp", *MULTIPROCESSING_STRATEGIES, "fsdp", "deepspeed", "deepspeed_stage_2")
    return options | {"strategy": strategies, "precision": PRECISIONS}


def lightning_epochs(args: Namespace) -> int:
    """Return the epochs behind Lightning's own checkpoint file; refuse one that does not fit."""
    if not args.checkpoint or not os.path.lexists(args.checkpoint):
        return 0
    if os.path.isdir(args.checkpoint):  # DeepSpeed's: Lightning itself reads it
        return 1
    with reading(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    if "pytorch-lightning_version" not in state:
        fail(f"{args.checkpoint} is not a checkpoint of Lightning. Use another --checkpoint")
    resumable(state.get("hyper_parameters", {}) | {"epochs": state["epoch"] + 1}, args)
    return state["epoch"] + 1


def end_at_sigterm() -> None:
    """Undo Lightning's handler, which calls a collective in the middle of whatever is going on."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def lightning_trainer(args: Namespace) -> dict:
    """Return options of the Trainer: the strategy, with --timeout in place of its 30 minutes.

    Lightning's own requeue in Slurm is off (slurm/README.md says why), and so is most output.
    """
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import StrategyRegistry

    import common

    if args.strategy in FORKING_STRATEGIES:
        # OpenMP's threads are not forked: a rank that counts on its parent's hangs or crashes.
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
        os.environ["OMP_NUM_THREADS"] = "1"  # else Lightning gives each rank several
    kind = StrategyRegistry[args.strategy]
    options = {"strategy": kind["strategy"](timeout=args.timeout, **kind["init_params"])}
    if SLURMEnvironment.detect() and "TORCHELASTIC_RUN_ID" not in os.environ:
        options["plugins"] = [SLURMEnvironment(auto_requeue=False)]
    # Not "auto": Apple's mps has no collectives. A sanity check's samples would be counted.
    options |= {"accelerator": "gpu" if common.gpu_count() else "cpu", "num_sanity_val_steps": 0}
    options |= {"enable_checkpointing": bool(args.checkpoint), "logger": False}
    return options | {"enable_model_summary": False, "enable_progress_bar": sys.stderr.isatty()}
