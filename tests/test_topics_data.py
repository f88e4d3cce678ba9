"""The topics about data prove their points: in memory once, graphs, fed by Dask."""

import json
import re
import sys
import tempfile
from functools import partial

import pytest

from ladder import fork, launch


def assert_same_losses(mine: list[dict], reference: list[dict]) -> None:
    assert len(mine) == len(reference) > 0
    for ours, theirs in zip(mine, reference, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("way", "ranks", "copies"), [("shared", 4, 1), ("copy", 2, 2), ("mmap", 4, 1)]
)
def test_shared_dataset(way, ranks, copies, tmp_path):
    """Copies of the data in the memory of all ranks and their parent; the losses are 01's.

    Forked ranks begin with their parent's memory, so only a file that they map can be counted.
    """
    options = ["--epochs=1", f"--way={way}"]
    if way != "mmap":
        checkpoint, log = f"--checkpoint={tmp_path}/a.pt", f"--log-json={tmp_path}/log"
        command = [
            sys.executable,
            "-m",
            "topics.shared_dataset",
            f"--nproc={ranks}",
            checkpoint,
            log,
        ]
        done = launch(*command, *options)
        assert done.returncode == 0, done.stderr
        out, epochs = done.stdout, [json.loads(line) for line in (tmp_path / "log").open()]
    else:
        aside = partial(setattr, tempfile, "tempdir", str(tmp_path))  # other runs' files
        done = fork("topics/shared_dataset.py", ranks, *options, before=aside)
        assert done.codes == [0], done.err
        out, epochs = done.out, done.epochs
    text = rf"^{way}: {ranks} ranks and their parent hold (\S+) copies of the data \(4.0 MB\)$"
    assert float(re.search(text, out, re.M)[1]) == pytest.approx(copies, abs=0.1)
    assert_same_losses(epochs, fork("01_single_node_multi_gpu.py", 4, "--epochs=1").epochs)
    assert not list(tmp_path.glob("data-*")), "the file has gone"


def test_graph_dataset(tmp_path):
    """Far above chance (a third), and the same at one and two ranks, which have 250 and 249 graphs
    to test on. A finished run says so, and a checkpoint of another script is refused."""
    pytest.importorskip("torch_geometric")
    alone = fork("topics/graph_dataset.py", 1)
    folder = tmp_path / "two"
    both = fork("topics/graph_dataset.py", 2, folder=folder)
    assert (alone.codes, both.codes) == ([0], [0, 0]), alone.err + both.err
    assert_same_losses(both.epochs, alone.epochs)
    last = both.epochs[-1]
    assert last["test_samples"] == 499 and last["test_accuracy"] > 0.7 and last["train_loss"] < 0.6
    assert "deprecated" not in both.err
    again = fork("topics/graph_dataset.py", 2, folder=folder)
    assert again.codes == [0, 0] and "has 5 epochs, nothing left to do" in again.out
    more = fork("topics/graph_dataset.py", 1, "--epochs=6", folder=folder)
    assert more.codes == [0] and more.epochs[-1]["epoch"] == 6
    digits = fork("00_single_gpu.py", 1, "--epochs=1", "--dataset=fake:96", "--image-size=8")
    wrong = fork("topics/graph_dataset.py", 1, f"--checkpoint={digits.checkpoint}")
    assert wrong.codes == [2] and "was made with --model small" in wrong.err
    wrong = fork("topics/graph_dataset.py", 1, "--dataset=MNIST")
    assert wrong.codes == [2] and "has its own data set" in wrong.err
