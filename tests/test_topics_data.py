"""The topics about data prove their points: in memory once, graphs, fed by Dask."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import test_faults
import torch
import torch.distributed as dist
from test_lightning import by_hand

import checks
import common
import ladder
from ladder import TORCHRUN, launch

fork = partial(ladder.fork, whole=True)
start = test_faults.start  # a fixture: it ends what is left of the processes
PATIENCE = 200  # seconds; each of Dask's workers imports torch


def assert_same_losses(epochs: list[dict], reference: list[dict]) -> None:
    assert len(epochs) == len(reference) > 0
    for entry, other in zip(epochs, reference, strict=True):
        assert entry["train_loss"] == pytest.approx(other["train_loss"], abs=5e-5)
        assert entry["test_accuracy"] == other["test_accuracy"]


@pytest.mark.cold  # it counts pages of memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("storage", "ranks", "copies"),
    [("mmap", 4, 1), *ladder.of_the_day([("shared", 4, 1), ("copy", 2, 2)], 1)],
)
def test_shared_dataset(storage, ranks, copies, tmp_path):
    """Copies of the data in the memory of all ranks and their parent; the losses are 01's.

    Forked ranks begin with their parent's memory, so only a file that they map can be counted.
    """
    options = ["--epochs=1", f"--storage={storage}"]
    if storage != "mmap":
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
    text = rf"^{storage}: {ranks} ranks and their parent hold (\S+) copies of the data \(4.0 MB\)$"
    assert float(re.search(text, out, re.M)[1]) == pytest.approx(copies, abs=0.1)
    assert_same_losses(epochs, fork("01_single_node_multi_gpu.py", 4, "--epochs=1").epochs)
    # The other kinds make no file.
    assert storage != "mmap" or not list(tmp_path.glob("data-*")), "the file has gone"


def test_no_room_for_the_file_that_all_map(tmp_path):
    """One line names the place; half a file does not stay behind, and no rank waits for it."""

    def no_room():
        leave = sys.exit

        def slowly(code):  # rank 1, which loses its connection to rank 0, would be heard first
            time.sleep(0 if dist.is_initialized() else 2)
            leave(code)

        sys.exit = slowly
        tempfile.tempdir = str(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = fork("topics/shared_dataset.py", 2, "--storage=mmap", "--checkpoint=", before=no_room)
    assert done.codes == [1] and "Traceback" not in done.err, done.err
    assert re.search(r"^shared_dataset.py: cannot write \S+data-\d+.pt: File too", done.err, re.M)
    assert done.err.count("another TMPDIR") == 1 and not list(tmp_path.glob("data-*"))


def test_graph_dataset(tmp_path):
    """Far above chance (a third), and the same at one and two ranks, which have 250 and 249 graphs
    to test on. A finished run says so, and a checkpoint of another script is refused."""
    pytest.importorskip("torch_geometric")
    alone = fork("topics/graph_dataset.py", 1)
    folder = tmp_path / "two"
    both = fork("topics/graph_dataset.py", 2, folder=folder)
    assert (alone.codes, both.codes) == ([0], [0, 0]), alone.err + both.err
    assert_same_losses(both.epochs, alone.epochs)
    assert "therefore the edges alone tell how a graph has grown\n" in both.out
    poor = fork("topics/graph_dataset.py", 1, "--epochs=1", "--lr=1e-9")
    assert "therefore the edges alone tell little of how" in poor.out
    last = both.epochs[-1]
    assert last["test_samples"] == 499 and last["test_accuracy"] > 0.7 and last["train_loss"] < 0.6
    assert "deprecated" not in both.err
    again = fork("topics/graph_dataset.py", 2, folder=folder)
    assert again.codes == [0, 0] and "nothing left to do: it has 5 epochs" in again.out
    more = fork("topics/graph_dataset.py", 1, "--epochs=6", folder=folder)
    assert more.codes == [0] and more.epochs[-1]["epoch"] == 6
    digits = fork("00_single_gpu.py", 1, "--epochs=1", "--dataset=fake:96", "--image-size=8")
    wrong = fork("topics/graph_dataset.py", 1, f"--checkpoint={digits.checkpoint}")
    assert wrong.codes == [2] and "was made with --model small" in wrong.err
    wrong = fork("topics/graph_dataset.py", 1, "--dataset=MNIST")
    assert wrong.codes == [2] and "has its own data set" in wrong.err


@pytest.mark.cold  # it counts pages of memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lightning_graph():
    """The losses of the loop of 02 on two ranks and on one; two forked ranks hold one copy."""
    pytest.importorskip("torch_geometric")
    words = ["--epochs=2", "--graphs=480"]
    fewer = {"edit": lambda text: text.replace("Grown(2000, ", "Grown(480, ")}
    loop = fork("topics/graph_dataset.py", 1, "--epochs=2", **fewer)
    alone = fork("topics/lightning_graph.py", 1, *words)
    two = [*words, "--devices=2", "--strategy=ddp_fork"]
    both = fork("topics/lightning_graph.py", 1, *two, before=by_hand)
    assert alone.codes == both.codes == [0], alone.err + both.err
    assert_same_losses(alone.epochs, loop.epochs)
    assert_same_losses(both.epochs, loop.epochs)
    text = r"^measured (\S+) copies of the data on {} ranks?, expected {}, therefore {}$"
    # What a process that is forked here holds may lie on pages that it shares with the tests.
    assert re.search(text.format(1, "one a rank", "each rank loads"), alone.out, re.M)
    found = re.search(text.format(2, 1, "their parent has loaded for all"), both.out, re.M)
    assert float(found[1]) == pytest.approx(1, abs=0.1)
    # By this name a checkpoint of 04 is refused.
    assert all(done.state["hyper_parameters"]["model"] == "GIN" for done in (alone, both))
    wrong = fork("topics/lightning_graph.py", 1, "--dataset=MNIST")
    assert wrong.codes == [2] and "has its own data set" in wrong.err


ASKED = """if True:
    import importlib, sys, torch
    torch._C._show_config = lambda: sys.exit("it asks torch how it was built")
    import topics.lightning_graph, torch_geometric.typing
    print("imported")
    importlib.reload(torch_geometric.typing)
"""


def test_lightning_graph_starts_no_cuda():
    """To ask torch how it was built starts CUDA, and forked ranks cannot use it after that."""
    pytest.importorskip("torch_geometric")
    done = subprocess.run(
        [sys.executable, "-c", ASKED], cwd=ladder.ROOT, capture_output=True, text=True
    )
    assert done.stdout == "imported\n" and "it asks torch" in done.stderr, done.stderr


DASK = ["-m", "topics.dask_data", "--workers=1", "--checkpoint="]
FED = (
    r"^{}: schedulers (\d+) \| Dask workers (\d+) \| ranks (\d+)"
    r" \| (\S+) MB to ranks, (\S+) MB between nodes"
)


@pytest.mark.parametrize("clusters", ladder.of_the_day(["job", "node", "rank"], 2))
def test_dask_data(clusters, start, tmp_path):
    """One cluster for the job, one a node, or (the mistake) one a rank. The losses are 03's.

    Two nodes on this machine, of one rank each; for the mistake, one node of two ranks.
    """
    pytest.importorskip("distributed")
    options = [*DASK, "--epochs=1", f"--clusters={clusters}", f"--log-json={tmp_path}/log"]
    if clusters == "rank":
        jobs = [start(*TORCHRUN, "--standalone", "--nproc-per-node=2", *options)]
    else:
        node = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
        node += [f"--rdzv-endpoint=localhost:{checks.free_port()}", *options]
        jobs = [start(*node), start(*node)]
    codes = [job.end(PATIENCE) for job in jobs]
    text = "".join(job.text for job in jobs)
    assert not any(codes), text
    *counts, fed, crossed = re.search(FED.format(clusters), text, re.MULTILINE).groups()
    count = 1 if clusters == "job" else 2
    assert counts == [str(count), str(count), "2"]
    assert f"measured Dask clusters: {count}, ranks: 2, expected " in text
    assert f"therefore copies of the data in Dask's workers: {count}\n" in text
    assert len(set(re.findall(r"^rank \d \| scheduler (\S+) ", text, re.MULTILINE))) == count
    assert float(fed) == pytest.approx(4000 * (28 * 28 + 8) / 1e6, abs=0.01)  # bytes and int64s
    assert float(crossed) == pytest.approx(float(fed) / 2 if clusters == "job" else 0, abs=0.01)
    epochs = [json.loads(line) for line in (tmp_path / "log").open()]
    assert_same_losses(epochs, fork("03_multinode.py", 2, "--epochs=1").epochs)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_dask_leaves_nothing_behind(start):
    """The rank that made the cluster is killed. Dask's processes end with it: end() looks."""
    pytest.importorskip("distributed")
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", *DASK, "--epochs=1000")
    job.until_it_says(r"epoch 1/")
    ranks, workers = {}, []
    for pid in job.processes():
        command, environ = (Path(f"/proc/{pid}/{x}").read_bytes() for x in ("cmdline", "environ"))
        found = re.search(rb"\0RANK=(\d)", environ)
        if found and b"topics.dask_data" in command:
            ranks[int(found[1])] = pid
        elif b"spawn_main" in command:
            workers.append(pid)
    assert len(ranks) == 2 and workers
    os.kill(ranks[0], signal.SIGKILL)
    assert job.end() == 1, job.text


SILENT = """\
import os, sys, time
parent = os.getppid()
while "--multiprocessing-fork" in sys.orig_argv and os.getppid() == parent:
    time.sleep(0.1)
"""


def test_dask_worker_never_comes(tmp_path):
    """Its process is there, and silent. The run ends, and says what it has waited for."""
    pytest.importorskip("distributed")
    (tmp_path / "sitecustomize.py").write_text(SILENT)  # each new Python process reads it
    env = {"PYTHONPATH": str(tmp_path)}
    done = fork("topics/dask_data.py", 1, "--workers=1", "--timeout=5", env=env)
    assert done.codes == [2] and not done.epochs and "Traceback" not in done.err, done.err
    assert "Dask has not started 1 workers and read the data: no answer in 4 s" in done.err


LOST = ["cluster.close()", "cluster.loop.add_callback(time.sleep, 999)"]


@pytest.mark.parametrize("fault", ladder.of_the_day(LOST, 1))
def test_dask_scheduler_is_lost(fault):
    """It ends, or hangs, before the first epoch. Each rank ends, and says what it waited for."""
    pytest.importorskip("distributed")

    def edit(text: str) -> str:
        lost = f"    args.timeout /= 60\n    if rank == 0:\n        {fault}\n    dist.barrier()\n"
        return text.replace("    for epoch in", f"{lost}    for epoch in")

    done = fork("topics/dask_data.py", 2, "--workers=1", edit=edit)
    assert done.codes == [2, 2] and not done.epochs and 'dask_data.py", line' not in done.err
    assert len(re.findall("^dask_data.py: Dask has not sent the data", done.err, re.M)) == 2


def gloo_comes_last() -> None:
    """In a rank: from its second gather on, Gloo's threads run where the main thread has a rest."""
    init, gather = dist.init_process_group, dist.all_gather_object
    gloo, calls, cpu = set(), [], {min(os.sched_getaffinity(0))}

    def init_process_group(*args, **options) -> None:
        gloo.update(os.listdir("/proc/self/task"))
        init(*args, **options)
        gloo.symmetric_difference_update(os.listdir("/proc/self/task"))

    def all_gather_object(*args) -> None:
        calls.append(args)
        if len(calls) == 2:
            os.sched_setaffinity(0, cpu)
            for thread in map(int, gloo):
                os.sched_setaffinity(thread, cpu)
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        gather(*args)

    dist.init_process_group, dist.all_gather_object = init_process_group, all_gather_object


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_dask_ends_though_gloo_is_late():
    """With torch 2.9 DDP's end held Python's lock, and waited for a thread that waited for it."""
    pytest.importorskip("distributed")
    done = fork("topics/dask_data.py", 2, "--workers=1", "--epochs=1", before=gloo_comes_last)
    assert done.codes == [0, 0] and len(done.epochs) == 1, done.err


def test_dask_refuses():
    pytest.importorskip("distributed")
    for options, message in {
        "--clusters=all": "--clusters: invalid choice: 'all'",
        "--num-workers=1": "Dask's workers load the data",
    }.items():
        wrong = fork("topics/dask_data.py", 1, options)
        assert wrong.codes == [2] and message in wrong.err


def test_no_graph_is_in_both_sets():
    """Or the accuracy would be that of what the network has learned by heart."""
    pytest.importorskip("torch_geometric")

    def compare():
        sets = []

        class Sampler(torch.utils.data.DistributedSampler):
            def __init__(self, train_set, **options):
                sets.append(train_set)
                super().__init__(train_set, **options)

        def subset(test_set, indices):
            sets.append(test_set)
            train, test = ({str(g.edge_index.tolist()) for g in graphs} for graphs in sets)
            print(f"graphs {len(train)} {len(test)} {len(train & test)}", flush=True)
            sys.exit(0)

        torch.utils.data.DistributedSampler, torch.utils.data.Subset = Sampler, subset

    done = fork("topics/graph_dataset.py", 1, before=compare)
    assert "graphs 2000 499 0\n" in done.out, done.out + done.err


def test_no_digit_is_in_both_sets():
    sets = common.load_datasets(Namespace(dataset="digits"))
    train, test = ({image.numpy().tobytes() for image in part.tensors[0]} for part in sets)
    assert (len(train), len(test)) == (4000, 1000) and not train & test
