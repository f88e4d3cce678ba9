"""What the labs share: the learner, starters made from rungs, and runs that end in time.

    python labs/starters.py           says which labs/*/starter.py is stale; exits with 1 if one is
    python labs/starters.py --write   makes them again from the rungs

A lab imports it as labs.starters. Standard library only.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"
MARK = "LABS_RUN"  # in the environment of all that run() starts
CPU = {"CUDA_VISIBLE_DEVICES": ""}  # env of runs whose numbers are compared bit for bit
REFRESH = "python labs/starters.py --write"
KILLED = -9  # as an exit code
ends = float("inf")  # time.monotonic() at which the runner's limit is over
running = {}  # mark: the process that run() has started


@dataclass
class Result:
    name: str
    passed: bool | None  # None: not tried here
    text: str  # only what the learner can act on


def unanswered(name: str, what: str = "it") -> Result:
    """Return the Result of a question whose answer is still missing."""
    return Result(name, False, f"not answered yet: write {what} into answers.toml")


@dataclass(frozen=True)
class Learner:
    name: str

    def pick(self, what: str, choices: Iterable):
        """Return one of the choices: always the same for this learner, others for another one."""
        choices = list(choices)
        digest = hashlib.sha256(f"{self.name}\0{what}".encode()).digest()
        return choices[int.from_bytes(digest[:8], "big") % len(choices)]


def sealed(answer: object) -> str:
    """Return a salted hash: what stands in the repo for an answer."""
    return hashlib.sha256(f"one job, five ways\0{answer}".encode()).hexdigest()[:16]


def header(rung: str) -> str:
    """Return the docstring of a rung as it stands in the file: what a starter's replaces."""
    return re.match(r'""".*?"""\n', (ROOT / rung).read_text(), re.DOTALL)[0]


def patched(rung: str, edits: Iterable[tuple[str, str]]) -> str:
    """Return the text of a rung with each old text, which is there once, replaced by the new."""
    text = (ROOT / rung).read_text()
    for old, new in edits:
        if (count := text.count(old)) != 1:
            raise ValueError(
                f"{rung} has this {count} times, not once: {old!r}. "
                f"Mend the patch in lab.py, then run: {REFRESH}"
            )
        text = text.replace(old, new)
    return text


# ---- the labs ------------------------------------------------------------------------------------


def folders() -> list[Path]:
    """Return the folders of the labs, in order."""
    return sorted(path.parent for path in LABS.glob("[0-9]*/lab.py"))


def load(folder: Path) -> ModuleType:
    """Import the lab of a folder."""
    spec = importlib.util.spec_from_file_location(f"lab_{folder.name}", folder / "lab.py")
    lab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lab)
    return lab


def stale() -> dict[Path, str]:
    """Return {path: text as it should be} of the starters that are not what lab.py makes."""
    made = {path / "starter.py": load(path).files(Learner("you")) for path in folders()}
    wanted = {path: files["starter.py"] for path, files in made.items() if "starter.py" in files}
    return {p: text for p, text in wanted.items() if not p.exists() or p.read_text() != text}


# ---- processes -----------------------------------------------------------------------------------


@dataclass
class Run:
    code: int  # -9 too where it was killed at its limit
    out: str
    err: str
    timed_out: bool
    limit: float = 0.0  # seconds


class NotChecked(Exception):
    """Nothing can be said of the learner's files; the text says why."""


def run(
    command: Sequence[str],
    work: Path,
    limit: float,
    env: dict[str, str] | None = None,
    watch: Callable[[str], None] | None = None,
) -> Run:
    """Run a command in the folder work; at the limit, kill it with all its processes.

    watch: is called 20 times a second with what the command has printed so far.
    """
    limit = min(limit, ends - time.monotonic())
    if limit <= 0:
        return Run(KILLED, "", "", True, 0)
    if names := [Path(word).name for word in map(str, command) if word.endswith((".py", ".sh"))]:
        print(f"  {' '.join(names)}: {limit:.0f} s at most", flush=True)
    mark = str(uuid.uuid4())
    launcher = (
        r"(WORLD_SIZE|RANK|MASTER_\w+|LOCAL_\w+|GROUP_\w+|ROLE_\w+|(TORCHELASTIC|SLURM_)\w+)$"
    )
    environ = {k: v for k, v in os.environ.items() if not re.match(launcher, k)}
    path = [Path(sys.executable).parent, environ.get("PATH", "")]
    environ |= {"PATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", MARK: mark}
    environ |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))}
    with tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True) as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        with out.open("wb") as o, err.open("wb") as e:
            try:
                process = subprocess.Popen(
                    [str(word) for word in command],
                    cwd=work,
                    env=environ | (env or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=o,
                    stderr=e,
                    start_new_session=True,
                )
            except OSError as error:
                return Run(127, "", f"{command[0]}: {error.strerror}", False)
        running[mark] = process
        deadline = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                if watch:
                    watch(out.read_text(errors="replace"))
            code = process.poll()
        finally:
            end(process, mark)
            del running[mark]
        timed_out = code is None
        return Run(KILLED if timed_out else code, text_of(out), text_of(err), timed_out, limit)


def shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def text_of(path: Path) -> str:
    return path.read_bytes()[-1_000_000:].decode(errors="replace")


def marked(mark: str) -> list[int]:
    """Return the processes with this mark in their environment (Linux; elsewhere none)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def end(process: subprocess.Popen, mark: str) -> None:
    """Kill a command and what it has started. torchrun's ranks are in sessions of their own."""
    if os.name == "nt":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True)
    elif not os.path.exists("/proc/self/environ") and process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    for _ in range(100):
        alive = marked(mark)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if os.name != "nt":
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        if not alive:
            break
        time.sleep(0.05)
    process.wait()


def end_all() -> None:
    """Kill all that run() has started: the runner is told to end."""
    for mark, process in list(running.items()):
        end(process, mark)


def why(run: Run, script: str = "starter.py") -> str:
    """Return in one line why a run failed: the error, and where in the learner's file."""
    if run.timed_out:
        last = (run.out.strip() or run.err.strip() or "nothing").splitlines()[-1]
        return (
            f"it did not end in {run.limit:.0f} s (a hang, or a busy machine?); last line: {last}"
        )
    lines = re.findall(rf'{re.escape(script)}", line (\d+)', run.err)
    kinds = r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*(?:\n.*\t.*)*)"
    said = re.findall(rf"^{re.escape(script)}: .*", run.err, re.M)  # of checks.py
    errors = said or re.findall(kinds, run.err, re.M) or run.err.strip().splitlines()[-1:]
    # torchrun's own comes last, and the other ranks lose their connection.
    errors = [e for e in errors if not re.search("ChildFailedError|by peer", e)] or errors
    errors = [re.sub(r"\n.*?\t", " ", error) for error in errors]
    place = f" ({script} line {lines[-1]})" if lines and not said else ""
    return (errors[-1] if errors else f"exit code {run.code}, without a word") + place


def must_end(run: Run, what: str) -> None:
    """Raise NotChecked where a run of ours, to compare with, has not come to its end."""
    if run.code:
        text = f"{what}, which has no fault, does not run here: {why(run, 'no script')}"
        raise NotChecked(f"nothing was checked. {text}")


def epochs_of(log: Path) -> list[dict]:
    """Return the lines of --log-json; [] where a run has not come so far."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def gpu_count() -> int:
    """Return the GPUs of this machine, asked of torch in a process of its own."""
    done = run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], ROOT, 60)
    return int(done.out.strip() or 0)


def distance(one: Path, other: Path) -> float | None:
    """Return the largest difference of two checkpoints' weights: 0.0 is bit for bit equal.

    None: one of them cannot be read, or the models differ.
    """
    code = """if True:
        import sys, torch
        a, b = (torch.load(f, "cpu", weights_only=True)["weights"] for f in sys.argv[1:])
        assert a.keys() == b.keys()
        print(max((a[k] - b[k]).abs().max().item() for k in a))
    """
    done = run([sys.executable, "-c", code, one, other], ROOT, 60)
    return None if done.code else float(done.out)


def checked(work: Path, limit: float, *words: str, script: str = "starter.py", nproc: int = 2):
    """Run labs/check.py on the learner's script; return its {rule: row}, or a Result that failed.

    words: the script's arguments.
    """
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(LABS / "check.py"), script, f"--nproc={nproc}"]
        command += [f"--json={report}", f"--timeout={limit - 5:g}", "--", *words]
        done = run(command, work, limit)
        if "check.py: ended after --timeout" in done.err:
            text = (
                f"{script} did not end in {limit - 5:g} s: a loop without end, or a busy machine?"
            )
            return Result("labs/check.py", False, text)
        if not report.exists():
            return Result("labs/check.py", False, why(done, script))
        return {row["check"]: row for row in json.loads(report.read_text())["checks"]}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    todo = stale()
    for starter, text in todo.items():
        print(f"{starter.relative_to(ROOT)} is stale" + ": written" * ("--write" in sys.argv))
        if "--write" in sys.argv:
            starter.write_text(text)
    if todo and "--write" not in sys.argv:
        sys.exit(f"run: {REFRESH}")
