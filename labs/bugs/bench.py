"""Which tool sees which bug? Run faulty scripts under each tool, and record a table bug x tool.

    python labs/bugs/bench.py --list                        the rows
    python labs/bugs/bench.py                               all rows under all tools
    python labs/bugs/bench.py clip-on-one-rank fixed-port --tools user,checker
    python labs/bugs/bench.py --random 10 --seed 3

Every verdict is decided by a rule; nobody reads the output.

user      The script without any tool. hang: it has not ended after --timeout. crash: a rank's exit
          code is not 0. other numbers: what the ranks print is not what they print for the twin.
          nothing: the same output to the last digit (but for speeds).
time-out  Rows that hang, with a process group that waits --group-timeout. ends it, or still hangs.
info, detail    TORCH_DISTRIBUTED_DEBUG. New lines are those that neither the twin prints under the
          tool nor the faulty script without it (numbers masked, process group as for time-out).
          names it: one of them matches NAMES. says something: there are some. crashes itself:
          under the tool the twin, too, does not end with 0.
flight    torch's flight recorder of all ranks, taken 3/4 into the group's time-out or at the end,
          read by torch.distributed.flight_recorder: its error messages. Verdicts as for detail;
          nothing, too, where a rank that was aborted has left no record.
torchrun  A real torchrun, where the script crashes or hangs. traceback: its report has the line of
          the script that failed. exit code: it names a rank and its exit code only. nothing: no
          report in --timeout and a minute. Where all ranks end with 0 it has nothing to report (-).
checker   labs/check.py. right: the row's check is broken, and no other than those that the row
          says are true as well. right, and X: X is a false alarm beside it. wrong: X: other checks
          only. missed: none. For a correct script: silent, or false alarm: X.

All but torchrun run in processes forked from this one, which has imported torch, in the environment
that torchrun would make. Where the row is about a resume, a first run stops early.
"""

import argparse
import atexit
import contextlib
import faulthandler
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # so that the forked ranks need not import it
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.multiprocessing as mp
import torch.optim.swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "labs")]

import check as checker  # noqa: E402

import checks  # noqa: E402
from labs.bugs import bugs  # noqa: E402

NAMES = re.compile(
    "mismatch|did not receive grad|not join|Detected|missing rank|failed to pass", re.IGNORECASE
)
LOST_PEER = re.compile(
    r"pair\.cc|unbound_buffer\.cc|closed by peer|reset by peer|^terminate called|via signal SIGTERM"
)


# ---- run a script in forked ranks ----------------------------------------------------------------


@dataclass
class Run:
    """What the ranks of a script left behind."""

    hung: bool  # it was killed
    codes: list[int]  # of each process that was started, None if it was killed
    out: dict[int, str]  # rank: its stdout
    err: dict[int, str]
    weights: dict[int, torch.Tensor] = field(default_factory=dict)  # that its optimizers hold
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # of what was given to DDP
    saved: dict[int, list] = field(default_factory=dict)  # (file, keys) of each torch.save
    groups: dict[int, bool] = field(default_factory=dict)  # is there still a process group?

    @property
    def ok(self) -> bool:
        return not self.hung and not any(self.codes)


def launcher_env(rank: int, nproc: int, nodes: int, port: str) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank % nproc, "GROUP_RANK": rank // nproc}
    names |= {"WORLD_SIZE": nproc * nodes, "LOCAL_WORLD_SIZE": nproc, "GROUP_WORLD_SIZE": nodes}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    return {name: str(value) for name, value in names.items()}


class Observer:
    """In a rank: notes the weights, buffers and files of the script, which does not know of it."""

    def __init__(self, folder: Path, group_timeout: float | None, flight: bool):
        self.folder, self.flight, self.group_timeout = folder, flight, group_timeout
        self.optimizers, self.modules, self.saved = {}, [], []
        register_optimizer_step_post_hook(
            lambda optimizer, *_: self.optimizers.setdefault(id(optimizer), optimizer)
        )
        ddp, init, save = torch.nn.parallel.DistributedDataParallel, None, torch.save
        init = ddp.__init__

        def ddp_init(this, module, *args, **options):
            self.modules.append(module)
            init(this, module, *args, **options)

        def noting_save(obj, file, *args, **options):
            keys = sorted(obj) if isinstance(obj, dict) else []
            for value in obj.values() if isinstance(obj, dict) else []:
                keys += sorted(map(str, value)) if isinstance(value, dict) else []
            name = os.path.basename(getattr(file, "name", file)) if file else ""
            self.saved.append((str(name), keys))
            save(obj, file, *args, **options)

        ddp.__init__, torch.save = ddp_init, noting_save
        self.save = save
        init_group = dist.init_process_group

        def with_timeout(*args, **options):
            if group_timeout:
                options["timeout"] = timedelta(seconds=group_timeout)
            init_group(*args, **options)
            if flight:
                rank = dist.get_rank()
                timer = threading.Timer(0.75 * group_timeout, self.write_flight, [rank])
                timer.daemon = True
                timer.start()

        dist.init_process_group = with_timeout

    def write_flight(self, rank: int) -> None:
        """Write what the flight recorder has, as topics/debugging.py does."""
        flight = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
        if group := flight["pg_config"].get(""):
            flight["pg_config"]["0"] = group | {"name": "0"}
        (self.folder / f"flight_{rank}").write_bytes(pickle.dumps(flight))

    def keep(self, rank: int) -> None:
        """Write what was noted, at the end of this rank."""
        groups = [group for o in self.optimizers.values() for group in o.param_groups]
        weights = [p.detach() for group in groups for p in group["params"]]
        weights = [w.to_local() if hasattr(w, "to_local") else w for w in weights]
        buffers = [b for module in self.modules for b in module.buffers()]
        noted = {
            name: torch.cat([t.flatten().double() for t in tensors] or [torch.zeros(0)])
            for name, tensors in (("weights", weights), ("buffers", buffers))
        }
        half = self.folder / f"half.{rank}"
        self.save(noted | {"saved": self.saved, "group": dist.is_initialized()}, half)
        os.replace(half, self.folder / f"noted.{rank}")
        if self.flight:
            self.write_flight(rank)


def _rank(source: str, path: Path, argv: list[str], env: dict, options: dict) -> int:
    """In a forked process: run the script as `python path argv` does; return the exit code."""
    folder, rank = path.parent, int(env.get("RANK", 0))

    def redirect(rank: int) -> None:
        for number, stream in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{stream}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            setattr(sys, f"std{stream}", open(number, "w", buffering=1, closefd=False))  # noqa: SIM115

    redirect(rank)
    faulthandler.disable()  # pytest's would write to pytest's stderr
    torch.set_num_threads(1)
    os.environ |= env | {"OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    sys.argv = [str(path), *argv]
    sys.path.insert(0, str(folder))
    torch._C._distributed_c10d.set_debug_level_from_env()
    observer = Observer(folder, options["group_timeout"], options["flight"])

    def spawned(rank: int, main, *args) -> None:
        redirect(rank)
        main(rank, *args)
        observer.keep(rank)

    def forked_spawn(main, args=(), nprocs=1, **_) -> None:
        mp.start_processes(spawned, (main, *args), nprocs, start_method="fork")

    mp.spawn = forked_spawn
    code = 0
    try:
        exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})
        if observer.modules or observer.optimizers:
            observer.keep(rank)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
        if options["flight"] and dist.is_initialized():
            observer.write_flight(rank)
    return code


def fork(
    source: str,
    name: str,
    argv: list[str],
    folder: Path,
    nproc: int = 2,
    nodes: int = 1,
    timeout: float = 60,
    group_timeout: float | None = None,
    flight: bool = False,
    env: dict[str, str] | None = None,
) -> Run:
    """Run the script at nproc x nodes ranks, in processes forked from this one; kill what hangs.

    As torchrun does, it ends the others soon after a rank has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("out.*"), *folder.glob("err.*"), *folder.glob("noted.*")]:
        old.unlink()
    path = folder / Path(name).name
    path.write_text(source)  # for the lines of a traceback
    options = {"group_timeout": group_timeout, "flight": flight}
    spawns, port, pids = "mp.spawn(" in source, checks.free_port(), []
    sys.stdout.flush()
    for rank in range(1 if spawns else nproc * nodes):
        rank_env = {} if spawns else launcher_env(rank, nproc, nodes, port)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)  # it ends with its children
                code = _rank(source, path, argv, rank_env | (env or {}), options)
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        pids.append(pid)
    codes, deadline, hung = {}, time.monotonic() + timeout, False
    try:
        while len(codes) < len(pids) and not hung:
            for pid in (pid for pid in pids if pid not in codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:  # the others get 3 s more
                        deadline = min(deadline, time.monotonic() + 3)
            if time.monotonic() > deadline:
                hung = not any(codes.values())
                break
            time.sleep(0.01)
    finally:  # also at Ctrl-C
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if pid not in codes:
                os.waitpid(pid, 0)
    run = Run(hung, [codes.get(pid) for pid in pids], {}, {})
    for rank in range(nproc * nodes):
        for stream in ("out", "err"):
            file = folder / f"{stream}.{rank}"
            getattr(run, stream)[rank] = file.read_text(errors="replace") if file.exists() else ""
        if (file := folder / f"noted.{rank}").exists():
            noted = torch.load(file)
            run.weights[rank], run.buffers[rank] = noted["weights"], noted["buffers"]
            run.saved[rank], run.groups[rank] = noted["saved"], noted["group"]
    return run


def words(row: bugs.Row, folder: Path) -> list[str]:
    """Return the options of the row's script: those of its twin, and its own."""
    return [word.format(folder=folder) for word in (*bugs.TWINS[row.twin].args, *row.args)]


def written(row: bugs.Row, folder: Path) -> Path:
    """Write the row's script into the folder, which is made, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(row.twin).name
    path.write_text(bugs.faulty(row))
    return path


def run_row(row: bugs.Row, folder: Path, source: str | None = None, **options) -> Run:
    """Run the row's script (or this source) with the options of its twin."""
    source = bugs.faulty(row) if source is None else source
    argv = words(row, folder)
    options |= {"nproc": row.nproc, "nodes": row.nodes}
    if "mp.spawn(" in source:
        argv.append(f"--nproc={row.nproc}")
    if row.resumes:
        first = fork(source, row.twin, [*argv, *bugs.TWINS[row.twin].first], folder, **options)
        if not first.ok:
            return first
    return fork(source, row.twin, argv, folder, **options)


# ---- verdicts ------------------------------------------------------------------------------------


def lines(text: str) -> set[str]:
    """Return the lines without what is another in each run: numbers, paths."""
    masked = re.sub(r"0x[0-9a-f]+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?|/\S+/", "#", text)
    return {" ".join(line.split()) for line in masked.splitlines() if line.strip()}


def output(run: Run) -> str:
    """Return what all ranks print, without speeds and folders."""
    text = "".join(run.out[rank] for rank in sorted(run.out))
    return re.sub(r"\d+ samples/s|/tmp/\S+/", "", text)


def said(run: Run) -> set[str]:
    """Return what the ranks print, without the frames of tracebacks and what a lost peer causes.

    Which rank fails first, and so has a traceback, is another in each run.
    """
    kept = []
    for text in [*run.out.values(), *run.err.values()]:
        in_frames = False
        for line in re.sub(r"^\[rank\d+\]:", "", text, flags=re.MULTILINE).splitlines():
            if line.strip().startswith("Traceback (most recent call last)"):
                in_frames = True
            elif in_frames and re.match(r" ?[\w.]+: ", line):
                in_frames = False  # the error itself
            if not in_frames and not LOST_PEER.search(line):
                kept.append(line)
    return lines("\n".join(kept))


def of_user(run: Run, twin: Run) -> str:
    if run.hung:
        return "hang"
    if not run.ok:
        return "crash"
    return "nothing" if output(run) == output(twin) else "other numbers"


def of_new_lines(new: set[str]) -> str:
    if any(NAMES.search(line) for line in new):
        return "names it"
    return "says something" if new else "nothing"


def read_flight(folder: Path) -> set[str]:
    """Return what torch's reader has to say of the flight recorders in the folder."""
    from torch.distributed.flight_recorder import fr_trace

    log = folder / "reader"
    if not (pid := os.fork()):  # it logs to the stderr of when it was imported, and it exits
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            fr_trace.main([str(folder), "-p", "flight_"])
        except BaseException as error:
            print(f"{type(error).__name__} {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return {line for line in lines(log.read_text()) if "error msg" in line}


def kill_all(mark: str) -> None:
    """Kill every process with this word in its environment, whoever is its parent by now."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def launch(command: list[str], folder: Path, timeout: float) -> tuple[int | None, str]:
    """Run a real command; return its exit code (None: it was killed) and what it printed."""
    environ = {k: v for k, v in os.environ.items() if k not in launcher_env(0, 1, 1, "0")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    mark = f"BUGS_BENCH={folder}"
    environ["BUGS_BENCH"] = str(folder)
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=folder, env=environ, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_all(mark)
            process.wait()
    return code, log.read_text(errors="replace")


def of_torchrun(row: bugs.Row, folder: Path, timeout: float) -> str:
    path = written(row, folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={row.nproc}", str(path), *words(row, folder)]
    text = launch(command, folder, timeout)[1]
    report = text.partition("Root Cause")[2]
    if not report:
        return "nothing"
    return "traceback" if path.name in report else "exit code"


def fork_watched(script, words, env, out, err) -> int:
    """Stand in for start() of labs/check.py: run the script, watched, in a fork of this process."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number, path in ((0, os.devnull), (1, out), (2, err)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        faulthandler.disable()  # pytest's would write to pytest's stderr
        os.setsid()
        atexit._clear()
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.seed()  # a process of its own has another seed each time
        sys.path[:] = [str(Path(script).parent), *sys.path]
        sys.argv = [str(script), *words]
        main = types.ModuleType("__main__")
        main.__file__ = str(script)
        sys.modules["__main__"] = main
        observer = types.ModuleType("observer")
        observer.__file__ = str(checker.OBSERVER / "sitecustomize.py")
        exec(Path(observer.__file__).read_text(), observer.__dict__)
        sys.meta_path.pop(0)
        observer.watch()
        exec(compile(Path(script).read_text(), str(script), "exec"), main.__dict__)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # as Python does
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check(row: bugs.Row, folder: Path, timeout: float = 400) -> set[str] | None:
    """Return the checks that labs/check.py finds broken; None where it had nothing to judge."""
    path, back = written(row, folder), os.getcwd()
    options = [f"--nproc={row.nproc * row.nodes}", f"--nodes={row.nodes}", f"--timeout={timeout}"]
    os.chdir(folder)
    try:
        args = checker.parse_args([str(path), *options, "--", *words(row, folder)])
        trace, results = checker.check(args, starter=fork_watched)
    finally:
        os.chdir(back)
    found = {one["check"] for one in results if one["verdict"] == "broken"}
    return found if trace.ranks or found else None


def of_checker(row: bugs.Row, broken: set[str] | None) -> str:
    if broken is None:
        return "no report"
    extra = ", ".join(sorted(broken - {row.check, *row.also}))
    if row.check is None:
        return f"false alarm: {extra}" if extra else "silent"
    if row.check in broken:
        return f"right, and {extra}" if extra else "right"
    return f"wrong: {', '.join(sorted(broken))}" if broken else "missed"


class Bench:
    """Runs rows under the tools; what the twins do under them is run once and kept."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder, self.twins = args, folder, {}

    def run(self, row: bugs.Row, tool: str, twin: bool) -> tuple[Run, set[str]]:
        """Return the run of the row's script, or of its twin, and what the tool says."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            folder = Path(folder)
            options = {"timeout": self.args.timeout}
            if tool != "user":
                options["group_timeout"] = self.args.group_timeout
                options["timeout"] += self.args.group_timeout
            if tool in ("info", "detail"):
                options["env"] = {"TORCH_DISTRIBUTED_DEBUG": tool.upper()}
            if tool == "flight":
                options |= {"env": {"TORCH_FR_BUFFER_SIZE": "2000"}, "flight": True}
            source = (ROOT / bugs.path(row.twin)).read_text() if twin else None
            run = run_row(row, folder, source, **options)
            return run, read_flight(folder) if tool == "flight" else said(run)

    def of_twin(self, row: bugs.Row, tool: str) -> tuple[Run, set[str]]:
        key = (row.twin, row.args, row.nproc, row.nodes, row.resumes, tool)
        if key not in self.twins:
            self.twins[key] = self.run(row, tool, twin=True)
        return self.twins[key]

    def row(self, row: bugs.Row) -> dict[str, str]:
        """Return the verdict of each tool, "" for those that were not asked for."""
        verdicts, tools = dict.fromkeys(bugs.TOOLS, ""), self.args.tools
        user = ""
        if set(tools) & {"user", "time-out", "torchrun"}:
            user = of_user(self.run(row, "user", False)[0], self.of_twin(row, "user")[0])
            verdicts["user"] = user
        if "time-out" in tools:
            hung = user == "hang" and self.run(row, "time-out", False)[0].hung
            verdicts["time-out"] = "-" if user != "hang" else "still hangs" if hung else "ends it"
        if set(tools) & {"info", "detail"}:
            plain = self.run(row, "time-out", False)[1]
        for tool in (tool for tool in ("info", "detail", "flight") if tool in tools):
            twin, twin_says = self.of_twin(row, tool)
            new = self.run(row, tool, False)[1] - twin_says
            verdicts[tool] = of_new_lines(new if tool == "flight" else new - plain)
            if self.args.verbose:
                print(tool, *sorted(new if tool == "flight" else new - plain), sep="\n    ")
            if not twin.ok:
                verdicts[tool] = "crashes itself"
        by_torchrun = row.nodes == 1 and "spawn" not in row.twin and not row.twin.startswith("01")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            if "torchrun" in tools:
                fails = user in ("crash", "hang") and by_torchrun
                seconds = self.args.timeout + 60  # it starts slowly
                verdicts["torchrun"] = of_torchrun(row, Path(folder), seconds) if fails else "-"
            if "checker" in tools:
                verdicts["checker"] = of_checker(row, check(row, Path(folder) / "row"))
        return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("rows", nargs="*", metavar="ROW")
    add("--list", action="store_true", help="print the rows, run nothing")
    add("--tools", default=",".join(bugs.TOOLS), help="some of " + ",".join(bugs.TOOLS))
    add("--random", type=int, metavar="N", help="N rows, chosen by --seed")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=20, help="seconds after which a script hangs")
    add("--group-timeout", type=float, default=12, help="of the process group, for the tools")
    add("--verbose", action="store_true", help="print the new lines of info, detail and flight")
    add("--csv", type=Path, default=ROOT / "results" / "bugs.csv")
    args = parser.parse_args()
    args.tools = args.tools.split(",")
    if unknown := set(args.tools) - set(bugs.TOOLS):
        sys.exit(f"bench.py: no tool {', '.join(unknown)}: use {', '.join(bugs.TOOLS)}")
    rows = {row.name: row for row in bugs.ROWS}
    if unknown := set(args.rows) - set(rows):
        sys.exit(f"bench.py: no row {', '.join(sorted(unknown))}: see --list")
    chosen = [rows[name] for name in args.rows or rows]
    if args.random:
        chosen = random.Random(args.seed).sample(chosen, min(args.random, len(chosen)))
        print(f"seed {args.seed}")
    if args.list:
        for row in chosen:
            print(f"{row.name:30} {row.group:24} {row.twin:22} {row.check or 'nothing broken'}")
        return 0

    import machine
    import scaling
    import tour

    tour.end_like_ctrl_c()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forked processes cannot use it
    where = machine.describe()
    print(f"{'row':30} {'check':14} " + " ".join(f"{tool:15}" for tool in args.tools))
    with tempfile.TemporaryDirectory(prefix="bugs-") as folder:
        bench = Bench(args, Path(folder))
        for row in chosen:
            verdicts = bench.row(row)
            cells = " ".join(f"{verdicts[tool]:15}" for tool in args.tools)
            print(f"{row.name:30} {row.check or '-':14} {cells}", flush=True)
            named = {"row": row.name, "group": row.group, "check": row.check or ""}
            scaling.append(args.csv, named | verdicts | where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
