"""Real processes and real kills: restarts, fewer nodes, kills while saving, hangs, no leftovers."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_contract import LOSS, assert_weights, run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import checks
import common
from ladder import ROOT, TORCHRUN, fork, of_the_day, without_launcher

HANG = 90  # seconds; only a hang takes so long
LEFT = 20  # seconds after which nothing of ours may be left (at rest it takes 2)
# What the README teaches for restarts: without it, new ranks may find old addresses.
RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
CPU = {"CUDA_VISIBLE_DEVICES": ""}  # these are lessons about processes, not about devices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def as_in_a_terminal() -> None:
    """Undo what nohup and a shell's & have done to the tests: they ignore these signals."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Job:
    """A running command. Its processes are known by a mark in their environment, orphans too."""

    def __init__(self, command, folder: Path, env: dict | None = None):
        self.mark = f"FAULTS_MARK={uuid.uuid4()}"
        self.log = folder / f"{self.mark[-8:]}.log"
        name, value = self.mark.split("=")
        environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", name: value}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=environ | CPU | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # as in a terminal of its own
                preexec_fn=as_in_a_terminal,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(
                OSError
            ):  # it has ended meanwhile; a zombie has no environment
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def until(self, condition, seconds: float = HANG) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.text}"
            time.sleep(0.05)

    def until_it_says(self, pattern: str) -> re.Match:
        self.until(lambda: re.search(pattern, self.text) or self.process.poll() is not None)
        match = re.search(pattern, self.text)
        assert match, f"it has ended and did not say {pattern}:\n{self.text}"
        return match

    def end(self, seconds: float = HANG) -> int:
        """Wait for its end; return the exit code of the launcher, once all processes are gone."""
        self.until(lambda: self.process.poll() is not None, seconds)
        self.until(lambda: not self.processes(), LEFT)
        return self.process.returncode


@pytest.fixture
def start(tmp_path):
    """Start jobs; end whatever is left of them after the test."""
    jobs = []

    def start_job(*command, env: dict | None = None) -> Job:
        jobs.append(Job(command, tmp_path, env))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait()


def epochs_said(text: str) -> list[str]:
    return re.findall(r"^epoch (\d+)/", text, re.MULTILINE)


def load(path) -> dict:
    return torch.load(path, weights_only=True, map_location="cpu")


# ---- restarts by torchrun ------------------------------------------------------------------------


@pytest.mark.parametrize("form", of_the_day([["-m", "topics.crash"], ["topics/crash.py"]], 1))
def test_the_crash_topic_recovers(form, start, tmp_path):
    options = ["--epochs=2", f"--checkpoint={tmp_path}/crash.pt"]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    for _ in range(3):  # torchrun's own fault, now and then: docs/troubleshooting.md
        (tmp_path / "crash.pt").unlink(missing_ok=True)
        job = start(*command, *form, *options, env=RESTART)
        code = job.end()
        if "Failed to parse reply file" not in job.text:
            break
    assert code == 0, job.text
    assert job.text.count("kill -9 in epoch") == 1
    assert epochs_said(job.text) == ["1", "2"]
    assert "measured restarts: 1, resumed after epoch " in job.text
    whole = fork("02_torchrun.py", 2, "--epochs=2", env=CPU, whole=True)
    assert_weights(load(tmp_path / "crash.pt")["weights"], whole.state["weights"], 0)


SMALL = ["--dataset=fake:960", "--image-size=16", "--epochs=12", "--lr=0.01"]


def work_until_killed(folder: str, victim: int, after_epochs: int, then: float) -> None:
    """A rank of 02, in a forked worker of torchrun's agent. Before any restart the victim is
    killed that many seconds after that many epochs, whatever it is doing then."""
    out = os.open(f"{folder}/out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and int(os.environ["RANK"]) == victim:
        killer = f"""
            until [ "$(grep -c train_loss {folder}/log)" -ge {after_epochs} ]; do sleep 0.01; done
            sleep {then}; kill -9 {os.getpid()} && echo killed >{folder}/killed"""
        subprocess.Popen(["sh", "-c", killer], stderr=subprocess.DEVNULL)
    path = ROOT / "02_torchrun.py"
    sys.argv = [
        str(path),
        *SMALL,
        f"--checkpoint={folder}/checkpoint.pt",
        f"--log-json={folder}/log",
    ]
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def launch_and_kill(folder: str, *when) -> None:
    """In a forked process: torchrun's own agent, with workers forked from here."""
    os.environ |= RESTART | CPU | {"OMP_NUM_THREADS": "1"}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=folder,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        monitor_interval=0.02,
        start_method="fork",
    )
    elastic_launch(config, work_until_killed)(folder, *when)


def in_fork(function, *args) -> int:
    """Call the function in a forked process; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            function(*args)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int, seconds: float) -> int | None:
    """Return the exit code of a child, None after that many seconds: it is then killed."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.02)


KILLS = int(os.environ.get("KILLS", 4))  # KILLS=20 by hand, after a change of what is saved


def test_kills_at_random_moments(tmp_path):
    whole = fork("02_torchrun.py", 2, *SMALL)
    dice, killed = random.Random(), 0
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        when = dice.randrange(2), dice.randrange(11), round(dice.uniform(0, 0.1), 3)
        code = wait_for(in_fork(launch_and_kill, str(folder), *when), HANG)
        said = (folder / "out").read_text()
        assert code == 0, f"killed rank, after epoch, seconds: {when}\n{said}"
        epochs = [int(epoch) for epoch in epochs_said(said)]
        # None twice. A kill between the save of an epoch and its line may cost that one line.
        assert epochs == sorted(set(epochs)) and len(epochs) >= 11, f"{when}\n{said}"
        assert_weights(load(folder / "checkpoint.pt")["weights"], whole.state["weights"], 0)
        killed += (folder / "killed").exists()
    assert killed * 2 >= KILLS, "most runs ended before the kill"


def test_an_elastic_job_resumes_with_fewer_ranks(start, tmp_path):
    port = checks.free_port()
    options = ["--epochs=5", f"--checkpoint={tmp_path}/elastic.pt", f"--log-json={tmp_path}/log"]
    command = [*TORCHRUN, "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    # Less patience than the default: how long to wait for more nodes, and for one that is silent.
    command += ["--rdzv-conf=last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"]
    first = start(*command, "03_multinode.py", *options, env=RESTART)
    time.sleep(1)  # the first one is the host of the meeting: it must be the one that stays
    second = start(*command, "03_multinode.py", *options, env=RESTART)
    first.until(lambda: "epoch 1/" in first.text + second.text)
    for pid in second.processes():  # a node without power
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert first.end() == 0, first.text
    assert "batch 48 x 2 = 96" in first.text + second.text
    assert "batch 96 x 1 = 96" in first.text
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2, 3, 4, 5]
    assert {entry["world_size"] for entry in entries} == {1, 2}
    for entry, reference in zip(
        entries, run("00_single_gpu.py", 1, whole=True).epochs, strict=True
    ):
        assert abs(entry["train_loss"] - reference["train_loss"]) < LOSS


# ---- a kill while saving -------------------------------------------------------------------------


def save_for_ever(args) -> None:
    """Save a state after the other, with the number of the state in every weight."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = common.read_checkpoint(args)
    number = state["epochs"] if state else 0
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        common.save_checkpoint(args, number, model, optimizer)
        Path(f"{args.checkpoint}.saved").write_text(str(number))


def test_50_kills_while_saving(tmp_path, capsys):
    args = SimpleNamespace(checkpoint=str(tmp_path / "x.pt"), epochs=10**9)
    for name in checks.RESUME_KEYS:
        setattr(args, name, 1)
    saved, previous = Path(f"{args.checkpoint}.saved"), 0
    for _ in range(50):
        pid = in_fork(save_for_ever, args)
        deadline = time.monotonic() + HANG
        while not (saved.exists() and saved.read_text() not in ("", str(previous))):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        state = common.read_checkpoint(args)
        assert all((weights == state["epochs"]).all() for weights in state["weights"].values())
        # Its writer may have died after the save and before it told us.
        assert state["epochs"] >= int(saved.read_text() or previous) > previous - 1
        previous = state["epochs"]
        saved.write_text(str(previous))
        left = {path.name for path in tmp_path.iterdir()}  # of all kills together
        assert left <= {"x.pt", "x.pt.tmp", "x.pt.saved"}
    assert not capsys.readouterr().err


# ---- no leftovers --------------------------------------------------------------------------------

LAUNCH = {
    "01": [sys.executable, "01_single_node_multi_gpu.py", "--nproc=2"],
    "02": [*TORCHRUN, "--standalone", "--nproc-per-node=2", "02_torchrun.py"],
    "03": [*TORCHRUN, "--standalone", "--nproc-per-node=2", "03_multinode.py"],
    "04": [sys.executable, "04_lightning.py", "--devices=2"],
    "by hand": ["bash", "topics/manual_launch.sh"],
}
# Epochs of two steps, and no end: what is started is to be killed.
ENDLESS = ["--dataset=fake:96", "--image-size=8", "--epochs=100000", "--checkpoint="]

WAYS = ["Ctrl-C", "TERM", "terminal closed", "crash of a rank"]


@pytest.mark.cold
@pytest.mark.parametrize(
    ("launcher", "way"), of_the_day([(one, way) for one in LAUNCH for way in WAYS], 8)
)
def test_nothing_is_left(launcher, way, start):
    job = start(*LAUNCH[launcher], *ENDLESS)
    job.until_it_says(r"epoch 1/100000")
    launcher_pid = job.process.pid
    if way == "Ctrl-C":  # a terminal sends it to all processes that have it
        os.killpg(launcher_pid, signal.SIGINT)
    elif way == "TERM":
        os.kill(launcher_pid, signal.SIGTERM)
    elif way == "terminal closed":
        os.killpg(launcher_pid, signal.SIGHUP)
    else:
        os.kill(max(set(job.processes()) - {launcher_pid}), signal.SIGKILL)
    assert job.end(LEFT) != 0, job.text
    if launcher == "04" and way == "Ctrl-C":
        assert job.text.count("ended by SIGINT") == 1, job.text


@pytest.mark.cold
@pytest.mark.parametrize("strategy", of_the_day(["ddp_fork", "ddp_spawn"], 1))
def test_ctrl_c_for_the_parent_alone_ends_lightnings_ranks(strategy, start):
    """As `timeout -s INT` does it. Lightning's parent went on to wait for them."""
    job = start(*LAUNCH["04"], f"--strategy={strategy}", *ENDLESS)
    job.until_it_says(r"epoch 1/100000")
    os.kill(job.process.pid, signal.SIGINT)
    assert job.end(LEFT) == 130, job.text
    assert job.text.count("ended by SIGINT") == 1 and "Traceback" not in job.text, job.text


@pytest.mark.cold
def test_what_all_ranks_refuse_is_said_once(start):
    """By rank 0, which is the others' launcher: they said it behind the shell's prompt."""
    job = start(*LAUNCH["04"], "--dataset=fake:96", "--image-size=8", "--lr=1e30", "--epochs=3")
    assert job.end() != 0, job.text
    assert job.text.count("Try a smaller --lr") == 1, job.text


def lose_the_other_rank(folder: Path, message: str) -> None:
    (folder / "started").touch()
    checks._excepthook(RuntimeError, RuntimeError(message), None)
    (folder / "ended").touch()


def start_a_rank_and_end(folder: Path, message: str) -> None:
    in_fork(lose_the_other_rank, folder, message)
    while not (folder / "started").exists():
        time.sleep(0.02)
    time.sleep(1)
    assert not (folder / "ended").exists()  # it gives its launcher the time to end it


@pytest.mark.parametrize("message", ["Connection closed by peer", "Connection reset by peer"])
def test_a_rank_that_lost_another_does_not_outlive_its_launcher(message, tmp_path):
    """04's launcher is rank 0: where that is ended, nobody ends the others."""
    assert wait_for(in_fork(start_a_rank_and_end, tmp_path, message), HANG) == 0
    deadline = time.monotonic() + 5
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.cold
def test_a_debug_server_outlives_a_killed_rank_0(start):
    """And pkill -f debug_server, which its topic names, reaches it."""
    pytest.importorskip("torch.distributed.debug")
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("from Python 3.14 on it has another name")
    topic = ["--standalone", "--nproc-per-node=2", "-m", "topics.debug_server", "--sleep=1000"]
    job = start(*TORCHRUN, *topic, *ENDLESS)
    with_rank_0 = set()

    def server_is_there():
        for pid in job.processes():
            with contextlib.suppress(OSError):
                if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes():
                    with_rank_0.add(pid)
        return len(with_rank_0) == 2

    job.until(server_is_there)
    rank_0 = min(with_rank_0)
    os.kill(rank_0, signal.SIGKILL)
    job.until(lambda: job.process.poll() is not None, LEFT)
    job.until(lambda: len(job.processes()) == 1, LEFT)
    [server] = with_rank_0 - {rank_0}
    assert job.processes() == [server]
    assert b"debug_server" in Path(f"/proc/{server}/cmdline").read_bytes()
    os.kill(server, signal.SIGTERM)  # pkill's
    job.until(lambda: not job.processes(), LEFT)


def test_a_rank_that_waits_for_its_launcher_ends_at_its_sigterm():
    """Also where a script collects that signal, as topics/preemption.py does."""
    with tempfile.TemporaryDirectory() as name:
        old = signal.signal(signal.SIGTERM, lambda *_: None)
        pid = in_fork(lose_the_other_rank, Path(name), "Connection reset by peer")
        signal.signal(signal.SIGTERM, old)
        while not (Path(name) / "started").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)
        assert wait_for(pid, 5) == -signal.SIGTERM


def test_a_lost_socket_of_a_users_own_is_shown_at_once(monkeypatch, capsys):
    """It is a cause, and not what has become of another rank."""
    monkeypatch.setattr(checks, "_launcher_ended", lambda: pytest.fail("waits"))
    error = ConnectionResetError(104, "Connection reset by peer")
    checks._excepthook(type(error), error, None)
    assert "ConnectionResetError: [Errno 104]" in capsys.readouterr().err


BY = [(by, n) for by in ("a terminal", "a script's &") for n in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.cold
@pytest.mark.parametrize(("by", "number"), of_the_day(BY, 2))
def test_a_signal_to_the_parent_of_01_alone_ends_all_ranks(by, number, start):
    """As from a batch system or `kill PID`. What a script starts with & ignores SIGINT at first."""
    command = [*LAUNCH["01"], *ENDLESS]
    if by != "a terminal":
        command = ["sh", "-c", '"$@" & echo its pid is $!; wait $!', "sh", *command]
    job = start(*command)
    job.until_it_says(r"epoch 1/100000")
    pid = job.process.pid if by == "a terminal" else int(job.until_it_says(r"its pid is (\d+)")[1])
    os.kill(pid, number)
    assert job.end(LEFT) == 128 + number, job.text
    assert f"ended by {number.name}" in job.text and "Traceback" not in job.text


def test_an_orphan_of_a_killed_torchrun_is_found_by_the_command_in_the_text(start):
    """kill -9 of torchrun itself leaves its ranks behind: nobody is there to end them."""
    job = start(*LAUNCH["02"], *ENDLESS)
    job.until_it_says(r"epoch 1/100000")
    job.process.kill()
    job.process.wait()
    assert job.processes(), "then the text about leftovers can go"
    orphans = subprocess.run(["pgrep", "-f", r"02_torchrun\.py"], capture_output=True, text=True)
    assert set(map(str, job.processes())) <= set(orphans.stdout.split())


# ---- hang clinic ---------------------------------------------------------------------------------

CLINIC = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "topics.debugging"]
CLINIC += ["--checkpoint=", "--epochs=1"]


def test_a_mismatch_is_a_timeout_and_the_flight_recorder_names_it(start, tmp_path):
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    there = ["env", "-C", tmp_path, f"PYTHONPATH={path}"]  # nothing may be written in it
    place = f"--flight={tmp_path}/elsewhere/flight"
    job = start(*there, *CLINIC, "--case=mismatch", "--timeout=5", place)
    assert job.end() == 1
    assert "Timed out waiting 5000ms" in job.text
    assert "rank 0 | flight recorder: the last is gloo:all_reduce, line" in job.text
    assert "rank 1 | flight recorder: the last is gloo:broadcast, line" in job.text
    flight = tmp_path / "elsewhere" / "flight"
    assert not (tmp_path / "checkpoints").exists()
    reader = [Path(sys.executable).with_name("torchfrtrace"), flight, "-p", "rank_"]
    report = subprocess.run(reader, capture_output=True, text=True, timeout=HANG)
    assert "COLLECTIVE_TYPE_MISMATCH" in report.stdout + report.stderr


def test_detail_names_a_mismatch_at_once(start):
    job = start(*CLINIC, "--case=mismatch", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert job.end(60) == 1  # the timeout is 120
    assert "Detected mismatch between collectives on ranks" in job.text
    assert "OpType=BROADCAST" in job.text


def test_monitored_barrier_names_the_missing_rank(start):
    job = start(*CLINIC, "--case=monitored", "--timeout=4")
    assert job.end() == 1
    assert "Rank 1 failed to pass monitoredBarrier in 4000 ms" in job.text


def test_py_spy_shows_who_sits_where(start):
    py_spy = shutil.which("py-spy")
    if not py_spy:
        pytest.skip("pip install py-spy")
    job = start(*CLINIC, "--case=stuck", "--timeout=30")
    dumps = {}
    for rank in "01":
        pid = job.until_it_says(rf"rank {rank} \| look inside it: py-spy dump --pid (\d+)")[1]
        dumps[rank] = ""
        while "hang (" not in dumps[rank]:
            dump = subprocess.run([py_spy, "dump", "--pid", pid], capture_output=True, text=True)
            assert job.process.poll() is None, dump.stderr
            dumps[rank] = dump.stdout
    assert "barrier (" in dumps["0"]
    assert "barrier (" not in dumps["1"]


def test_a_debugger_on_rank_0_while_the_others_wait():
    pexpect = pytest.importorskip("pexpect")
    environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"} | CPU
    words = [*CLINIC, "--case=breakpoint", "--timeout=60"]
    child = pexpect.spawn(words[0], words[1:], cwd=ROOT, env=environ, timeout=HANG, encoding="utf8")
    try:
        child.expect(r"Pdb\)")
        child.sendline("print('here is', rank, 'of', world_size)")
        child.expect("here is 0 of 2")
        child.sendline("c")
        child.expect("epoch 1/1 .*train loss")
        child.expect(pexpect.EOF)
        child.wait()  # close() would send SIGHUP to one that is still about to end
        assert child.exitstatus == 0
    finally:
        child.close(force=True)
