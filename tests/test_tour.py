"""The tour, as `make tour` runs it: on the CPU, and on 1, 2, 4 ... GPUs where there are some."""

import json
import os
import subprocess
import sys

import pytest

from ladder import ROOT, RUNGS


def count_gpus() -> int:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout.count(b"GPU ")
    except OSError:
        return 0


GPUS = count_gpus()


@pytest.mark.cold
@pytest.mark.parametrize("processes", [n for n in (1, 2, 4, 8) if n <= GPUS] if GPUS else [2])
def test_tour(processes, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "benchmarks/tour.py", f"--processes={processes}"]
    command += ["--epochs=2", f"--json={tmp_path / 'tour.json'}"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    rungs = json.loads((tmp_path / "tour.json").read_text())["rungs"]
    assert [entry["rung"] for entry in rungs] == RUNGS
    assert all(entry["same"] and entry["seconds"] > 0 for entry in rungs)
    assert result.stdout.count("| yes") == len(RUNGS)


def test_the_tour_notices():
    """Another seed for all but 00 would be other numbers: a rung that fails or differs ends it."""
    command = [sys.executable, "benchmarks/tour.py", "--batch-size=97", "--epochs=1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 1
    assert result.stdout.count("FAILED") == 2 * 4 if not GPUS else "FAILED" in result.stdout
    assert "does not split into 2: use 96 or 98" in result.stderr
