"""Several nodes without Slurm: torchrun on two nodes that have a network, and how that breaks.

The nodes are those of slurm/laptop_cluster.sh, with their own addresses, host names and processes.
A job that waits for what never comes waits some seconds here, far less than by default: if the
option for that did nothing, it would not end within PATIENCE.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_faults
import test_slurm
from test_contract import LOSS, run

from ladder import TORCHRUN, fork

PATIENCE = 60  # seconds; torch waits 60 twice, 120, 600 or 900, and a cut-off node 924
TWO_NODES = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1"]
C10D = [*TWO_NODES, "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29410", "--rdzv-id=test"]
NEVER = ["03_multinode.py", "--epochs=1"]  # for jobs that cannot begin
LONG = ["03_multinode.py", "--epochs=1000"]  # for jobs that are not to reach their end

cluster, start = test_slurm.cluster, test_faults.start  # fixtures


@pytest.fixture
def lab(cluster, start):
    """Two nodes: .start(node, command) gives a Job, .call(node, command) waits for its end."""

    def start_on(node, *command, env=None):
        folder = {"LAPTOP_DIR": cluster.env["LAPTOP_DIR"]}
        return start(test_slurm.CLUSTER, "node", node, *command, env=folder | (env or {}))

    def call(node, *command):
        answer = cluster.slurm("node", node, *command)
        assert answer.returncode == 0, answer.stdout
        return answer.stdout

    def by_hand(node, rank, world_size, endpoint, *options, env=None):
        """Start a rank as `srun python` does, without torchrun."""
        address, port = endpoint.split(":")
        env = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0} | (env or {})
        env |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        env = {name: str(value) for name, value in env.items()}
        return start_on(node, sys.executable, *NEVER, *options, env=env)

    return SimpleNamespace(start=start_on, call=call, by_hand=by_hand, slurm=cluster.slurm)


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_losses(epochs: list[dict], reference: list[dict]) -> None:
    assert [entry["epoch"] for entry in epochs] == [entry["epoch"] for entry in reference]
    for entry, other in zip(epochs, reference, strict=True):
        assert abs(entry["train_loss"] - other["train_loss"]) < LOSS


def assert_nothing_runs(lab) -> None:
    """Job.end() has looked for the job's own processes; this is what a user would look at."""
    for node in ("n1", "n2"):
        assert "03_multinode" not in lab.call(node, "ps", "ax", "-ww")


def wait_for_listener(lab, job) -> None:
    job.until(lambda: lab.call("n1", "ss", "-Hltn", "sport = :29410"), PATIENCE)


def test_two_nodes_print_the_numbers_of_rung_00_also_when_one_is_late(lab, tmp_path):
    options = ["--epochs=2", f"--log-json={tmp_path}/log"]
    first = lab.start("n1", *C10D, "03_multinode.py", *options)
    wait_for_listener(lab, first)
    time.sleep(3)
    assert first.process.poll() is None and first.text == ""  # it waits
    second = lab.start("n2", *C10D, "03_multinode.py", *options)
    assert (first.end(), second.end()) == (0, 0), first.text + second.text
    # torchrun on n2 may add a warning that n1's, and with it the store, has ended before it.
    rows = [re.findall(r"^rank .*", job.text, re.MULTILINE) for job in (first, second)]
    where = "local rank 0 on n{} | cpu | 2000 samples"
    assert rows == [[f"rank {r} of 2 | {where.format(r + 1)}"] for r in (0, 1)]
    assert "epoch" not in second.text  # rank 0 alone prints numbers
    assert "world size 2 | batch 48 x 2 = 96 |" in first.text
    reference, epochs = run("00_single_gpu.py", 1, whole=True).epochs[:2], entries(tmp_path / "log")
    assert_same_losses(epochs, reference)
    for name in ("test_accuracy", "test_samples"):
        assert [entry[name] for entry in epochs] == [entry[name] for entry in reference]


def test_a_node_that_never_comes_ends_the_wait_of_the_others(lab):
    """Five jobs at once, each on one side of a missing node. All have to end and to say why."""
    conf = "--rdzv-conf=join_timeout=5,read_timeout=5"
    nobody = ["n1:29501", "n9:29502", "n1:29503"]  # no listener, or no such host
    jobs = {
        # Sad but so: it does not say how many nodes have come.
        r"RendezvousTimeoutError": lab.start("n1", *C10D, conf, *NEVER),
        r"(?s)while trying to connect to \(n1, 29501\).*RendezvousConnectionError": lab.start(
            "n2", *TWO_NODES, "--rdzv-backend=c10d", f"--rdzv-endpoint={nobody[0]}", conf, *NEVER
        ),
        r"DistNetworkError: .* while trying to connect to \(n9, 29502\)": lab.by_hand(
            "n2", 1, 2, nobody[1], "--timeout=5"
        ),
        # Of three ranks the last is missing. Rank 0 counts. Rank 1 misses rank 0's address, or
        # finds that rank 0 has gone.
        r"DistStoreError: Timed out .* waiting for clients. 2/3 clients joined": lab.by_hand(
            "n1", 0, 3, nobody[2], "--timeout=10"
        ),
        r"keys: /default_pg/0//cpu//0/0|remote=\[n1\]:29503.* closed": lab.by_hand(
            "n2", 1, 3, nobody[2], "--timeout=10"
        ),
    }
    for line, job in jobs.items():
        assert job.end(PATIENCE) == 1, job.text
        assert re.search(line, job.text), f"{line} not in:\n{job.text}"
        assert "epoch" not in re.sub(r"--epochs", "", job.text)
    assert_nothing_runs(lab)


def test_the_interface_of_gloo(lab):
    """Three jobs at once: a name that no card has, a card without a way to the others, the card."""
    for number, node in enumerate(("n1", "n2"), 1):
        lab.call(node, "ip", "link", "add", "card0", "type", "veth", "peer", "name", "lonely")
        lab.call(node, "ip", "address", "add", f"10.98.0.1{number}/24", "dev", "card0")
        lab.call(node, "ip", "link", "set", "card0", "up")
        lab.call(node, "ip", "link", "set", "lonely", "up")
    try:
        pairs = {}
        for port, names in enumerate([("eth0", "nosuch0"), ("card0", "card0"), ("eth0", "eth0")]):
            endpoint = f"n1:{29510 + port}"
            wait = "--timeout=120" if names == ("eth0", "eth0") else "--timeout=4"
            pairs[names] = [
                lab.by_hand(f"n{r + 1}", r, 2, endpoint, wait, env={"GLOO_SOCKET_IFNAME": names[r]})
                for r in (0, 1)
            ]
        codes = {names: [job.end(PATIENCE) for job in pairs[names]] for names in pairs}
        text = {names: [job.text for job in pairs[names]] for names in pairs}
    finally:
        for node in ("n1", "n2"):
            lab.call(node, "ip", "link", "delete", "card0")
    assert codes == {names: [0, 0] if names[1] == "eth0" else [1, 1] for names in pairs}, text
    assert "epoch 1/1" in text["eth0", "eth0"][0]
    first, second = text["eth0", "nosuch0"]
    assert "Unable to find address for: nosuch0" in second  # at once, on the node that has it wrong
    assert "keys: /default_pg/0//cpu//0/1" in first  # the last number is the rank that is missing
    for output in text["card0", "card0"]:
        assert "Gloo connectFullMesh failed" in output
    assert "No route to host, remote=[10.98.0.1" in "".join(text["card0", "card0"])


def test_a_cut_cable_ends_the_job_on_both_nodes(lab):
    """With each rendezvous. With c10d the torchrun of the node that is cut off asks n1's store, and
    for how long is up to its kernel: 15 minutes, unless tcp_retries2 is lowered."""
    static = [*TWO_NODES, "--master-addr=n1", "--master-port=29420"]
    options = [*LONG, "--timeout=8"]
    lab.call("n2", "sh", "-c", "echo 5 >/proc/sys/net/ipv4/tcp_retries2")
    jobs = [lab.start(node, *C10D, *options) for node in ("n1", "n2")]
    jobs += [lab.start(f"n{r + 1}", *static, f"--node-rank={r}", *options) for r in (0, 1)]
    for job in jobs[::2]:  # rank 0 of each, on n1
        job.until_it_says("epoch 1/1000")
    try:
        assert lab.slurm("link", "n2", "down").returncode == 0
        for job in jobs:
            assert job.end(PATIENCE) == 1, job.text
            assert "Timed out waiting 8000ms for recv operation" in job.text
        assert_nothing_runs(lab)
    finally:
        assert lab.slurm("link", "n2", "up").returncode == 0
        lab.call("n2", "sh", "-c", "echo 15 >/proc/sys/net/ipv4/tcp_retries2")


def test_a_job_goes_on_after_a_power_cut(lab, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    jobs = [lab.start(node, *C10D, *LONG, f"--checkpoint={checkpoint}") for node in ("n1", "n2")]
    jobs[0].until_it_says("epoch 2/1000")
    assert lab.slurm("kill", "n2").returncode == 0
    assert [job.end(PATIENCE) != 0 for job in jobs] == [True, True], jobs[0].text
    epochs = test_faults.load(checkpoint)["epochs"]
    assert epochs >= 2

    assert lab.slurm("boot", "n2").returncode == 0
    jobs[0].until(lambda: lab.slurm("node", "n2", "true").returncode == 0)
    (tmp_path / "00").mkdir()  # what rung 00 makes of the same checkpoint is the reference
    shutil.copyfile(checkpoint, tmp_path / "00" / "checkpoint.pt")
    options = [f"--epochs={epochs + 1}", f"--checkpoint={checkpoint}", f"--log-json={tmp_path}/log"]
    jobs = [lab.start(node, *C10D, "03_multinode.py", *options) for node in ("n1", "n2")]
    assert [job.end() for job in jobs] == [0, 0], jobs[0].text + jobs[1].text
    assert f"resumes after epoch {epochs}\n" in jobs[0].text
    reference = fork(
        "00_single_gpu.py", 1, f"--epochs={epochs + 1}", folder=tmp_path / "00", whole=True
    )
    assert_same_losses(entries(tmp_path / "log"), reference.epochs)


def test_an_elastic_job_goes_on_with_the_node_that_is_left(lab, tmp_path):
    """Somebody ends torchrun on n2. n1 has the meeting point, which could not be lost."""
    options = ["--epochs=5", f"--checkpoint={tmp_path}/checkpoint.pt", f"--log-json={tmp_path}/log"]
    conf = "--rdzv-conf=last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=3"
    # Of two --nnodes the last one counts.
    command = [*C10D, "--nnodes=1:2", "--max-restarts=3", conf, "03_multinode.py", *options]
    jobs = [lab.start(node, *command, env=test_faults.RESTART) for node in ("n1", "n2")]
    jobs[0].until_it_says("epoch 1/5")
    (agent,) = [pid for pid in jobs[1].processes() if is_torchrun(pid)]
    os.kill(agent, signal.SIGTERM)
    assert jobs[1].end(PATIENCE) != 0, jobs[1].text
    assert jobs[0].end(PATIENCE) == 0, jobs[0].text
    sizes = re.findall(r"world size (\d) \| batch (\d+) x", jobs[0].text)
    assert sizes == [("2", "48"), ("1", "96")], jobs[0].text  # the effective batch stays
    assert_same_losses(entries(tmp_path / "log"), run("00_single_gpu.py", 1, whole=True).epochs)


def is_torchrun(pid: int) -> bool:
    """Its launchers have the same words, but later in their command line."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return words[: len(TORCHRUN)] == TORCHRUN
