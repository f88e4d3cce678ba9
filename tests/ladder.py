"""Run the rungs from the tests: in forked processes, or by their real launchers.

To import torch takes seconds; to fork a process that has done so takes milliseconds. So the many
cases of the contract are forked. Each child runs the file itself, from its first line to its last,
in the environment that the launcher would have made.
"""

import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning  # noqa: F401  imported here so that the forked processes need not do it
import torch
import torch._dynamo  # noqa: F401
import torch.multiprocessing as mp
import torchvision  # noqa: F401
from torch.utils.data import TensorDataset

import checks
import common
from benchmarks.tour import stop

ROOT = Path(__file__).parent.parent
RUNGS = sorted(path.name for path in ROOT.glob("[0-9]*.py"))
PARALLEL = [name for name in RUNGS if not name.startswith("00")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT = 300  # seconds; only a hang takes so long
# The digits to train and to test on, where a test does not ask for the whole set.
CUT = slice(480), slice(125)

DAY = datetime.date.today().toordinal()


def of_the_day(cases: list, count: int) -> list:
    """Return so many of the cases, others each day: all of them cost CI too much. ALL=1: all."""
    return cases if os.environ.get("ALL") == "1" else random.Random(DAY).sample(cases, count)


torch.set_num_threads(1)  # the forked processes inherit it
# Forked processes cannot use CUDA. On GPUs the numbers are compared by test_tour.py.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass
class Result:
    """What a run left behind."""

    codes: list[int]  # exit code of each process
    out: str
    err: str
    epochs: list[dict]  # --log-json
    weights: list[dict]  # state dict of each rank's model at the end (forked runs only)
    checkpoint: Path

    @property
    def state(self) -> dict:
        return torch.load(self.checkpoint, weights_only=True, map_location="cpu")


def launcher_env(rank: int, world_size: int, port: str) -> dict[str, str]:
    """Return what torchrun tells a worker on a single node."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": 0}
    names |= {"LOCAL_WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def without_launcher(environ: dict[str, str]) -> dict[str, str]:
    """Return an environment in which no launcher is to be seen."""
    known = launcher_env(0, 1, "0")
    return {k: v for k, v in environ.items() if k not in known and not k.startswith("SLURM")}


def only(train: slice | list, test: slice) -> Callable[[], None]:
    """Return a `before` that gives a run these digits alone, to train and to test on."""

    def before():
        load_datasets = common.load_datasets

        def load(args):
            sets = load_datasets(args)
            if args.dataset != "digits":
                return sets
            parts = zip(sets, (train, test), strict=True)
            return tuple(TensorDataset(*(x[some] for x in part.tensors)) for part, some in parts)

        common.load_datasets = load

    return before


def changed(change: Callable) -> Callable[[], None]:
    """Return a `before` that gives a run another model: what change makes of its own."""

    def before():
        build_model = common.build_model
        common.build_model = lambda args: change(build_model(args))

    return before


def tell_timeouts() -> None:
    """A `before`: at the end each group's is printed. A mesh's groups would have 30 minutes."""
    conclude = checks.conclude

    def told(*words):
        for group in torch.distributed.distributed_c10d._world.pg_map:
            seconds = group._get_backend(torch.device("cpu")).options._timeout.seconds
            print(f"{group.group_desc} | timeout {seconds}\n", end="", flush=True)
        conclude(*words)

    checks.conclude = told


def timeouts(out: str) -> list[str]:
    return re.findall(r"^\S+ \| timeout (\d+)$", out, re.M)


def _child(source: str, path: Path, argv: list[str], env: dict, folder: Path, before) -> int:
    """In a forked process: run the file as `python path argv` does; return the exit code."""
    rank = env.get("RANK", "0")
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(
            os.open(folder / f"{stream}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number
        )
        setattr(sys, stream, open(number, "w", closefd=False))  # noqa: SIM115
    # A fork leaves torch a thread pool without threads; the first call after it makes a new one. It
    # has to be this one: two threads that call at once abort now and then ("Invalid thread pool!").
    torch.set_num_threads(1)
    environ = without_launcher(os.environ)
    os.environ.clear()
    os.environ.update(environ | env | {"OMP_NUM_THREADS": "1"})
    os.chdir(folder)
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(ROOT))  # topics import 04 from there

    models, build_model = [], common.build_model
    common.build_model = lambda args: models.append(build_model(args)) or models[-1]

    def keep_weights(rank: int) -> None:
        if models:
            half = folder / f"half.weights.{rank}"  # mp.spawn may end this rank while it writes
            torch.save(models[-1].state_dict(), half)
            os.replace(half, folder / f"weights.{rank}")

    def run_and_keep(rank: int, main: Callable, *args: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not its parent's handler: as if spawned
        main(rank, *args)
        keep_weights(rank)

    def forked_spawn(main: Callable, args: tuple, nprocs: int) -> None:
        mp.start_processes(run_and_keep, (main, *args), nprocs, start_method="fork")

    mp.spawn = forked_spawn
    code = 0
    try:
        if before:
            before()
        exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
        keep_weights(int(rank))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def fork(
    rung: str,
    world_size: int = 1,
    *argv: str,
    folder: Path | None = None,
    edit: Callable[[str], str] | None = None,
    before: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    rank_argv: dict[int, list[str]] | None = None,
    whole: bool = False,
) -> Result:
    """Run a rung at this world size. Its checkpoint and log are in folder (default: a new one).

    edit: what to change in the file's text; before: what to call in each process before it starts;
    rank_argv: options of some ranks only; whole: with all digits, not with the first few.
    """
    folder = Path(folder or tempfile.mkdtemp(prefix=f"{rung[:2]}-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = ROOT / rung
    source = path.read_text()
    if edit:
        source = edit(source)
        assert source != path.read_text(), "the edit changed nothing"
    argv = [f"--checkpoint={folder / 'checkpoint.pt'}", f"--log-json={folder / 'log.json'}", *argv]
    spawns = "mp.spawn(" in source
    by_torchrun = rung.startswith(("02", "03", "04", "topics")) and not spawns
    if spawns:
        argv.insert(0, f"--nproc={world_size}")
    port, pids = checks.free_port(), []
    for rank in range(world_size if by_torchrun else 1):
        rank_env = launcher_env(rank, world_size, port) if by_torchrun else {}
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                words = [*argv, *(rank_argv or {}).get(rank, [])]
                if not whole:
                    only(*CUT)()
                code = _child(source, path, words, rank_env | (env or {}), folder, before)
            finally:
                os._exit(code)
        pids.append(pid)
    codes, deadline = {}, time.monotonic() + TIMEOUT
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert time.monotonic() < deadline, f"{rung} did not end within {TIMEOUT} s"

    def text(stream: str) -> str:
        return "".join(file.read_text() for file in sorted(folder.glob(f"{stream}.*")))

    log = folder / "log.json"
    return Result(
        codes=[codes[pid] for pid in pids],
        out=text("stdout"),
        err=text("stderr"),
        epochs=[json.loads(line) for line in log.read_text().splitlines()] if log.exists() else [],
        weights=[torch.load(file, map_location="cpu") for file in sorted(folder.glob("weights.*"))],
        checkpoint=folder / "checkpoint.pt",
    )


def launch(*command: str, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    """Run a command for real and wait for it; it and all its children are killed after TIMEOUT."""
    environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"} | (env or {})
    if "PYTHONPATH" in (env or {}) and "PYTHONPATH" in os.environ:  # of the warm starts
        environ["PYTHONPATH"] += f":{os.environ['PYTHONPATH']}"
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
        **{"cwd": ROOT} | options,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        stop(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
