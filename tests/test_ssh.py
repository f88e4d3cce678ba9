"""topics/ssh_launch.sh on two addresses of this machine, with a real sshd that lets our key in."""

import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
import test_faults
from test_contract import run

import checks

start = test_faults.start  # fixture
SSHD = shutil.which("sshd", path="/usr/sbin")
SCRIPT = ["bash", "topics/ssh_launch.sh"]
pytestmark = pytest.mark.skipif(
    not os.environ.get("CI") and (not SSHD or os.geteuid() != 0), reason="needs sshd, and root"
)


@pytest.fixture
def nodes(tmp_path):
    """Return the environment in which SSH reaches 127.0.0.1 and 127.0.0.2."""
    os.makedirs("/run/sshd", exist_ok=True)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name]
        subprocess.run(words, check=True)
    port, log = checks.free_port(), tmp_path / "log"
    (tmp_path / "sshd").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\nHostKey {tmp_path}/host\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nPidFile none\nUsePAM no\n"
        f"SetEnv WARM={os.environ.get('WARM', '')} PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
    )
    daemon = subprocess.Popen([SSHD, "-D", "-f", tmp_path / "sshd", "-E", log])
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_text().count("Server listening") == 2):
        assert daemon.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    known = f"-o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new"
    yield {
        "SSH": f"ssh -q -F none -p {port} -i {tmp_path}/user {known}",
        "PORT": checks.free_port(),
        "NPROC": "1",
    }
    daemon.terminate()
    daemon.wait(30)


def ranks():
    """Return the processes that are ranks or launchers of a rung, of whatever job."""
    words = {"03_multinode.py", "--seed=4711"}
    return {
        p.pid for p in psutil.process_iter(["cmdline"]) if words <= {*(p.info["cmdline"] or ())}
    }


def test_it_trains_on_two_nodes(nodes, start):
    job = start(*SCRIPT, "127.0.0.1 127.0.0.2", "--epochs=2", env=nodes)
    assert job.end() == 0, job.text
    losses = re.findall(r"epoch \d/2 \| train loss (\S+)", job.text)
    expected = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs[:2]
    assert losses == [f"{entry['train_loss']:.4f}" for entry in expected]
    for rank in (0, 1):
        assert f"rank {rank} of 2 | local rank 0 on " in job.text


@pytest.mark.parametrize("end", ["TERM", "a rank dies"])
def test_its_end_is_the_end_of_all(end, nodes, start):
    job = start(*SCRIPT, "127.0.0.1 127.0.0.2", "--epochs=1000", "--seed=4711", env=nodes)
    job.until_it_says("epoch 1/1000")
    if end == "TERM":
        job.process.terminate()
    else:
        os.kill(max(ranks()), signal.SIGKILL)
    assert job.end() == (143 if end == "TERM" else 1), job.text
    deadline = time.monotonic() + 60
    while ranks():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_mistakes_are_one_line(nodes, start):
    job = start(*SCRIPT, env=nodes)
    assert job.end() == 2 and job.text.splitlines() == [
        'ssh_launch.sh: which nodes? bash topics/ssh_launch.sh "n1 n2"'
    ]
    job = start(*SCRIPT, "127.0.0.3", env=nodes | {"SSH": nodes["SSH"].replace("-q ", "")})
    assert job.end() == 255 and "Connection refused" in job.text
