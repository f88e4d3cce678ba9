"""topics/lightning_dataset.py: how many copies of the data the ranks and their parent hold."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from test_lightning import by_hand

from ladder import fork, launch, of_the_day

pytestmark = pytest.mark.cold  # it counts pages of memory
DATA = ["--dataset=fake:1024", "--epochs=1"]  # 12.6 MB


@pytest.fixture(scope="module")
def reference():
    """Rung 04 on the same data."""
    done = fork("04_lightning.py", 2, *DATA)
    assert done.codes == [0, 0] and len(done.epochs) == 1, done.err
    return done.epochs[0]


@pytest.mark.parametrize(
    "strategy, copies", [("ddp_fork", 1), *of_the_day([("ddp_spawn", 1), ("ddp", 2)], 1)]
)
def test_copies(strategy, copies, reference, tmp_path):
    """Real launches: ranks that the tests fork would begin with the tests' memory.

    With two threads in the process that loads: those of OpenMP do not survive a fork.
    """
    log = f"--log-json={tmp_path}/log"
    words = ["-m", "topics.lightning_dataset", "--devices=2", f"--strategy={strategy}"]
    done = launch(sys.executable, *words, *DATA, log, env={"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    text = rf"^{strategy}: 2 ranks and their parent hold (\S+) copies of the data \(12.6 MB\)$"
    [found] = re.findall(text, done.stdout, re.M)
    assert float(found) == pytest.approx(copies, abs=0.1)
    assert f"\nmeasured {found} copies of the data on 2 ranks, expected " in done.stdout
    [epoch] = [json.loads(line) for line in (tmp_path / "log").open()]
    for name in ("train_loss", "test_accuracy", "test_samples"):
        assert epoch[name] == pytest.approx(reference[name], abs=1e-6)


def test_no_room_in_shared_memory():
    """Nothing is moved there, for the kernel would end the process without a word."""

    def small_disk():
        by_hand()
        room = {"/dev/shm": 1_000_000}
        shutil.disk_usage = lambda path: SimpleNamespace(free=room.get(path, 10**12))
        torch.multiprocessing.start_processes = lambda *_, **options: sys.exit("starts the ranks")

    done = fork("topics/lightning_dataset.py", 1, "--strategy=ddp_spawn", before=small_disk)
    assert done.codes == [2] and done.err.count("\n") == 1, done.err
    assert "lightning_dataset.py: /dev/shm has 1000000 bytes free: use ddp_fork" in done.err
