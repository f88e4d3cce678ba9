"""A start of Python that warm/parent.py takes over looks from outside as one of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.environ.get("COLD") == "1", reason="all starts are cold"
)
SHOW = """
import os, signal, sys, time
assert "torch" in sys.modules, "it was started cold"
os.write(1, repr((sys.argv, os.getcwd(), os.environ["SAID"], sys.stdin.read(),
                  signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)).encode())
if __name__ == "__main__" and len(sys.argv) > 1:
    {end}
"""


def start(folder, end, **options):
    (folder / "show.py").write_text(SHOW.format(end=end))
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"SAID": "yes"}
    command = [sys.executable, "show.py", "a b"]
    options = {"restore_signals": False, "cwd": folder, "env": env, "text": True} | pipe | options
    return subprocess.Popen(command, **options)


# A minute. (A signal just before a sleep is seen after it: one of 60 s slept on, once.)
SLEEPS = "[time.sleep(0.1) for _ in range(600)]"


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("pass", 0, ""),
        ("sys.exit('one line')", 1, "one line"),
        ("os._exit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.abort()", -6, ""),
    ],
)
def test_it_ends_as_its_script_ends(end, code, last, tmp_path):
    process = start(tmp_path, end)
    out, err = process.communicate("typed", timeout=60)
    assert process.returncode == code
    assert out == repr((["show.py", "a b"], str(tmp_path), "yes", "typed", False))
    assert (err.splitlines() or [""])[-1] == last
    assert "parent.py" not in err


def test_signals(tmp_path):
    """They reach the script; a KILL, which cannot be passed on, ends it; ignored ones stay so."""
    waits = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print(os.getpid(), flush=True); "
    )
    waits += SLEEPS
    process = start(tmp_path, waits, stdin=subprocess.DEVNULL)
    process.stdout.readline()
    process.terminate()
    assert process.wait(60) == 3

    def ignore():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    process = start(tmp_path, waits, stdin=subprocess.DEVNULL, preexec_fn=ignore)
    line = process.stdout.readline()
    assert line.startswith(repr((["show.py", "a b"], str(tmp_path), "yes", "", True)))
    worker = int(line.rpartition(")")[2])
    process.kill()
    wait_until_gone(worker)


def test_a_signal_that_comes_after_the_end(tmp_path):
    """A terminal that closes behind a script does not change its exit code (it did: 1, not 0)."""
    waits = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); "
    waits += "print(os.getpid(), flush=True); " + SLEEPS
    process = start(tmp_path, waits, stdin=subprocess.DEVNULL)
    worker = int(process.stdout.readline().rpartition(")")[2])
    process.send_signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGTERM)
    wait_until_gone(worker)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 3


def wait_until_gone(pid):
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_marked_test_starts_cold(monkeypatch, tmp_path):
    monkeypatch.delenv("WARM")
    process = start(tmp_path, "pass")
    assert "it was started cold" in process.communicate("", timeout=60)[1]
