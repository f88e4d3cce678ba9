"""topics/standalone.py: the ladder's numbers, and somebody else's job in its EDIT block."""

import os
import re
import sys

import pytest
import torch
from test_contract import LOSS, run

import checks
from ladder import ROOT, TORCHRUN, launch, launcher_env

FILE = ROOT / "topics" / "standalone.py"
EDIT = re.compile(r"(?<=-\n)mean_loss.*(?=\n# ---- end of EDIT)", re.DOTALL)
LINE = re.compile(r"epoch (\d+) \| train loss (\S+) \| test metric (\S+)")

REGRESSION = """
mean_loss = nn.functional.mse_loss


def metric_sum(outputs, targets):  # the sum of absolute errors
    return (outputs - targets).abs().sum()


def load_datasets():
    table = np.random.default_rng(0).normal(size=(331, 5)).astype(np.float32)
    x, y = torch.from_numpy(table[:, :4]), torch.from_numpy(table[:, :4] @ [[1], [2], [3], [4]])
    sets = TensorDataset(x[:240], y[:240].float()), TensorDataset(x[240:], y[240:].float())
    return sets


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

"""
TEXT = """
mean_loss = nn.functional.cross_entropy


def metric_sum(outputs, targets):
    return (outputs.argmax(dim=1) == targets).sum()


def load_datasets():  # is there an "x" among the letters?
    letters = np.random.default_rng(0).integers(97, 123, size=(700, 12))
    labels = torch.from_numpy((letters == ord("x")).any(axis=1)).long()
    data = TensorDataset(torch.from_numpy(letters), labels)
    return Subset(data, range(600)), Subset(data, range(600, 700))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.head = nn.Embedding(128, 16), nn.Linear(16, 2)

    def forward(self, text):
        return self.head(self.letters(text).mean(dim=1))


def build_model():
    return Words()

"""
JOBS = {"digits": None, "regression": REGRESSION, "text": TEXT}


def train(world_size, folder, job, *options, code=0, before=None) -> list[tuple]:
    """Fork the ranks; return (epoch, loss, metric) as they were printed."""
    text = FILE.read_text()
    if JOBS[job]:
        text, count = EDIT.subn(JOBS[job].replace("\\", r"\\"), text)
        assert count == 1, "the EDIT block has no clear borders any more"
    folder.mkdir(exist_ok=True)
    port, pids = checks.free_port(), []
    out = folder / f"out.{len(list(folder.iterdir()))}"
    for rank in range(world_size):
        if pid := os.fork():
            pids.append(pid)
            continue
        code_of_child = 1
        try:
            fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
            sys.argv = [str(FILE), *options]
            if before:
                before()
            torch.set_num_threads(1)
            os.environ |= launcher_env(rank, world_size, port)
            exec(compile(text, str(FILE), "exec"), {"__name__": "__main__", "__file__": str(FILE)})
            code_of_child = 0
        except SystemExit as end:
            print(end.code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(code_of_child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert set(codes) == {code}, out.read_text()
    found = LINE.findall(out.read_text())
    return [(int(epoch), float(loss), float(metric)) for epoch, loss, metric in found]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_prints_the_losses_of_the_ladder(world_size, tmp_path):
    entries = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs
    printed = train(world_size, tmp_path / "digits", "digits", "--epochs=2")
    assert [epoch for epoch, _, _ in printed] == [1, 2]
    for (_, loss, metric), entry in zip(printed, entries[:2], strict=True):
        assert abs(loss - entry["train_loss"]) < LOSS + 5e-5  # printed with 4 decimals
        assert metric == round(entry["test_accuracy"], 4)


@pytest.mark.parametrize("job", ["regression", "text"])
def test_another_job_in_its_edit_block(job, tmp_path):
    """It learns, and has the same numbers on 1, 2 and 3 ranks; 2 + 3 epochs are 5."""
    options = ["--batch-size=60", "--epochs=5", f"--lr={0.05 if job == 'regression' else 1.0}"]
    alone = train(1, tmp_path / "1", job, *options)
    assert len(alone) == 5 and alone[-1][1] < 0.8 * alone[0][1]
    for world_size in (2, 3):
        for mine, other in zip(
            train(world_size, tmp_path / "n", job, *options), alone, strict=True
        ):
            assert mine == pytest.approx(other, abs=2e-4)
    file = f"--checkpoint={tmp_path}/run.pt"
    first = train(2, tmp_path / "r", job, *options, "--epochs=2", file)
    rest = train(2, tmp_path / "r", job, *options, file)
    assert first + rest == train(2, tmp_path / "w", job, *options)
    assert train(2, tmp_path / "r", job, *options, file) == []  # nothing is left to do
    assert [path.name for path in tmp_path.glob("run.pt*")] == ["run.pt"]


def test_wrong_uses_end_in_words(tmp_path):
    assert train(2, tmp_path / "odd", "digits", "--batch-size=97", code=1) == []
    assert "does not split into 2" in (tmp_path / "odd" / "out.0").read_text()
    assert train(1, tmp_path / "none", "digits", "--batch-size=0", code=1) == []
    assert "does not split into 1" in (tmp_path / "none" / "out.0").read_text()
    file = tmp_path / "run.pt"
    train(2, tmp_path / "good", "regression", "--epochs=1", f"--checkpoint={file}")
    before = file.read_bytes()
    options = ["--epochs=9", "--lr=1e9", f"--checkpoint={file}"]
    assert train(2, tmp_path / "nan", "regression", *options, code=1) == []
    assert "nothing is saved" in (tmp_path / "nan" / "out.0").read_text()
    assert file.read_bytes() == before


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The last step of an epoch may spoil them: its loss is that of the step before."""

    def spoil():
        def spoiled(model):
            torch.nn.init.constant_(next(model.parameters()), torch.nan)
            return of_module(model)

        of_module, torch.nn.Module.eval = torch.nn.Module.eval, spoiled

    file = tmp_path / "run.pt"
    options = ["--epochs=1", f"--checkpoint={file}"]
    assert train(2, tmp_path / "nan", "text", *options, before=spoil, code=1) == []
    assert not file.exists()


def test_a_link_to_a_checkpoint_stays_a_link(tmp_path):
    """As from a home to a larger disk."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run.pt").symlink_to("scratch/real.pt")
    assert train(2, tmp_path / "r", "text", "--epochs=1", f"--checkpoint={tmp_path}/run.pt")
    assert (tmp_path / "run.pt").is_symlink()
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["real.pt"]


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    fsync, replace, log = os.fsync, os.replace, tmp_path / "calls"

    def synced(number):
        with log.open("a") as file:
            file.write(f"fsync {os.fstat(number).st_size} bytes\n")
        fsync(number)

    def renamed(old, new):
        with log.open("a") as file:
            file.write(f"rename {os.stat(old).st_size} bytes\n")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    train(2, tmp_path / "r", "text", "--epochs=1", f"--checkpoint={tmp_path}/run.pt")
    size = (tmp_path / "run.pt").stat().st_size
    assert log.read_text() == f"fsync {size} bytes\nrename {size} bytes\n"


def test_by_torchrun_from_another_folder(tmp_path):
    done = launch(*TORCHRUN, "--nproc-per-node=2", FILE, "--epochs=1", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("epoch 1 | train loss") == 1
