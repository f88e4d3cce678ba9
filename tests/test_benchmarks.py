"""Each benchmark runs, at a tiny size, and the rows that it adds say what was measured."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ladder import ROOT, TORCHRUN, launch

TWO = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
MACHINE = ["cpu", "cores", "gpus", "gpu", "torch", "cuda", "nccl", "python", "os", "commit", "date"]
TINY = ["--windows=2", "--images=64", "--batch-size=16", "--image-size=16"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def call(*command):
    """Run to the end; stderr is in .stdout as well."""
    done = launch(*command)
    done.stdout += done.stderr
    return done


def benchmark(name, *options):
    return call(sys.executable, f"benchmarks/{name}", *options)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_speed(row):
    assert 0 < float(row["min"]) <= float(row["samples_per_second"]) <= float(row["max"])
    assert float(row["straggler_ratio"]) >= 1 and int(row["peak_memory_mb"]) > 50
    assert float(row["overhead_seconds"]) > 1  # to import torch takes as long
    assert row["threads"] == "1" and row["torch"] and row["date"] and row["device"] == "cpu"


def test_scaling(tmp_path):
    """Equal work: a rank's in weak scaling, all ranks' in strong scaling. Rerunning adds rows."""
    path = tmp_path / "new" / "scaling.csv"
    scripts = ["00_single_gpu.py", "00b_data_parallel.py", "02_torchrun.py"]
    done = benchmark("scaling.py", *TINY, "--modes", "weak", "--scripts", *scripts, "--csv", path)
    assert done.returncode == 0, done.stdout
    before = path.read_text()
    found = rows(path)
    assert [(row["script"], row["devices"]) for row in found] == [
        ("00_single_gpu.py", "1"),
        ("00b_data_parallel.py", "1"),  # not at 2: without GPUs it would use one
        ("02_torchrun.py", "1"),
        ("02_torchrun.py", "2"),
    ]
    assert list(found[0])[-len(MACHINE) :] == MACHINE
    for row in found:
        check_speed(row)
        assert row["per_rank_batch"] == "16" and row["windows"] == "2"
        assert int(row["images_per_window"]) == 64 * int(row["devices"])
    one = ["--devices", 1, "--scripts", "00_single_gpu.py"]
    done = benchmark("scaling.py", *TINY, *one, "--csv", path)
    assert done.returncode == 0 and path.read_text().startswith(before) and len(rows(path)) == 5


def test_strong_scaling_and_a_failure_is_reported(tmp_path):
    path = tmp_path / "scaling.csv"
    words = ["--modes", "strong", "--devices", 2, "--csv", path]
    without = "--without=compile"
    done = benchmark(
        "scaling.py", *TINY, *words, "--scripts", "topics/fast.py", f"--extra={without}"
    )
    assert done.returncode == 0, done.stdout
    (row,) = rows(path)
    check_speed(row)
    assert row["per_rank_batch"] == "8" and row["images_per_window"] == "64"
    assert row["options"] == without
    done = benchmark("scaling.py", *TINY, *words, "--scripts", "04_lightning.py", "--extra=--x")
    assert done.returncode == 1 and "FAILED, exit code 2" in done.stdout
    assert "unrecognized arguments: --x" in done.stdout and len(rows(path)) == 1
    done = benchmark("scaling.py", "--scripts", "05.py")
    assert done.returncode == 2 and "no such script: 05.py. Use 00_single_gpu.py" in done.stdout


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    path = tmp_path / "scaling.csv"
    process = subprocess.Popen(
        [sys.executable, "benchmarks/scaling.py", *TINY, f"--csv={path}", "--devices", "1"],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and f"interrupted; what was measured is in {path}" in out
    assert "Traceback" not in out and len(rows(path)) >= 1


def test_a_row_that_takes_too_long_leaves_no_rank_behind(tmp_path):
    """Left-over ranks would share the devices with all rows that follow."""
    mark = "--seed=4242137"
    words = ["--scripts", "02_torchrun.py", "--devices", 2, "--timeout", 12, f"--extra={mark}"]
    words += ["--windows", 100_000, "--csv", tmp_path / "scaling.csv"]
    done = benchmark("scaling.py", *words)
    assert done.returncode == 1 and "FAILED, has not ended after 12 s" in done.stdout
    left = subprocess.run(["pgrep", "-f", f"^[^ ]*python.*{mark}"], capture_output=True, text=True)
    assert left.stdout == ""


def test_ladder_of_speed(tmp_path):
    path = tmp_path / "ladder.csv"
    options = ["--devices", 1, "--parts", "bf16", "--csv", path]
    done = benchmark("ladder_of_speed.py", *TINY, *options)
    assert done.returncode == 0, done.stdout
    assert [row["added"] for row in rows(path)] == ["", "bf16"]
    assert [row["precision"] for row in rows(path)] == ["fp32", "bf16"]
    for row in rows(path):
        check_speed(row)


def test_strategies(tmp_path):
    path = tmp_path / "strategies.csv"
    options = ["--devices", 2, "--model", "small", "--only", "local_sgd", "--csv", path]
    done = benchmark("strategies.py", *TINY, *options)
    assert done.returncode == 0, done.stdout
    (row,) = rows(path)
    assert (row["script"], row["options"]) == ("topics/ddp_tuning.py", "--way=local_sgd")
    check_speed(row)
    path.write_text("another,table\n")
    done = benchmark("strategies.py", *TINY, *options)
    assert done.returncode == 1 and "has other columns: another, table" in done.stdout


def test_restarts(tmp_path):
    done = benchmark("restarts.py", "--runs", 1, "--csv", tmp_path / "restarts.csv")
    assert done.returncode == 0, done.stdout
    (row,) = rows(tmp_path / "restarts.csv")
    assert (row["finished"], row["restarts"], row["setting"]) == ("1", "1", "1")
    assert float(row["back_after"]) > 0.5  # to import torch takes as long


def test_allreduce(tmp_path):
    path = tmp_path / "allreduce.csv"
    options = ["--smallest", 1024, "--largest", 65536, "--windows", 3, "--csv", path]
    done = call(*TWO, "benchmarks/allreduce.py", *options)
    assert done.returncode == 0, done.stdout
    found = rows(path)
    assert [int(row["bytes"]) for row in found] == [1024, 4096, 16384, 65536]
    for row in found:  # 2 (n - 1) / n is 1 for two ranks
        speed = int(row["bytes"]) / float(row["seconds"]) / 1e9
        assert float(row["bus_bandwidth_gb_s"]) == pytest.approx(speed, rel=1e-3)
    done = call(sys.executable, "benchmarks/allreduce.py")
    assert done.returncode == 2 and "start it with: torchrun" in done.stdout


def test_overlap(tmp_path):
    path, trace = tmp_path / "overlap.jsonl", tmp_path / "trace.json"
    options = ["--image-size=16", "--batch-size=8", "--bucket-mb=0.05", "--steps=3"]
    options += [f"--out={path}", f"--trace={trace}"]
    done = call(*TWO, "benchmarks/overlap.py", *options)
    assert done.returncode == 0, done.stdout
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    total = row["hidden_ms"] + row["exposed_ms"]
    assert total == pytest.approx(row["communication_ms"], abs=0.01)
    assert len(row["buckets"]) > 1, "a small bucket size makes several"
    # All gradients travel once: 3x16x25+16 + 16x32x25+32 + 512x64+64 + 64x10+10 floats.
    assert sum(bucket["bytes"] for bucket in row["buckets"]) == 4 * (1216 + 12832 + 32832 + 650)
    assert any(event["name"] == "step" for event in json.loads(trace.read_text())["traceEvents"])


def test_overlap_reads_the_kernels_of_a_gpu_trace(monkeypatch):
    """Two ms of a three-ms all-reduce run beside a kernel; a copy by NCCL's name is NCCL's."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import overlap

    events = [{"ph": "X", "name": "step", "ts": 1000, "dur": 9000}]
    nccl = "ncclDevKernel_"
    for name, start, end in [
        (f"{nccl}AllReduce_Sum", 800, 900),  # the barrier before the step
        (f"{nccl}Broadcast_Sum", 1000, 1100),  # the buffers
        ("gemm", 1000, 5000),
        (f"{nccl}AllReduce_Sum", 3000, 6000),
    ]:
        event = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start}
        events.append(event)
    reduces, nccl, other = overlap.kernels({"traceEvents": events})
    assert reduces == [(2.0, 5.0)] and other == [(0.0, 4.0)]
    assert nccl == [(0.0, 0.1), (2.0, 5.0)]
    both = overlap.length(nccl) + overlap.length(other) - overlap.length(nccl + other)
    assert both == pytest.approx(2.1)


def test_batch_and_lr(tmp_path):
    path = tmp_path / "lr.csv"
    options = ["--factors", 4, "--rules", "none", "linear", "--seeds", 0, "--epochs", 1]
    done = benchmark("batch_and_lr.py", *options, "--warmup-epochs", 0, "--csv", path)
    assert done.returncode == 0, done.stdout
    found = [(row["rule"], row["factor"], row["epoch"]) for row in rows(path)]
    assert found == [("none", "4", "1"), ("linear", "4", "1")]
    none, linear = (float(row["train_loss"]) for row in rows(path))
    assert none != linear
