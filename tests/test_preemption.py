"""A run that is stopped by a signal and resumes later ends like one that was never stopped."""

import json
import os
import re
import signal
import sys
import time
from functools import partial

import pytest
import torch
from test_contract import assert_weights
from test_faults import CPU, load, start  # noqa: F401  start is a fixture
from test_slurm import cluster  # noqa: F401  a fixture: skips without Slurm, but never in CI

import common
import ladder
from ladder import ROOT, TORCHRUN

fork = partial(ladder.fork, whole=True)

OPTIONS = ["--epochs=3"]
TINY = ["--epochs=1", "--dataset=fake:96", "--image-size=8", "--batch-size=48"]  # two steps
STOPPED = r"stopped in epoch (\d+) after (\d+) samples"


@pytest.fixture(scope="module")
def whole():
    """The run that nobody stops: rung 03."""
    result = fork("03_multinode.py", 2, *OPTIONS, env=CPU)
    assert not any(result.codes), result.err
    return result


def assert_like(whole, checkpoint, log, loss=1e-6, weights=0):
    """Losses and weights are those of the whole run, and no epoch was counted twice."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2, 3]
    for entry, reference in zip(entries, whole.epochs, strict=True):
        assert entry["train_loss"] == pytest.approx(reference["train_loss"], rel=loss)
        assert entry["test_accuracy"] == reference["test_accuracy"]
    assert_weights(load(checkpoint)["weights"], whole.state["weights"], weights)


@pytest.mark.parametrize("name, workers", [("USR1", 0), ("TERM", 1)])
def test_a_request_to_one_rank_and_all_stop_at_the_same_step(name, workers, start, whole, tmp_path):  # noqa: F811
    checkpoint, log = tmp_path / "x.pt", tmp_path / "log"
    options = [*OPTIONS, f"--checkpoint={checkpoint}", f"--log-json={log}"]
    options += [f"--num-workers={workers}"]
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "topics.preemption"]
    job = start(*command, *options)
    job.until_it_says("epoch 1/3")
    [pid] = [pid for pid in job.processes() if environment(pid).get("RANK") == "1"][:1]
    time.sleep(0.2)  # into the second epoch
    os.kill(pid, getattr(signal, f"SIG{name}"))
    job.end()
    epoch, samples = map(int, job.until_it_says(STOPPED).groups())
    assert epoch in (2, 3) and 0 < samples <= 3936 and samples % 96 == 0
    assert len(re.findall(r"exitcode +: 75", job.text)) == 2, job.text  # both ranks, not killed
    mid_epoch = load(checkpoint)["optimizer"]["mid_epoch"]
    assert mid_epoch["samples"] == mid_epoch["sums"][1] == samples

    job = start(*command, *options)
    assert job.end() == 0, job.text
    assert f"resumes after epoch {epoch - 1}\n" in job.text
    assert_like(whole, checkpoint, log)


def environment(pid: int) -> dict[str, str]:
    text = open(f"/proc/{pid}/environ").read()  # noqa: SIM115
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def stop_at(samples: int):
    """Edit the topic: rank 1 of 2 gets the signal at that sample of the first epoch."""
    line = "            stop = torch.tensor(len(stop_requested))\n"
    ask = f"            if rank == 1 and 2 * sums[1] == {samples}:\n"
    ask += "                os.kill(os.getpid(), signal.SIGTERM)\n"
    return lambda source: source.replace(line, ask + line)


@pytest.mark.parametrize("samples", [96, 3936], ids=["first step", "last step"])
def test_a_stop_at_the_edge_of_an_epoch(samples, whole, tmp_path):
    topic = "topics/preemption.py"
    stopped = fork(topic, 2, *OPTIONS, folder=tmp_path, edit=stop_at(samples), env=CPU)
    assert stopped.codes == [75, 75], stopped.err
    assert f"stopped in epoch 1 after {samples} samples" in stopped.out
    resumed = fork(topic, 2, *OPTIONS, folder=tmp_path, env=CPU)
    assert resumed.codes == [0, 0], resumed.err
    assert_like(whole, resumed.checkpoint, tmp_path / "log.json")


def test_a_sample_that_counts_twice_is_said(tmp_path):
    stopped = fork("topics/preemption.py", 2, *TINY, folder=tmp_path, edit=stop_at(48))
    assert stopped.codes == [75, 75], stopped.err
    twice = {"edit": lambda text: text.replace("sampler.skip = mid_epoch", "_ = mid_epoch")}
    resumed = fork("topics/preemption.py", 2, *TINY, folder=tmp_path, **twice)
    assert "measured 144 " in resumed.out and "therefore a stop has cost or" in resumed.out


def test_a_stopped_run_waits_for_a_slow_save_and_counts_all_its_seconds(tmp_path):
    """Where one rank ends, Slurm ends the others: so none may end before the file is there."""

    def slow_save():
        save, leave = common.save_checkpoint, sys.exit

        def save_slowly(*args):
            time.sleep(2)
            save(*args)

        def leave_and_say(code=0):
            print(f"rank ends, file is there: {(tmp_path / 'checkpoint.pt').exists()}", flush=True)
            leave(code)

        common.save_checkpoint, sys.exit = save_slowly, leave_and_say

    run = {"folder": tmp_path, "edit": stop_at(48), "before": slow_save}
    stopped = fork("topics/preemption.py", 2, *TINY, **run)
    assert stopped.codes == [75, 75], stopped.err
    assert stopped.out.count("rank ends, file is there: True") == 2, stopped.out

    state = stopped.state
    mid_epoch = state["optimizer"]["mid_epoch"]
    assert mid_epoch["samples"] == 48 and 0 < mid_epoch["seconds"] < 60
    mid_epoch["seconds"] = 100.0
    torch.save(state, stopped.checkpoint)
    resumed = fork("topics/preemption.py", 2, *TINY, folder=tmp_path)
    assert resumed.codes == [0, 0], resumed.err
    assert "expected 96, therefore no stop has cost or doubled a sample\n" in resumed.out
    assert 96 / 160 < resumed.epochs[0]["samples_per_second"] < 96 / 100


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The checkpoint of a run on two ranks that was stopped in its first epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    result = fork("topics/preemption.py", 2, *OPTIONS, folder=folder, edit=stop_at(1920), env=CPU)
    assert result.codes == [75, 75], result.err
    return result.checkpoint


@pytest.mark.parametrize(
    "world_size, workers", ladder.of_the_day([(1, 0), (2, 2), (3, 0), (4, 1)], 2)
)
def test_other_ranks_and_workers_train_each_sample_once(
    world_size, workers, stopped, whole, tmp_path
):
    (tmp_path / "checkpoint.pt").write_bytes(stopped.read_bytes())
    options = [*OPTIONS, f"--num-workers={workers}"]
    resumed = fork("topics/preemption.py", world_size, *options, folder=tmp_path, env=CPU)
    assert not any(resumed.codes), resumed.err
    # As in the contract: equal to 4 decimals.
    assert_like(whole, resumed.checkpoint, tmp_path / "log.json", loss=1e-4, weights=1e-4)


@pytest.mark.cold  # Slurm signals the processes of a job, which a fork is not
@pytest.mark.parametrize("name", ladder.of_the_day(["USR1", "TERM"], 1))
def test_slurm_requeues(name, cluster, whole, tmp_path):  # noqa: F811
    """USR1 is what the time limit sends, by the header of the file; TERM is what a scheduler sends
    to the ranks of a job that must make room."""
    checkpoint, log = tmp_path / "x.pt", tmp_path / "log"
    training = [*OPTIONS, f"--checkpoint={checkpoint}", f"--log-json={log}"]
    options = ["--gpus-per-node=0", "--ntasks-per-node=1", "--mem=4G"]
    job = cluster.submit(ROOT / "slurm" / "requeue.sbatch", options, training)
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cluster.slurm("exec", "scancel", f"--signal={name}", job).returncode == 0
    state, code, text = cluster.wait(job)
    assert (state, code) == ("COMPLETED", "0:0"), text
    assert len(re.findall(STOPPED, text)) == 1, text
    assert re.findall(rf"^job {job} \| restart (\d) \|", text, re.M) == ["0", "1"], text
    assert_like(whole, checkpoint, log)
