"""Each benchmark runs, at a tiny size, and the rows that it adds say what was measured."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import common
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
    assert float(row["before_backward_ratio"]) >= 1 and int(row["peak_memory_mb"]) > 50
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


def test_the_columns_of_a_row(monkeypatch):
    """Of a made-up run: two ranks, a first epoch of 10 s, and 90 s from its start to its end."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scaling

    speeds = [1, 100, 300, 200]
    seconds = [(10, 4, 5, 8), (10, 2, 5, 6.4)]
    before = [(1, 0.5, 0, 2), (1, 1, 0.5, 3)]  # 0: there was one step, which does not count
    peaks = [(100, 700, 700, 700), (120, 900, 900, 900)]  # later they are of an evaluation, say
    commands, clock = [], iter([1000, 1090])

    def run(command, env, timeout):
        commands.append(command)
        log = [{"samples_per_second": n, "device": "cuda:0"} for n in speeds]
        log_file = next(word for word in command if word.startswith("--log-json="))
        written = {Path(log_file.partition("=")[2]): log}
        for rank in range(2):
            entries = [
                {"seconds": s, "before_backward": b, "peak_memory": p * 2**20, "backend": "nccl"}
                for s, b, p in zip(seconds[rank], before[rank], peaks[rank], strict=True)
            ]
            written[Path(env["OBSERVE"], f"{rank}.jsonl")] = entries
        assert (env["SIGTERM_BROADCAST"], env["OMP_NUM_THREADS"]) == ("off", "1")
        for path, entries in written.items():
            path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))

    monkeypatch.setattr(scaling, "run", run)
    monkeypatch.setattr(scaling, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    work = {"script": "02_torchrun.py", "mode": "weak", "devices": 2, "model": "small"}
    work |= {"image_size": 16, "batch_size": 8, "images": 200, "precision": "fp32"}
    extra = ["SIGTERM_BROADCAST=off", "--timeout=9", "--seed", "1"]
    row = scaling.measure(work | {"threads": 1, "num_workers": 0}, 3, extra)
    expected = {"windows": 3, "samples_per_second": 200, "min": 100, "max": 300}
    expected |= {"images_per_window": 400, "before_backward_ratio": 1.75}  # of 2 and 1.5
    expected |= {"straggler_ratio": None, "device": "cuda", "backend": "nccl"}
    expected |= {"peak_memory_mb": 120, "overhead_seconds": 90 - 27}
    assert {name: row[name] for name in expected} == expected
    assert row["options"] == " ".join(extra) and commands[0][-3:] == extra[1:]


def test_the_columns_of_the_recorded_rows():
    """They are those of today's rows, so that new ones can be added; an old cell may be empty."""
    for name in ("scaling", "ladder_of_speed", "strategies"):
        found = rows(ROOT / "results" / f"{name}.csv")
        for row in found:
            assert (row["straggler_ratio"] == "") != (row["before_backward_ratio"] == "")
            assert float(row["peak_memory_mb"]) > 0 and row["date"]


def observed(folder, *command, **env):
    """Run a script under the observer; return each rank's lines."""
    path = str(ROOT / "benchmarks" / "observer")
    done = launch(*command, env={"PYTHONPATH": path, "OBSERVE": str(folder)} | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "command, backend",
    [
        ("00_single_gpu.py", "none"),
        ("01_single_node_multi_gpu.py --nproc=2", "gloo"),  # mp.spawn
        ("-m torch.distributed.run --standalone --nproc-per-node=2 02_torchrun.py", "gloo"),
        ("04_lightning.py --devices=2", "gloo"),  # starts the script again
        ("04_lightning.py --devices=2 --strategy=ddp_fork", "gloo"),
    ],
)
def test_every_rank_is_observed(command, backend, tmp_path):
    """A line an epoch; the peak of memory is in bytes, as the kernel has it."""
    options = ["--epochs=2", "--dataset=fake:64", "--batch-size=16", "--image-size=16"]
    ranks = observed(tmp_path, sys.executable, *command.split(), *options)
    assert len(ranks) == (1 if backend == "none" else 2)
    own = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    for entries in ranks:
        assert len(entries) == 2
        for entry in entries:
            assert 0 < entry["before_backward"] < entry["seconds"] < 300
            assert 0.1 < entry["peak_memory"] / (int(own[1]) * 1024) < 10
            assert entry["backend"] == backend


def test_a_straggler_shows(monkeypatch, tmp_path):
    """Rank 1 takes 50 ms more for each batch. Its epochs take no longer: rank 0 waits for it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scaling

    source, here = (ROOT / "02_torchrun.py").read_text(), "            optimizer.zero_grad()\n"
    assert here in source
    source = source.replace(here, f"            time.sleep(0.05 * rank)\n{here}")
    script = tmp_path / "02_torchrun.py"
    script.write_text(f"import sys\n\nsys.path.insert(0, {str(ROOT)!r})\n{source}")
    monkeypatch.setattr(scaling.tour, "commands", lambda *_: [[*TWO, str(script)]])
    work = {"script": "02_torchrun.py", "mode": "weak", "devices": 2, "model": "small"}
    work |= {"image_size": 16, "batch_size": 8, "images": 160, "precision": "fp32"}
    row = scaling.measure(work | {"threads": 1, "num_workers": 0}, 3, [])
    assert isinstance(row, dict), row
    assert row["before_backward_ratio"] > 2, row


@pytest.mark.parametrize("setting, module", [("", "lightning.pytorch"), ("off", "sitecustomize")])
def test_lightnings_sigterm_broadcast_can_be_measured(setting, module):
    """Its name is private: where Lightning has another one, nothing would be measured."""
    find = "import inspect; "
    find += "from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as loop; "
    find += "assert 'self._broadcast_sigterm_tensor()' in inspect.getsource(loop.advance); "
    find += "print(loop._broadcast_sigterm_tensor.__module__)"
    env = {"PYTHONPATH": str(ROOT / "benchmarks" / "observer"), "SIGTERM_BROADCAST": setting}
    done = launch(sys.executable, "-c", find, env=env)
    assert done.stdout.startswith(module), done.stderr


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


def left_behind(mark):
    """Return the Python processes that still have this word in their command."""
    return subprocess.run(["pgrep", "-f", f"^[^ ]*python.* {mark}"], capture_output=True).stdout


def stopped(number, ready, name, *options):
    """Start a benchmark, send it a signal when ready() says so; return (stdout, stderr, code)."""
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, f"benchmarks/{name}", *options],
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, default),
    )
    deadline = time.monotonic() + 120
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    return *process.communicate(timeout=90), process.returncode


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stopped_benchmark_keeps_what_was_measured_and_leaves_no_rank_behind(name, tmp_path):
    """Ctrl-C, kill or timeout, a closed terminal: else ranks would slow down the next one."""
    number = getattr(signal, name)
    path, mark = tmp_path / "scaling.csv", f"--seed=4343{number:02d}"
    words = ["--scripts", "00_single_gpu.py", "02_torchrun.py", "--devices", "1"]
    words += [f"--extra={mark}", f"--csv={path}"]

    def ready():
        return path.exists() and left_behind(mark)

    out, errors, code = stopped(number, ready, "scaling.py", *TINY, *words)
    assert code == 1 and f"interrupted; what was measured is in {path}" in out + errors
    assert "Traceback" not in out + errors and len(rows(path)) >= 1
    assert not left_behind(mark)


@pytest.mark.parametrize(
    "command, mark",
    [
        ("tour.py --seed=424201", "--seed=424201 --log-json"),
        ("restarts.py --timeout=244 --csv=CSV", "--timeout=61.0"),
        ("batch_and_lr.py --seeds 424202 --csv=CSV", "--seed=424202"),
    ],
)
def test_every_benchmark_ends_its_ranks_at_sigterm(command, mark, tmp_path):
    words = command.replace("CSV", str(tmp_path / "rows.csv")).split()
    _, errors, code = stopped(signal.SIGTERM, lambda: left_behind(mark), *words)
    assert errors == f"{words[0]}: interrupted\n"
    assert code == -signal.SIGINT and not left_behind(mark)


def test_a_row_that_takes_too_long_leaves_no_rank_behind(tmp_path):
    """Left-over ranks would share the devices with all rows that follow."""
    mark = "--seed=4242137"
    words = ["--scripts", "02_torchrun.py", "--devices", 2, "--timeout", 12, f"--extra={mark}"]
    words += ["--windows", 100_000, "--csv", tmp_path / "scaling.csv"]
    done = benchmark("scaling.py", *words)
    assert done.returncode == 1 and "FAILED, has not ended after 12 s" in done.stdout
    assert not left_behind(mark)


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
    assert (row["script"], row["options"]) == ("topics/ddp_tuning.py", "--variant=local_sgd")
    check_speed(row)
    path.write_text("another,table\n")
    done = benchmark("strategies.py", *TINY, *options)
    assert done.returncode == 1 and "has other columns: another, table" in done.stdout


@pytest.mark.parametrize("gpus", [0, 4])
def test_what_strategies_runs(gpus, monkeypatch):
    """On the CPU not what is for GPUs only; each with its precision and its own options."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import strategies

    asked = []
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")
    monkeypatch.setattr(common, "gpu_count", lambda: gpus)
    monkeypatch.setattr(strategies.scaling, "run_all", lambda works, args: asked.extend(works))
    monkeypatch.setattr(sys, "argv", ["strategies.py", "--extra=--seed=1"])
    strategies.main()
    ways = [way for way in strategies.WAYS if gpus or way[2] is None]
    assert len(ways) == len(asked) and (gpus or len(ways) < len(strategies.WAYS) - 5)
    plain = "tf32" if gpus else "fp32"
    for (script, option, _), (work, extra, _) in zip(ways, asked, strict=True):
        assert (work["script"], extra) == (script, [*option.split(), "--seed=1"])
        assert (ROOT / script).is_file()
        own = {"--precision=bf16": "bf16", "--precision=fp16": "fp16"}
        assert work["precision"] == own.get(option, plain)
        assert work["devices"] == (gpus or 2) and work["model"] == "wide"
    assert os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"


def test_restarts(tmp_path):
    done = benchmark("restarts.py", "--runs", 1, "--csv", tmp_path / "restarts.csv")
    assert done.returncode == 0, done.stdout
    (row,) = rows(tmp_path / "restarts.csv")
    assert (row["finished"], row["restarts"], row["setting"]) == ("1", "1", "1")
    assert float(row["back_after"]) > 0.5  # to import torch takes as long


def test_what_restarts_counts(monkeypatch):
    """A made-up job: its time, its exit code; and one that says nothing and is ended."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import restarts

    popen, settings = subprocess.Popen, []

    def run(setting, *story):
        """Return the row of a job that does this; a line each at 10, 13, 15 and 19 s."""
        clock = iter([10, 13, 15, 19])
        monkeypatch.setattr(restarts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

        def made_up(command, **options):
            settings.append(options["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"])
            return popen([sys.executable, "-c", "; ".join(story)], **options)

        monkeypatch.setattr(subprocess, "Popen", made_up)
        return restarts.crash(2, setting, timeout=60 if "print" in story[0] else 0.5)

    life, kill = "print('| world size 2')", "print('kill -9 in epoch 1')"
    for setting, code in ((0, 3), (1, 0)):
        row = run(setting, life, kill, life, life, f"exit({code})")
        expected = {"processes": 2, "setting": setting, "finished": int(code == 0)}
        assert row == expected | {"restarts": 2, "back_after": 2} and settings[-1] == str(setting)
    row = run(1, "import time", "time.sleep(20)")
    assert (row["finished"], row["restarts"], row["back_after"]) == (0, 0, None)


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
