"""The bench of bugs: every patch applies, and every faulty script misbehaves as its row says."""

import contextlib
import csv
import os
import random
import re
import socket
import time
from pathlib import Path

import pytest
import torch

from labs.bugs import bench, bugs, figure
from ladder import of_the_day

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forked processes cannot use CUDA
torch.set_num_threads(1)
CHECKS = "samples order replicas gradients wrapper accumulation buffers loss evaluation writers"
CHECKS += " checkpoint resume sharding devices collectives learning-rate scheduler precision"
CHECKS = f"{CHECKS} teardown port".split()


def named(row):
    return row.name


@pytest.fixture(scope="module")
def twin_of(tmp_path_factory):
    """Return a function that runs the twin of a row, once for each way to run it."""
    runs = {}

    def run(row):
        key = (row.twin, row.args, row.nproc, row.nodes, row.resumes)
        if key not in runs:
            source = (bugs.ROOT / bugs.path(row.twin)).read_text()
            runs[key] = bench.run_row(row, tmp_path_factory.mktemp("twin"), source)
            assert runs[key].ok, runs[key].err
        return runs[key]

    return run


def equal(a, b):
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-5 * (1 + b.abs())).all())


def agree(tensors):
    """Have all ranks the same, bit for bit?"""
    return all(torch.equal(tensors[0], tensor) for tensor in tensors.values())


def what_happens(row, run, twin):
    """Return the first of these that is true of the run; the order is that of their gravity."""
    if run.hung:
        return "hang"
    if not run.ok:
        return "crash"
    if not run.weights or len(run.weights) < len(twin.weights):
        return "weights"  # no step at all
    if not bugs.TWINS[row.twin].sharded and not agree(run.weights):
        return "replicas"
    if not agree(run.buffers):
        return "buffers"
    if not all(equal(run.weights[rank], twin.weights[rank]) for rank in twin.weights):
        return "weights"
    if row.check and bench.output(run) != bench.output(twin):
        return "output"
    if row.check and run.saved != twin.saved:
        return "files"
    return "unseen" if row.check else "same"


def test_rows():
    assert len(bugs.FAULTY) >= 40 and len({row.name for row in bugs.ROWS}) == len(bugs.ROWS)
    for row in bugs.ROWS:
        assert (bugs.ROOT / bugs.path(row.twin)).exists()
        assert {row.check, *row.also} <= {None, *CHECKS} and row.check not in row.also, row.name
        assert bool(row.also) == bool(row.because), row.name
        assert re.fullmatch(r"\S+/\S+ ((PR )?#\d+|[0-9a-f]{7})|course: .+", row.source), row.name


def test_patches_apply_and_compile():
    for row in bugs.ROWS:
        compile(bugs.faulty(row), row.name, "exec")
        assert bool(row.edits) or row.check is None


def test_a_patch_that_does_not_fit_is_noticed(monkeypatch):
    row = bugs.FAULTY[0]
    monkeypatch.setitem(row.__dict__, "edits", (("no such line", ""),))
    with pytest.raises(ValueError, match=f"{row.name}: 0 times in"):
        bugs.faulty(row)


def test_readme_is_fresh():
    for path in bugs.READMES:
        assert path.read_text() == bugs.readme(path), "python labs/bugs/bugs.py --write"


TODAY = of_the_day(bugs.ROWS, 20)


@pytest.mark.parametrize("row", TODAY, ids=named)
def test_what_happens(row, twin_of, tmp_path):
    options = {"timeout": 15} if row.group == "hangs" else {}  # others take 1 to 8 s
    twin = twin_of(row)
    run = bench.run_row(row, tmp_path, **options) if row.edits else twin
    happens = what_happens(row, run, twin)
    # healthy: correct, but not the numbers of the twin. A crash of a collective that has no partner
    # is a hang where the other rank lives longer.
    allowed = {"healthy": ("same", "weights")}.get(row.effect, (row.effect,))
    if (row.group, row.effect) == ("hangs", "crash"):
        allowed = ("crash", "hang")
    assert happens in allowed, (happens, run.codes, run.out, run.err)
    if not bugs.TWINS[row.twin].sharded:
        assert agree(twin.weights) and len(twin.weights) == row.nproc * row.nodes


def row_of(name):
    return next(row for row in bugs.ROWS if row.name == name)


def test_what_is_unseen_on_one_free_cpu(twin_of, tmp_path):
    """What the other rows with the effect unseen do where it can be seen."""
    row = row_of("group-not-destroyed")
    assert any(bench.run_row(row, tmp_path / "1").groups.values())
    assert not any(twin_of(row).groups.values())
    row = row_of("fixed-port")
    with socket.socket() as other_job:
        try:
            other_job.bind(("", 12355))
            other_job.listen()
        except OSError:
            pytest.skip("another program has the port")
        run = bench.run_row(row, tmp_path / "2")
        assert run.codes == [1] and "already in use" in run.err[0]
        source = (bugs.ROOT / bugs.path(row.twin)).read_text()
        assert bench.run_row(row, tmp_path / "3", source).ok


def test_a_hang_is_killed(tmp_path):
    run = bench.run_row(row_of("barrier-in-a-branch"), tmp_path, timeout=6)
    assert run.hung and run.codes == [None]

    def left():
        """Return the processes in the run's folder."""
        found = []
        for folder in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                found += [folder] if os.readlink(folder) == str(tmp_path) else []
        return found

    deadline = time.monotonic() + 10  # what was killed takes a moment to go
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()


def test_verdicts():
    row, correct = row_of("clip-on-one-rank"), row_of("twin-flat")
    assert bench.of_checker(row, {"precision", "replicas"}) == "right"
    assert bench.of_checker(row, {"precision", "loss"}) == "right, and loss"
    assert bench.of_checker(row, {"replicas"}) == "wrong: replicas"
    assert bench.of_checker(row, set()) == "missed"
    assert bench.of_checker(row, None) == "no report"
    assert bench.of_checker(correct, set()) == "silent"
    assert bench.of_checker(correct, {"loss"}) == "false alarm: loss"
    assert bench.of_new_lines({"Parameters which did not receive grad: a.b"}) == "names it"
    assert bench.of_new_lines({"a line"}) == "says something"
    assert bench.of_new_lines(set()) == "nothing"


def test_what_the_figure_counts():
    """The latest verdict of each faulty script counts; what a tool was not asked is left out."""
    cells = ["row", "check", *bugs.TOOLS]
    rows = [
        ["a", "loss", "hang", "-", "nothing", "crashes itself", "names it", "exit code", "missed"]
    ]
    rows += [["a", "loss", "", "", "", "", "", "", "right, and port"]]
    rows += [
        ["b", "loss", "crash", "ends it", "names it", "says something", "", "traceback", "wrong: x"]
    ]
    rows += [["c", "", *["right"] * 7]]
    found = figure.counts([dict(zip(cells, row, strict=True)) for row in rows])
    assert list(found) == ["names it", "notices", "crashes itself", "passes it"]
    assert found.loc["user"].tolist() == [0, 2, 0, 0]
    assert found.loc["time-out"].tolist() == [0, 1, 0, 1]
    assert found.loc["info"].tolist() == [1, 0, 0, 1]
    assert found.loc["detail"].tolist() == [0, 1, 1, 0]
    assert found.loc["flight"].tolist() == [1, 0, 0, 0]
    assert found.loc["torchrun"].tolist() == [1, 1, 0, 0]
    assert found.loc["checker"].tolist() == [1, 1, 0, 0]


def test_bench_records(tmp_path, monkeypatch, capsys):
    table = tmp_path / "bugs.csv"
    words = ["loss-of-one-rank", "group-not-destroyed", "--tools=user", f"--csv={table}"]
    monkeypatch.setattr("sys.argv", ["bench.py", *words])
    monkeypatch.setattr("sys.excepthook", bench.sys.excepthook)  # put back what main() changes
    assert bench.main() == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["user"] for row in rows] == ["other numbers", "nothing"]
    assert rows[0]["check"] == "loss" and rows[0]["torch"] == torch.__version__
    monkeypatch.setattr("sys.argv", ["bench.py", "no-such-row"])
    with pytest.raises(SystemExit, match="no row no-such-row"):
        bench.main()


# What the checker cannot know: whether an option means a rank's batch or that of all ranks.
NOT_NAMED = ["batch-not-divided"]


@pytest.mark.slow
def test_ten_rows_under_the_checker(tmp_path, monkeypatch):
    seed = int(os.environ.get("BUGS_SEED", time.time() % 1e6))
    print(f"BUGS_SEED={seed}")
    verdicts = {}
    rows = [row for row in bugs.ROWS if row.name not in NOT_NAMED]
    assert len(rows) + len(NOT_NAMED) == len(bugs.ROWS)
    for row in random.Random(seed).sample(rows, 10):
        broken = bench.check(row, tmp_path / row.name)
        verdicts[row.name] = bench.of_checker(row, broken)
    wrong = {name: v for name, v in verdicts.items() if v not in ("right", "silent")}
    assert not wrong, f"BUGS_SEED={seed}: {wrong}"
