"""No launcher, or the old one: a command a rank, a late rank, a missing rank, Ctrl-C."""

import os
import re
import signal
import sys

import pytest
from test_contract import LOSS, run
from test_faults import LEFT, start  # noqa: F401  start is a fixture

from ladder import ROOT, TORCHRUN

BY_HAND = ["bash", "topics/manual_launch.sh"]
ONE_EPOCH = ["--epochs=1"]


def seconds_of(text: str, rank: int, stage: str) -> float:
    return float(re.search(rf"rank {rank} \| +([\d.]+) s \| {stage}", text)[1])


def assert_loss(text: str) -> None:
    loss = float(re.search(r"train loss ([\d.]+)", text)[1])
    assert abs(loss - run("00_single_gpu.py", 1, whole=True).epochs[0]["train_loss"]) < 2 * LOSS


def test_each_rank_tells_its_way(start):  # noqa: F811
    job = start(*BY_HAND, *ONE_EPOCH)
    assert job.end() == 0, job.text
    for rank in (0, 1):
        assert (
            f"RANK={rank} LOCAL_RANK={rank} python 03_multinode.py {' '.join(ONE_EPOCH)}"
            in job.text
        )
        ways = [seconds_of(job.text, rank, way) for way in ("init", "rendezvous", "barrier")]
        assert ways == sorted(ways)
    assert_loss(job.text)


def test_the_others_wait_for_a_late_rank(start):  # noqa: F811
    job = start(*BY_HAND, "late", *ONE_EPOCH)
    assert job.end() == 0, job.text
    waited = [seconds_of(job.text, rank, "rendezvous") for rank in (0, 1)]
    assert waited[0] > waited[1]  # rank 0 was there before
    assert_loss(job.text)


def test_a_missing_rank_is_a_timeout_that_says_so(start):  # noqa: F811
    job = start(*BY_HAND, "missing", *ONE_EPOCH)
    assert job.end() == 1
    assert "1/2 clients joined" in job.text
    assert "rendezvous: all" not in job.text


def test_ctrl_c_ends_ranks_that_wait(start):  # noqa: F811
    job = start(*BY_HAND, "late", *ONE_EPOCH)
    job.until_it_says("rank 0 .* init")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end(LEFT) == 130


@pytest.mark.parametrize(
    "words, line",
    [
        (["never"], "manual_launch.sh: there is no case never, only late and missing"),
        (["--epochs=x"], "03_multinode.py: argument --epochs: invalid int value: 'x'"),
    ],
)
def test_wrong_words(words, line, start):  # noqa: F811
    job = start(*BY_HAND, *words)
    assert job.end() == 2
    assert [text for text in job.text.splitlines() if "MASTER_ADDR" not in text] == [line]


# ---- the old launcher ----------------------------------------------------------------------------

OLD = [sys.executable, "-m", "torch.distributed.launch"]


def test_the_old_launcher_adds_an_argument_and_sets_the_variables(start, tmp_path):  # noqa: F811
    """What the text says of it, for the torch that is installed."""
    script = tmp_path / "show.py"
    script.write_text(
        # One write: two processes share the pipe, and print() may write its words one by one.
        "import os, sys\n"
        "words = ['argument', *sys.argv[1:], 'variable', os.environ['LOCAL_RANK']]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())\n"
    )
    job = start(*OLD, "--nproc-per-node=2", script)
    assert job.end() == 0, job.text
    for rank in (0, 1):
        assert f"argument --local-rank={rank} variable {rank}" in job.text
    assert re.search(r"torch\.distributed\.launch is deprecated", job.text)
    job = start(*OLD, "--nproc-per-node=2", "--use-env", script)
    assert job.end() == 0, job.text
    assert "argument variable 1" in job.text
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", script)
    assert job.end() == 0, job.text
    assert "argument variable 1" in job.text


def test_the_script_of_the_notes_for_it(start, tmp_path):  # noqa: F811
    """The five lines of docs/notes.md, as they stand there."""
    notes = (ROOT / "docs" / "notes.md").read_text()
    (tmp_path / "old.py").write_text(re.search(r"```python\n(.*?)```", notes, re.DOTALL)[1])
    job = start(*OLD, "--nproc-per-node=2", tmp_path / "old.py")
    assert job.end() == 0 and {"local rank 0", "local rank 1"} <= set(job.text.splitlines())
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", tmp_path / "old.py")
    assert job.end() == 0 and job.text.count("local rank None") == 2, job.text


def test_a_rung_runs_under_the_old_launcher(start):  # noqa: F811
    job = start(*OLD, "--nproc-per-node=2", "03_multinode.py", *ONE_EPOCH)
    assert job.end() == 0, job.text
    assert_loss(job.text)
