"""The case study: NequIP's errors are those of one rank, on two ranks by hand and on Slurm."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_slurm import FILES, cluster, parts  # noqa: F401  cluster is a fixture

from ladder import ROOT, without_launcher

HERE = ROOT / "case_studies" / "nequip"
README = (HERE / "README.md").read_text()
(BLOCK,) = re.findall(r"^```bash norun\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
MAKE, ONE, TWO, SLURM = BLOCK.splitlines()
STEPS = 5 * 48 // 8  # epochs, frames, effective batch
sys.path.append(str(HERE))
import record  # noqa: E402

if not shutil.which("nequip-train") and not os.environ.get("CI"):
    pytest.skip("needs nequip and ase", allow_module_level=True)


def run(command, *more):
    """Run a line of the README in the root; return what it prints."""
    env = without_launcher(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        " ".join(map(str, (command, *more))),
        shell=True,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nequip")
    assert "train.xyz: 48 frames" in run(MAKE, folder)
    return folder


@pytest.fixture(scope="module")
def one(data):
    """The run of one rank."""
    run(ONE, f"data_dir={data}", f"hydra.run.dir={data}/one")
    return record.read(data / "one")


def assert_same(done, one):
    """As many optimizer steps, and errors within the README's tolerance."""
    assert done["steps"] == one["steps"] == STEPS
    assert len(done["epochs"]) == len(one["epochs"]) == 5
    assert "within 1e-4" in README
    for ours, theirs in zip(done["epochs"], one["epochs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_data_are_always_the_same(data, tmp_path):
    run(MAKE, tmp_path)
    for name in ("train.xyz", "val.xyz"):
        assert (tmp_path / name).read_text() == (data / name).read_text()


def test_one_rank_learns(one):
    first, *_, last = one["epochs"]
    assert last["total_energy_mae"] < first["total_energy_mae"] / 2


def test_two_ranks(data, one):
    text = run(TWO, f"data_dir={data}", f"hydra.run.dir={data}/two")
    assert "2 processes" in text
    assert_same(record.read(data / "two"), one)


def test_two_nodes_of_slurm(cluster, data, one):  # noqa: F811
    options = re.findall(r"--\S+", SLURM)
    path = ROOT / SLURM.split()[-1]
    more = f"data_dir={data}", f"hydra.run.dir={data}/slurm"
    state, code, log = cluster.run(path, [*options, "--cpus-per-task=1"], more)
    assert (state, code) == ("COMPLETED", "0:0"), log
    assert "MEMBER: 2/2" in log
    assert_same(record.read(data / "slurm"), one)


def test_the_batch_file_is_that_of_rung_04():
    path = HERE / "nequip.sbatch"
    (model,) = (file for file in FILES if file.stem == "04_lightning")
    assert parts(path)[1] == parts(model)[1]
    asked = re.findall(r"^#SBATCH (?!--job-name).*", model.read_text(), re.MULTILINE)
    assert re.findall(r"^#SBATCH (?!--job-name).*", path.read_text(), re.MULTILINE) == asked
    assert '++trainer.num_nodes="${SLURM_NNODES}"' in parts(path)[2]


def test_what_cannot_work_is_refused(data):
    command = f"{TWO} trainer.devices=3 data_dir={data} hydra.run.dir={data}/three"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "8 is not divisible by 3" in done.stderr
    assert not Path(data / "three" / "metrics.csv").exists()


def test_why_the_world_size_is_not_that_of_slurm(monkeypatch):
    """By hand there is no SLURM_NTASKS, and within salloc it is that of the allocation."""
    import nequip.utils.resolvers  # noqa: F401  int_div and int_mul
    from omegaconf import OmegaConf, errors

    config = OmegaConf.load(HERE / "config.yaml")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert config.per_rank_batch_size == 8  # one rank, whatever the allocation
    config.world_size = "${oc.env:SLURM_NTASKS}"
    assert config.per_rank_batch_size == 4
    monkeypatch.delenv("SLURM_NTASKS")
    with pytest.raises(errors.InterpolationResolutionError, match="'SLURM_NTASKS' not found"):
        print(config.per_rank_batch_size)
