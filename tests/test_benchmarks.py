"""Each benchmark runs, at a tiny size, and the rows that it adds say what was measured."""

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tables
import torch
import torch.distributed as dist
import torch.nn.functional as F

import common
import pairs
from benchmarks import machine, tour
from ladder import ROOT, RUNGS, TORCHRUN, launch, of_the_day

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
    one = ["--devices", 1, "--scripts", "00_single_gpu.py"]
    done = benchmark("scaling.py", *TINY, "--modes", "weak", *one, "--csv", path)
    assert done.returncode == 0, done.stdout
    before = path.read_text()
    scripts = ["00b_data_parallel.py", "02_torchrun.py"]
    done = benchmark("scaling.py", *TINY, "--modes", "weak", "--scripts", *scripts, "--csv", path)
    assert done.returncode == 0, done.stdout
    assert path.read_text().startswith(before)
    found = rows(path)
    assert [(row["script"], row["devices"]) for row in found] == [
        ("00_single_gpu.py", "1"),
        ("00b_data_parallel.py", "1"),  # not at 2: without GPUs it would use one
        ("02_torchrun.py", "1"),
        ("02_torchrun.py", "2"),
    ]
    assert list(found[0])[-len(MACHINE) - 1 :] == [*MACHINE, "seal"]
    for row in found:
        check_speed(row)
        assert row["seal"] == machine.seal(row)
        assert row["per_rank_batch"] == "16" and row["windows"] == "2"
        assert int(row["images_per_window"]) == 64 * int(row["devices"])


def test_the_columns_of_a_row(monkeypatch):
    """Of a made-up run: two ranks on two of three GPUs, a first epoch of 10 s, and 90 s in all."""
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
        assert (env["NVIDIA_TF32_OVERRIDE"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "6,4")
        for path, entries in written.items():
            path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))

    monkeypatch.setattr(common, "gpu_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4,2")
    # To look for these would start CUDA, and then later tests could not fork ranks.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
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
    of_the_day(
        [
            ("00_single_gpu.py", "none"),
            ("01_single_node_multi_gpu.py --nproc=2", "gloo"),  # mp.spawn
            ("-m torch.distributed.run --standalone --nproc-per-node=2 02_torchrun.py", "gloo"),
            ("04_lightning.py --devices=2", "gloo"),  # starts the script again
            ("04_lightning.py --devices=2 --strategy=ddp_fork", "gloo"),
        ],
        3,
    ),
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


def test_every_topic_has_its_command_and_its_last_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import every_topic

    for topic in every_topic.TOPICS:
        for gpus in (False, True):
            words = every_topic.command(topic, 2, gpus)
            assert f"topics.{topic}" in words or f"topics/{topic}.py" in words
            assert not {"torchrun", "python", "&", "the"} & set(words), words
            assert any(word.endswith("=2") for word in words) or words[-1] == "2"
    words = every_topic.command("mixed_precision", 4, True)
    assert "--nproc-per-node=4" in words and words[-1] == "224" and "resnet50" in words
    path = tmp_path / "topics.jsonl"
    for extra, code in (("--epochs=1", 0), ("--batch-size=97", 1)):
        done = benchmark(
            "every_topic.py", "--only", "ddp_by_hand", f"--extra={extra}", "--out", path
        )
        assert done.returncode == code, done.stdout
    good, bad = machine.rows(path)
    assert good["exit_code"] == 0 and good["seal"] == machine.seal(good)
    assert good["last_line"].startswith("measured 0.0e+00 between the ranks' weights after 41 ")
    assert bad["exit_code"] and not bad["last_line"]


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


@pytest.mark.parametrize("name", of_the_day(["SIGINT", "SIGTERM", "SIGHUP"], 1))
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


def test_what_the_ladder_of_speed_runs(monkeypatch):
    """Each part is added to those before it, in the order that was asked for."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import ladder_of_speed

    asked, parts = [], "tf32,bf16,channels_last,autotune,fused,prefetch,bucket_view,static_graph"
    monkeypatch.setattr(ladder_of_speed.scaling, "run_all", lambda works, _: asked.extend(works))
    words = ["--devices=2", "--parts", "fused", "bf16", "compile", "--extra=--seed=1"]
    monkeypatch.setattr(sys, "argv", ["ladder_of_speed.py", *words])
    ladder_of_speed.main()
    off = [f"{parts},compile", f"{parts},compile".replace(",fused", "")]
    off += [off[1].replace(",bf16", ""), off[1].replace(",bf16", "").replace(",compile", "")]
    assert [extra for _, extra, _ in asked] == [[f"--without={x}", "--seed=1"] for x in off]
    assert [own["added"] for *_, own in asked] == ["", "fused", "bf16", "compile"]
    assert [work["precision"] for work, *_ in asked] == ["fp32", "fp32", "bf16", "bf16"]


def test_strategies(tmp_path):
    path = tmp_path / "strategies.csv"
    options = ["--devices", 2, "--model", "small", "--only", "local_sgd", "--csv", path]
    done = benchmark("strategies.py", *TINY, *options)
    assert done.returncode == 0, done.stdout
    (row,) = rows(path)
    assert (row["script"], row["options"]) == ("topics/ddp_tuning.py", "--variant=local_sgd")
    check_speed(row)


def test_a_table_of_other_columns_is_not_added_to(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scaling

    path = tmp_path / "table.csv"
    path.write_text("another,table\n")
    with pytest.raises(SystemExit, match="has other columns: another, table"):
        scaling.append(path, {"script": "02_torchrun.py"})
    assert path.read_text() == "another,table\n"


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


def test_teardown(tmp_path):
    done = benchmark("teardown.py", "--runs", 2, "--csv", tmp_path / "teardown.csv")
    assert done.returncode == 0, done.stdout
    before, after = rows(tmp_path / "teardown.csv")
    assert (before["imported"], before["ranks"], before["aborted"]) == ("before", "4", "0")
    assert (after["imported"], after["ranks"]) == ("after", "2")
    assert before["failed_otherwise"] == after["failed_otherwise"] == "0"


@pytest.mark.cold  # what it times is the start of Python
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


def test_the_slowest_rank_counts(monkeypatch):
    """Rank 0 of four, with made-up times: another rank takes ten times as long. 5 s for 1 GB."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import allreduce

    slow, recorded, summed = torch.tensor([50.0, 40.0, 10.0, 70.0, 60.0]), [], []

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        summed.append(tensor)
        if op == dist.ReduceOp.MAX:
            torch.maximum(tensor, slow, out=tensor)

    no_group = ("init_process_group", "barrier", "destroy_process_group")
    for name in no_group:
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    own = iter([1000, 5, 4, 3, 2, 1])  # the first one warms up
    seconds_of = allreduce.seconds_of
    monkeypatch.setattr(allreduce, "seconds_of", lambda *_: next(own))
    monkeypatch.setattr(allreduce.scaling, "append", lambda _, row: recorded.append(row))
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    size = ["--smallest=100000000", "--largest=100000000"]
    monkeypatch.setattr(sys, "argv", ["allreduce.py", *size])
    allreduce.main()
    (row,) = recorded
    assert (row["min"], row["seconds"], row["max"], row["repeats"]) == (10, 50, 70, 2)
    assert row["bus_bandwidth_gb_s"] == pytest.approx(0.1 * 2 * 3 / 4 / 50)

    # One all-reduce of a row of them: its share, and one wait for all.
    summed.clear()
    monkeypatch.setattr(common, "seconds_since", lambda start, device: 12.0)
    assert seconds_of(torch.zeros(1), 6, torch.device("cpu")) == 2 and len(summed) == 6


def test_data_loading(monkeypatch, tmp_path):
    """The real thing, tiny: rung 00 and the step on a batch that never moves."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import data_loading

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny = ["--images=32", "--batch-size=16", "--image-size=16", "--windows=2"]
    monkeypatch.setattr(sys, "argv", ["data_loading.py", *tiny, f"--out={tmp_path}/new.jsonl"])
    data_loading.main()
    (row,) = machine.rows(tmp_path / "new.jsonl")
    assert len(row["rung"]) == len(row["resident"]) == 2 and row["script"] == "00_single_gpu.py"
    assert min(row["rung"] + row["resident"]) > 0 and row["seal"] == machine.seal(row)


def test_what_data_loading_counts(monkeypatch, tmp_path):
    """Made-up speeds: the median of the rung over the median of what is resident. They differ
    so much that the table has a range. A step that the resident one is not like is refused."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import data_loading

    # Windows of 100 s, which warm up, of 4 s and of 16 s, each of two steps of 16 images.
    seconds = iter([100, 4, 16])
    args = SimpleNamespace(script="00_single_gpu.py", model="small", image_size=16, batch_size=16)
    args = SimpleNamespace(**vars(args), images=32, windows=2, channels=3, extra=["--seed=7"])
    args.dataset, args.num_workers = "fake:32", 0

    def run(command, cwd, check):
        """A script that was given its options: the first epoch warms up."""
        assert "--seed=7" in command and command[command.index("--epochs") + 1] == "3"
        log = "".join(f'{{"samples_per_second": {n}}}\n' for n in (1, 10, 20))
        Path(command[command.index("--log-json") + 1]).write_text(log)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", run)
        assert data_loading.rung_speed(args) == [10, 20]
        patch.setattr(common, "seconds_since", lambda *_: next(seconds))
        assert data_loading.resident_speed(args) == [8, 2]
    monkeypatch.setattr(data_loading, "rung_speed", lambda args: [10, 90, 20])
    monkeypatch.setattr(data_loading, "resident_speed", lambda args: [200, 50, 80])
    monkeypatch.setattr(sys, "argv", ["data_loading.py", f"--out={tmp_path}/data_loading.jsonl"])
    data_loading.main()
    assert machine.rows(tmp_path / "data_loading.jsonl")[0]["ratio"] == 0.25  # 20 / 80
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| 0.1 to 1.8 |" in tables.loading()  # 10 / 200 to 90 / 50
    sys.argv += ["--script=topics/fast.py", "--extra=--without=compile,fused"]
    with pytest.raises(SystemExit):
        data_loading.main()


def test_the_bare_step_of_fast(monkeypatch):
    """Floats, as the model makes them of bytes: the same loss. Compiled if the script is."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import data_loading

    args = SimpleNamespace(model="small", image_size=16, batch_size=4, channels=3, images=8)
    args = SimpleNamespace(**vars(args), script="topics/fast.py", windows=1)
    cpu, losses, real = torch.device("cpu"), [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *_: losses.append(real(*_)) or losses[-1])
    kept = []

    def after_backward(model):
        """Make other gradients of those that are there."""
        for weight in model.parameters():
            kept.append((weight, weight.detach().clone()))
            weight.grad.fill_(1e6)

    more = {"compiled": False, "after_backward": after_backward}
    for floats in (True, False):
        torch.manual_seed(0)
        step = data_loading.make_step(args, cpu, fast=True, floats=floats, **more)
        step(*data_loading.resident_batch(args, cpu, floats))
    assert len(kept) == 2 * 8  # the weights of two models: 1e6 times the rate is 1
    assert all(torch.allclose(before - weight, torch.ones(())) for weight, before in kept)
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    asked = []
    monkeypatch.setattr(
        data_loading, "make_step", lambda *some, floats: asked.append((*some[2:], floats))
    )
    monkeypatch.setattr(data_loading, "speed", lambda *_: 1)
    for extra in ([], ["--without=ddp"], ["--without=compile,ddp"]):
        data_loading.resident_speed(SimpleNamespace(**vars(args), extra=extra))
    assert asked == [(True, True, True), (True, True, True), (True, False, True)]


def test_the_bare_step_on_a_gpu_is_bf16(monkeypatch):
    """That of fast.py: as on a pretended GPU, to which nothing is moved."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import data_loading

    def autocast(*some, enabled):
        asked.append((*some, enabled))
        return nullcontext()

    asked, args = [], SimpleNamespace(model="small", image_size=16, batch_size=4, channels=3)
    batch = data_loading.resident_batch(args, torch.device("cpu"), floats=True)
    monkeypatch.setattr(torch, "autocast", autocast)
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "to", lambda self, *_, **__: self)
    for device, fast in (("cuda", True), ("cuda", False), ("cpu", True)):
        data_loading.make_step(args, torch.device(device), fast, False, floats=True)(*batch)
    bf16 = torch.bfloat16
    assert asked == [("cuda", bf16, True), ("cuda", bf16, False), ("cpu", bf16, False)]


def test_what_feeds_measures(monkeypatch, tmp_path):
    """Made-up speeds of the bare step and of each way; a way with other batches is noticed."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import data_loading

    names = [tuple(way.values()) for way in data_loading.ways([0, 2], True)]
    assert len(set(names)) == len(names) == 12 and ("batches", 2, "no", "memory") in names
    one = [{"feed": "samples", "num_workers": 0, "pinned": "yes", "store": "memory"}]
    one += [{"feed": "prefetched", "num_workers": 0, "pinned": "yes", "store": "file"}]
    one += [{"feed": "samples", "num_workers": 0, "pinned": "yes", "store": "JPEG files"}]
    monkeypatch.setattr(data_loading, "ways", lambda workers, on_gpu: one)
    tiny = ["--feeds", "--images=40", "--batch-size=16", "--image-size=8", "--windows=2"]
    monkeypatch.setattr(sys, "argv", ["data_loading.py", *tiny, f"--csv={tmp_path}/new.csv"])
    real, speeds = data_loading.speed, iter([0, 0, 7, 0, 8, 0, 9, 100, 50, 25, 10, 300, 60, 5, 30])

    def speed(step, batches, device):
        real(step, batches, device)
        return next(speeds, 1)

    def make_step(*some, floats):
        made.append(floats)
        return make(*some, floats=floats)

    made, make = [], data_loading.make_step
    monkeypatch.setattr(data_loading, "make_step", make_step)
    monkeypatch.setattr(data_loading, "speed", speed)
    data_loading.main()
    assert made == [True, False]  # the bare step gets floats, all others bytes
    found = rows(tmp_path / "new.csv")
    cells = [(row["feed"], row["store"], row["alone"], row["of_bare"]) for row in found]
    assert cells == [
        ("bare", "", "", "1.0"),
        ("samples", "memory", "7", "0.275"),  # 55 / 200
        ("prefetched", "file", "8", "0.075"),
        ("samples", "JPEG files", "9", "0.1"),
    ]
    assert all(row["seal"] == machine.seal(row) for row in found)
    indices = data_loading.feeding.Resident.indices
    monkeypatch.setattr(data_loading.feeding.Resident, "indices", lambda self: 39 - indices(self))
    with pytest.raises(AssertionError, match="not all of them give the same batches"):
        data_loading.main()


def test_compiled_ddp(tmp_path):
    """Two ways that need no compiler, one of them by a rank of this test."""
    path = tmp_path / "compiled_ddp.csv"
    tiny = ["--model=small", "--image-size=16", "--batch-size=8", "--steps=2", "--windows=2"]
    done = benchmark("compiled_ddp.py", *tiny, "--devices=2", "--ways=plain", f"--csv={path}")
    assert done.returncode == 0, done.stdout
    (row,) = rows(path)
    assert (row["way"], row["devices"], row["backend"]) == ("plain", "2", "gloo")
    assert 0 < float(row["min"]) <= float(row["samples_per_second"]) <= float(row["max"])
    assert row["seal"] == machine.seal(row)


CALLED = dict.fromkeys(("alone", "once", "registered"), "compile model")
CALLED |= {"inside": "DDP compile model", "outside": "compile DDP model"}
CALLED |= {"inside_whole": CALLED["inside"], "outside_whole": CALLED["outside"]}
CALLED |= {"inside_view": "DDP (views) compile model", "plain": "DDP model"}


@pytest.mark.parametrize("way", CALLED)
def test_what_compiled_ddp_counts(way, monkeypatch, tmp_path):
    """As rank 0 of two, with made-up times: what a way calls, and the speed of the slowest rank."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compiled_ddp

    made, steps, slow = {}, [], torch.tensor([8.0, 3.0, 1.0])
    seconds = iter([1000.0, 1.0, 2.0, 4.0])  # the first window warms up

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        if op == dist.ReduceOp.MAX:
            torch.maximum(tensor, slow, out=tensor)

    def make_step(args, device, wrap, **more):
        made.update(more, module=wrap("model"), optimize_ddp=torch._dynamo.config.optimize_ddp)
        return lambda *batch: steps.append(batch)

    def ddp(model, gradient_as_bucket_view=False):
        return f"DDP {'(views) ' * gradient_as_bucket_view}{model}"

    monkeypatch.setattr(compiled_ddp, "DDP", ddp)
    monkeypatch.setattr(torch, "compile", lambda model: f"compile {model}")
    monkeypatch.setattr(compiled_ddp, "registered", lambda device: "registered")
    monkeypatch.setattr(compiled_ddp.data_loading, "make_step", make_step)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(common, "seconds_since", lambda start, _: start and next(seconds))
    monkeypatch.setenv("LOCAL_RANK", "0")
    args = SimpleNamespace(ways=[way], model="small", image_size=8, batch_size=6, channels=3)
    args.steps, args.windows, args.json = 4, 3, tmp_path / "row"
    with torch._dynamo.config.patch(optimize_ddp=None):
        compiled_ddp.rank_main(args)
    assert list(CALLED) == compiled_ddp.WAYS and made["module"] == CALLED[way]
    assert made["optimize_ddp"] == ("_" not in way)  # whole graphs have an ending
    averages = {"once": compiled_ddp.average, "registered": "registered"}
    assert made.get("after_backward") == averages.get(way)
    assert made["floats"] and made["fast"] and not made["compiled"] and len(steps) == 5 + 3 * 4
    row = json.loads(args.json.read_text())  # 48 images in 8, 3 and 4 s
    assert (row["min"], row["samples_per_second"], row["max"]) == (6, 12, 16)


def test_overlap(tmp_path):
    path, trace = tmp_path / "overlap.jsonl", tmp_path / "trace.json"
    options = ["--image-size=16", "--batch-size=8", "--bucket-mb=0.05", "--steps=3"]
    options += [f"--out={path}", f"--trace={trace}"]
    done = call(*TWO, "benchmarks/overlap.py", *options)
    assert done.returncode == 0, done.stdout
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    # The device computes until the last bucket is ready, and in the optimizer's step.
    ready, last = row["buckets"][-1]["start_ms"], row["backward_end_ms"]
    times = np.arange(0, row["step_ms"], 0.001)
    spans = [(bucket["start_ms"], bucket["end_ms"]) for bucket in row["buckets"]]
    travels = np.any([(start <= times) & (times < end) for start, end in spans], axis=0)
    computes = (times < ready) | (last <= times)
    for name, moments in {"hidden": travels & computes, "exposed": travels & ~computes}.items():
        assert row[f"{name}_ms"] == pytest.approx(moments.sum() / 1000, abs=0.05), name
    exposed = sum(end - start for start, end in row["exposed"])
    assert row["exposed_ms"] == pytest.approx(exposed, abs=0.05)
    assert row["seal"] == machine.seal(row)
    assert len(row["buckets"]) > 1, "a small bucket size makes several"
    # All gradients travel once: 3x16x25+16 + 16x32x25+32 + 512x64+64 + 64x10+10 floats.
    assert sum(bucket["bytes"] for bucket in row["buckets"]) == 4 * (1216 + 12832 + 32832 + 650)
    assert any(event["name"] == "step" for event in json.loads(trace.read_text())["traceEvents"])


def test_what_overlap_gives_to_ddp(monkeypatch):
    """The size of the buckets, or none; a hook that returns the mean, here of two equal ranks."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import overlap

    class Ready(Exception):
        """DDP is made; the hook comes with it."""

    def ddp(model, bucket_cap_mb):
        def register_comm_hook(state, hook):
            raise Ready(bucket_cap_mb, hook)

        return SimpleNamespace(parameters=model.parameters, register_comm_hook=register_comm_hook)

    def all_reduce(tensor, async_op):
        future = torch.futures.Future()
        future.set_result([tensor.mul_(2)])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(overlap, "DDP", ddp)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    for words, size in (([], None), (["--bucket-mb=3"], 3)):
        monkeypatch.setattr(sys, "argv", ["overlap.py", "--image-size=8", *words])
        with pytest.raises(Ready) as ready:
            overlap.main()
        found, hook = ready.value.args
        gradients = torch.tensor([2.0, 6.0])
        mean = hook(None, SimpleNamespace(buffer=lambda gradients=gradients: gradients)).wait()
        assert found == size and mean.tolist() == [2, 6]


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
    assert overlap.shares(nccl, other)["hidden_ms"] == pytest.approx(2.1)
    # Buckets at 1 to 3 and 2 to 4 ms, and at 8 to 10; the device computes until 2.5 and from 9 on.
    found = overlap.shares([(2, 4), (8, 10), (1, 3)], [(0, 2.5), (9, 12)])
    times = {"communication_ms": 5, "compute_ms": 5.5, "hidden_ms": 2.5, "exposed_ms": 2.5}
    assert found == times
    assert overlap.exposed([(2, 4), (8, 10), (1, 3)], [(0, 2.5), (9, 12)]) == [(2.5, 4), (8, 9)]
    assert overlap.exposed([(1, 9)], [(0, 2), (4, 5), (9, 10)]) == [(2, 4), (5, 9)]


def test_batch_and_lr(tmp_path):
    path = tmp_path / "lr.csv"
    options = ["--factors", 4, "--rules", "none", "linear", "--seeds", 0, "--epochs", 1]
    done = benchmark("batch_and_lr.py", *options, "--warmup-epochs", 0, "--csv", path)
    assert done.returncode == 0, done.stdout
    found = [(row["rule"], row["factor"], row["epoch"]) for row in rows(path)]
    assert found == [("none", "4", "1"), ("linear", "4", "1")]
    none, linear = (float(row["train_loss"]) for row in rows(path))
    assert none != linear


# ---- the verdict of the tour ---------------------------------------------------------------------

EPOCH = {"train_loss": 0.5, "test_accuracy": 0.9, "test_samples": 1000}


def test_what_the_tour_calls_the_same_numbers(monkeypatch):
    monkeypatch.setattr(common, "gpu_count", lambda: 0)
    assert tour.same([EPOCH, EPOCH], [EPOCH, EPOCH | {"train_loss": 0.50004}])
    others = {"train_loss": (0.501, 0.5001, 0.499), "test_accuracy": (0.901, 0.899)}
    for name, values in (others | {"test_samples": (999,)}).items():
        for value in values:
            other = EPOCH | {name: value}
            assert not tour.same([EPOCH, other], [EPOCH, EPOCH]), other
            assert not tour.same([other, EPOCH], [EPOCH, EPOCH]), other
    assert not tour.same([EPOCH], [EPOCH, EPOCH]) and not tour.same([EPOCH, EPOCH], [EPOCH])
    monkeypatch.setattr(common, "gpu_count", lambda: 2)  # there a sample more or less may be right
    assert tour.same([EPOCH | {"test_accuracy": 0.899}], [EPOCH])
    assert not tour.same([EPOCH | {"test_accuracy": 0.898}], [EPOCH])


OFF = {
    "yes": {},
    "NO": {"train_loss": 0.501},
    "NO, accuracy": {"test_accuracy": 0.901},
    "FAILED": 0,
}


@pytest.mark.parametrize("verdict", OFF)
def test_the_tour_ends_with_1_where_a_rung_differs_or_fails(verdict, monkeypatch, capsys, tmp_path):
    """Of made-up runs one has other numbers in its last epoch, or none."""
    epoch, off = EPOCH | {"world_size": 2, "samples_per_second": 7}, OFF[verdict]

    def run(rung, processes, options):
        last = [epoch | (off or {})] if rung == RUNGS[3] else [epoch]
        return ([] if off == 0 and rung == RUNGS[3] else [epoch, *last]), 1.0

    monkeypatch.setattr(common, "gpu_count", lambda: 0)
    monkeypatch.setattr(tour, "run", run)
    monkeypatch.setattr(tour, "end_like_ctrl_c", lambda: None)
    monkeypatch.setattr(sys, "argv", ["tour.py", f"--json={tmp_path}/tour.json"])
    assert tour.main() == (verdict != "yes")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    said = {words[0]: words[-1] for words in lines if words and words[0] in RUNGS}
    assert said == dict.fromkeys(RUNGS, "yes") | {RUNGS[3]: verdict.partition(",")[0]}
    (record,) = machine.rows(tmp_path / "tour.json")
    assert [rung["same"] for rung in record["rungs"]].count(False) == (verdict != "yes")
    assert record["seal"] == machine.seal(record)


def test_the_recorded_tours_have_the_same_numbers(monkeypatch):
    """Of the numbers themselves, not of the flag beside them."""
    (cpu,), (gpu,) = (
        machine.rows(tables.RESULTS / f"{n}.json") for n in ("tour_cpu", "gpu_parity")
    )
    for tours, gpus in (([cpu], 0), (gpu["tours"], 2)):
        monkeypatch.setattr(common, "gpu_count", lambda gpus=gpus: gpus)
        for record in tours:
            reference = record["rungs"][0]["epochs"]
            assert [rung["rung"] for rung in record["rungs"]] == RUNGS
            assert len(reference) == 5 and reference[-1]["train_loss"] < 0.1
            for rung in record["rungs"]:
                assert tour.same(rung["epochs"], reference) and rung["same"], rung["rung"]


# ---- results -------------------------------------------------------------------------------------

RECORDS = sorted(path for path in tables.RESULTS.iterdir() if path.suffix.startswith((".c", ".j")))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_row_is_as_the_benchmark_wrote_it(path):
    """A number that is changed by hand breaks the row's seal."""
    found = machine.rows(path)
    assert found
    for number, row in enumerate(found, 1):
        wrong = f"{path.name}, row {number} is not what was measured: {str(row)[:200]}"
        assert row.get("seal") == machine.seal(row), wrong


# The rows of 30 November 2026: how many, and a digest of their seals.
KEPT = {
    "allreduce.csv": (29, "8242e594704e"),
    "batch_and_lr.csv": (210, "66524a1c33e5"),
    "bugs.csv": (313, "e0e0effaa6c8"),
    "compiled_ddp.csv": (20, "c2b28e1d79bb"),
    "dask.csv": (9, "a3460683cb72"),
    "data_loading.jsonl": (17, "883ff9d80b28"),
    "feeding.csv": (84, "1294ae86e099"),
    "ladder_of_speed.csv": (35, "c56d0e5d7330"),
    "overlap.jsonl": (9, "1468a8762cfd"),
    "restarts.csv": (32, "9f07a857665c"),
    "scaling.csv": (138, "8535c428530f"),
    "strategies.csv": (78, "7cdb773e881f"),
    "teardown.csv": (2, "419adc865a5b"),
    "topics.jsonl": (46, "c031d3454131"),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_added_and_none_is_taken_away_or_replaced(name):
    count, digest = KEPT[name]
    seals = "".join(row["seal"] for row in machine.rows(tables.RESULTS / name)[:count])
    assert hashlib.sha256(seals.encode()).hexdigest()[:12] == digest


def test_a_seal_is_of_all_cells_in_their_order():
    row = {"script": "a", "options": None, "min": 1.5, "max": 2}
    seal = machine.seal(row)
    assert re.fullmatch("[0-9a-f]{12}", seal) and machine.sealed(row) == row | {"seal": seal}
    read = {name: "" if value is None else str(value) for name, value in row.items()}
    assert machine.seal(read | {"seal": seal}) == seal  # as read from a .csv
    others = [row | {"min": 1.6}, row | {"options": "x"}, row | {"script": ""}, row | {"more": ""}]
    others += [dict(reversed(row.items())), row | {"min": 2, "max": 1.5}]
    assert seal not in map(machine.seal, others)


def test_a_machine_has_the_cores_of_this_process_and_its_commit_may_be_dirty(monkeypatch):
    """Of 96 cores two may be used; results and texts that were changed are not the code's."""
    changed = {}

    def git(*words):
        return changed.get(words[-len(machine.CODE) :], "") if words[0] == "status" else "c0ffee"

    monkeypatch.setattr(machine, "git", git)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 7}, raising=False)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    found = machine.describe()
    assert (found["cores"], found["commit"]) == (2, "c0ffee")
    changed[machine.CODE] = " M common.py"
    assert machine.describe()["commit"] == "c0ffee-dirty"
    monkeypatch.setenv("GIT_COMMIT", "of a copy")
    assert machine.describe()["commit"] == "of a copy"


@pytest.mark.parametrize("name", ["scaling.csv", "overlap.jsonl", "tour_cpu.json"])
def test_what_has_no_seal_gets_one_and_what_was_changed_keeps_its_own(name, tmp_path):
    path = tmp_path / name
    text = (tables.RESULTS / name).read_text()
    path.write_text(text)
    machine.seal_the_rest(path)
    assert path.read_text() == text
    old = machine.rows(path)[0]["seal"]
    path.write_text(text.replace("AMD", "BMW").replace("NVIDIA", "BMW"))
    machine.seal_the_rest(path)
    assert machine.rows(path)[0]["seal"] == old != machine.seal(machine.rows(path)[0])
    path.write_text(re.sub(f'"?{old}"?', '""', text))
    machine.seal_the_rest(path)
    assert path.read_text() == text


def test_what_was_measured_fits_together():
    """A median lies between its minimum and its maximum, a bandwidth follows from its seconds."""
    for name in ("scaling", "ladder_of_speed", "strategies"):
        for row in rows(tables.RESULTS / f"{name}.csv"):
            low, middle, high = (float(row[n]) for n in ("min", "samples_per_second", "max"))
            assert 0 < low <= middle <= high, row
            ranks = 1 if row["mode"] == "strong" else int(row["devices"])
            assert int(row["images_per_window"]) % ranks == 0, row
            whole = int(row["per_rank_batch"]) * int(row["devices"])
            assert int(row["effective_batch"]) == whole, row
    for row in rows(tables.RESULTS / "allreduce.csv"):
        n, size, seconds = (float(row[name]) for name in ("devices", "bytes", "seconds"))
        speed = 2 * (n - 1) / n * size / seconds / 1e9
        assert float(row["bus_bandwidth_gb_s"]) == pytest.approx(speed, rel=2e-3), row
        assert float(row["min"]) <= seconds <= float(row["max"]), row
    for row in machine.rows(tables.RESULTS / "overlap.jsonl"):
        together = row["hidden_ms"] + row["exposed_ms"]
        assert together == pytest.approx(row["communication_ms"], abs=0.01), row
        assert 0 <= row["hidden_ms"] <= row["compute_ms"] < row["step_ms"], row
        travel = max(b["end_ms"] for b in row["buckets"]) - row["buckets"][0]["start_ms"]
        assert row["communication_ms"] <= travel + 0.5 or row["device"] == "cuda", row
    for row in machine.rows(tables.RESULTS / "data_loading.jsonl"):
        ratio = np.median(row["rung"]) / np.median(row["resident"])
        assert row["ratio"] == pytest.approx(ratio, abs=6e-5), row


# ---- the tables of the documents -----------------------------------------------------------------

WORK = {"mode": "weak", "model": "small", "image_size": 28, "per_rank_batch": 8, "threads": 1}
WORK |= {"precision": "fp32", "num_workers": 0, "options": "", "commit": "a", "date": "2026-01-02"}
WORK |= {"cpu": "Z80", "cores": 4, "gpus": 0, "gpu": "", "nccl": "", "python": "3.1", "torch": "9"}


def made_up(monkeypatch, folder, name, *own):
    """Let tables.py find made-up rows in a file of this name."""
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(WORK | own[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            machine_row | row for machine_row, row in zip([WORK] * 99, own, strict=False)
        )
    monkeypatch.setattr(tables, "RESULTS", folder)


def cells(text):
    """Return the cells of a table's lines, without its heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_speeds(monkeypatch, tmp_path):
    """In brackets the speedup over one process without DDP, at the same work and precision."""
    measured = [
        ("00_single_gpu.py", 1, 99, {}),
        ("00_single_gpu.py", 1, 101, {}),  # their median is 100
        ("00_single_gpu.py", 1, 999, {"threads": 2}),
        ("00_single_gpu.py", 1, 400, {"precision": "bf16"}),
        ("02_torchrun.py", 1, 50, {}),
        ("02_torchrun.py", 2, 180, {}),
        ("02_torchrun.py", 2, 600, {"precision": "bf16"}),
        ("02_torchrun.py", 2, 7, {"mode": "strong"}),
        ("topics/fast.py", 1, 20, {"options": "--without=ddp"}),
        ("topics/fast.py", 2, 30, {}),
        ("02_torchrun.py", 2, 90, {"num_workers": 8}),
        ("03_multinode.py", 2, 160, {}),
        ("03_multinode.py", 2, 208, {}),  # too far apart for three digits
        ("01_single_node_multi_gpu.py", 2, 170, {"commit": "old"}),  # of another run than 00
    ]
    names = ("script", "devices", "samples_per_second")
    own = [dict(zip(names, row, strict=False)) | row[-1] for row in measured]
    own = [row | dict.fromkeys(("min", "max"), row["samples_per_second"]) for row in own]
    made_up(monkeypatch, tmp_path, "scaling.csv", *own)
    text = tables.speed()
    head = (
        "small, 28 × 28 pixels, 8 images a process. 2026-01-02, 4 cores of an Z80 machine, no GPU"
    )
    assert text.startswith(f"{head}, Python 3.1, torch 9.") and "seal" not in text
    assert sorted(cells(text)) == [
        ["`00_single_gpu.py`", "bf16", "400", ""],
        ["`00_single_gpu.py`", "fp32", "100", ""],
        ["`00_single_gpu.py`, 2 threads", "fp32", "999", ""],
        ["`01_single_node_multi_gpu.py`", "fp32", "", "170"],
        ["`02_torchrun.py`", "bf16", "", "600 (1.50)"],
        ["`02_torchrun.py`", "fp32", "50", "180 (1.80)"],
        ["`02_torchrun.py` --num-workers=8", "fp32", "", "90 (0.90)"],
        ["`03_multinode.py`", "fp32", "", "160 to 210 (1.6 to 2.1)"],
        ["`topics/fast.py`", "fp32", "", "30 (1.50)"],
        ["`topics/fast.py` --without=ddp", "fp32", "20", ""],
    ]
    once_more = dict.fromkeys(("samples_per_second", "min", "max"), 1) | {"commit": "b"}
    made_up(monkeypatch, tmp_path, "scaling.csv", *own, own[5] | once_more)
    assert ["`02_torchrun.py`", "fp32", "50", "1"] in cells(tables.speed())
    assert "workers" not in tables.speed(".*", ".*", ".*", "(?!.*workers).*")


def test_the_table_of_strategies(monkeypatch, tmp_path):
    """Against 02 of the same commit and the same work, a table for each commit."""
    names = ("script", "devices", "samples_per_second", "peak_memory_mb", "overhead_seconds")
    measured = [
        ("topics/crash.py", 2, 400, 800, 7, {"commit": "old"}),
        ("topics/fsdp.py", 2, 400, 800, 7, {"commit": "old"}),  # measured again below
        ("02_torchrun.py", 2, 4000, 4000, 5, {"commit": "old"}),
        ("topics/fsdp.py", 2, 50, 300, 7, {}),
        ("02_torchrun.py", 2, 200, 400, 5, {}),
        ("02_torchrun.py", 1, 1000, 1000, 5, {}),
        ("02_torchrun.py", 2, 200, 400, 5, {}),
        ("04_lightning.py", 2, 190, 400, 5, {"min": 100, "max": 200}),
    ]
    own = [dict(zip(names, row, strict=False)) | row[-1] for row in measured]
    own = [dict.fromkeys(("min", "max"), row["samples_per_second"]) | row for row in own]
    made_up(monkeypatch, tmp_path, "strategies.csv", *own)
    old, new = (part for part in tables.strategies().split("small, 28") if "ranks: 2" in part)
    assert "commit old" in old and "commit a" in new
    plain = ["`02_torchrun.py`", "4000 MB", "1.00", "1.00", "5 s"]
    assert cells(old) == [plain, ["`topics/crash.py`", "800 MB", "0.20", "0.10", "7 s"]]
    assert cells(new) == [
        ["`02_torchrun.py`", "400 MB", "1.00", "1.00", "5 s"],
        ["`topics/fsdp.py`", "300 MB", "0.75", "0.25", "7 s"],
        ["`04_lightning.py`", "400 MB", "1.00", "0.5 to 1.0", "5 s"],
    ]


def test_the_table_of_last_lines(monkeypatch, tmp_path):
    """The last run of a topic counts; one that has failed shows its exit code."""
    rows = [("fsdp", 0, "measured 1 | 2"), ("crash", 0, "measured 3"), ("crash", 1, "")]
    with (tmp_path / "topics.jsonl").open("w") as file:
        for topic, code, line in rows:
            row = {"topic": topic, "processes": 2, "exit_code": code, "last_line": line}
            print(json.dumps(WORK | row), file=file)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = [["`fsdp`", "2", "measured 1 · 2"], ["`crash`", "2", "exit code 1"]]
    assert cells(tables.last_lines()) == found


def test_the_tables_of_feeding(monkeypatch, tmp_path):
    """Shares of the bare step of the same run; what was not measured yet is said."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for table in (tables.feeding, tables.compiled, tables.loading):
        assert table() == "Not measured yet.\n"
    run = {"dataset": "fake:64", "batch_size": 8, "alone": "", "device": "cuda", "gpus": 1}
    run |= {"gpu": "GPU", "nccl": "2", "pinned": "", "store": "", "num_workers": ""}
    speeds = {"bare": 100, "samples": 50, "prefetched": 98.7}
    own = [
        run | {"feed": feed} | dict.fromkeys(("samples_per_second", "min", "max"), n)
        for feed, n in speeds.items()
    ]
    own[1] |= {"num_workers": 2, "pinned": "no", "store": "file", "alone": 70}
    made_up(monkeypatch, tmp_path, "feeding.csv", *own)
    assert cells(tables.feeding()) == [
        ["the bare step", "", "", "", "100", "1.000"],
        ["`samples`, not pinned", "file", "2", "70", "50", "0.500"],
        ["`prefetched`", "", "", "", "99", "0.987"],
    ]
    own = [{"way": "alone", "devices": 1, "samples_per_second": 100, "min": 100, "max": 100}]
    own += [own[0] | {"way": "once", "devices": n, "samples_per_second": n * 99} for n in (1, 2)]
    old = own[0] | {"commit": "old"} | dict.fromkeys(("samples_per_second", "min", "max"), 97)
    old = [old | {"way": "once"}, old | {"way": "inside", "samples_per_second": 88}]
    made_up(monkeypatch, tmp_path, "compiled_ddp.csv", *[run | row for row in (*old, *own)])
    assert cells(tables.compiled()) == [
        ["`once`", "99 (1.000)", "198 (1.000)"],
        ["`inside`", "88 (0.907)", ""],
        ["`alone`", "100 (1.010)", ""],
    ]


def test_the_table_of_restarts(monkeypatch, tmp_path):
    rows = [(1, 1, 2.0), (1, 1, 9.0), (1, 1, 4.0), (1, 0, ""), (0, 1, 8.0)]
    names = ("setting", "finished", "back_after")
    own = [{"processes": 2} | dict(zip(names, row, strict=True)) for row in rows]
    made_up(monkeypatch, tmp_path, "restarts.csv", *own)
    found = [line[1:] for line in cells(tables.restarts())]
    assert found == [
        ["with", "3 of 4", "4.0 s, 2.0 to 9.0 s"],
        ["without", "1 of 1", "8.0 s, 8.0 to 8.0 s"],
    ]


def test_the_table_of_dask(monkeypatch, tmp_path):
    """Medians and ranges, each way by itself."""
    own = {"nodes": 2, "ranks": 4, "schedulers": 1, "workers": 4, "loading": 0.5, "wall": 20}
    seconds = [("job", 2.0), ("job", 9.0), ("job", 4.0), ("node", 8.0)]
    rows = [own | {"clusters": name, "ready": ready} for name, ready in seconds]
    made_up(monkeypatch, tmp_path, "dask.csv", *rows)
    found = [line[:1] + line[4:5] + line[7:8] for line in cells(tables.dask())]
    assert found == [
        ["`job`", "4.00 s, 2.00 to 9.00 s", "3"],
        ["`node`", "8.00 s, 8.00 to 8.00 s", "1"],
    ]


def test_the_tables_of_tour_and_parity(monkeypatch, tmp_path):
    """Loss and accuracy are those of the last epoch, the speed is a median without the first."""
    epoch = {"world_size": 2, "train_loss": 0.3, "test_accuracy": 0.8}
    epochs = [epoch | {"samples_per_second": speed} for speed in (1, 30, 20, 70)]
    epochs[-1] |= {"train_loss": 0.12344, "test_accuracy": 0.917}
    runs = [
        {"rung": name, "seconds": 8.4, "same": name == "00", "epochs": epochs}
        for name in ("00", "01")
    ]
    for name, more in {
        "tour_cpu": {},
        "gpu_parity": {"tours": [{"processes": 1, "rungs": runs}]},
    }.items():
        record = {"machine": WORK, "rungs": runs} | more
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    line = ["2", "0.1234", "91.7%", "30", "8"]
    assert cells(tables.tour()) == [["00", *line, "yes"], ["01", *line, "**no**"]]
    assert cells(tables.gpu()) == [["00", "0.123440"], ["01", "0.123440 (not as in 00)"]]


def test_the_table_of_nequip(monkeypatch, tmp_path):
    """The errors of the last epoch, and the largest difference, relative, over all epochs."""

    def run(*errors):
        return {"steps": 3, "epochs": [{"forces_mae": a, "total_energy_mae": b} for a, b in errors]}

    versions = dict.fromkeys(("nequip", "e3nn", "ase", "lightning"), "1")
    runs = {"1 rank": run((2, 4), (0.5, 8)), "2 ranks": run((2, 4.004), (0.5, 8.000008))}
    later = {"2 ranks, Lightning's own DDP": run((2, 4.04), (0.5, 8))}
    records = [{"machine": WORK | versions, "runs": some} for some in (runs, later)]
    records += [{"machine": WORK | versions | {"gpu": "GPU"}, "runs": {"1 rank": run((2, 9))}}]
    (tmp_path / "nequip.json").write_text(json.dumps(records))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.nequip()
    assert cells(text)[0] == ["1 rank", "3", "0.5000000", "8.0000000"]
    assert "2 ranks, over all epochs: 1e-03." in text and "DDP, over all epochs: 1e-02." in text
    assert [line[0] for line in cells(text)] == [*runs, *later, "run", "---", "1 rank"]
    assert cells(text)[-1] == ["1 rank", "3", "2.0000000", "9.0000000"]  # of its own machine


def test_speedup_and_efficiency_of_the_figure(monkeypatch, tmp_path):
    """180 samples/s on two, where 00 has 100 on one: 1.8, and 0.9 of two; 02 itself has 50."""
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    import figures

    own = {"device": "cpu", "min": 1, "max": 500, "effective_batch": 8}
    names = ("script", "devices", "samples_per_second")
    some = [("00_single_gpu.py", 1, 100), ("02_torchrun.py", 1, 50), ("02_torchrun.py", 2, 180)]
    some = [own | dict(zip(names, row, strict=True)) for row in some]
    made_up(monkeypatch, tmp_path, "scaling.csv", *map(machine.sealed, some))
    read = figures.read(tmp_path / "scaling.csv")
    assert "seal" not in read and "seal" not in tables.read("scaling.csv")
    figures.plt.switch_backend("agg")
    figure = figures.speedup(figures.ddp(figures.speeds(read)))
    try:
        for axes, drawn in zip(figure.axes, ([0.5, 1.8], [0.5, 0.9]), strict=True):
            lines = [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 2]
            assert any(line == pytest.approx(drawn) for line in lines), lines
    finally:
        figures.plt.close(figure)


def test_how_a_diff_is_counted(tmp_path):
    """Code alone: no docstring, comment or blank line, and no change of white space."""
    before, after = tmp_path / "a.py", tmp_path / "b.py"
    before.write_text('"""One."""\n\na = 1\nb = 2\n# why\nif a:\n    c = 3\n')
    after.write_text('"""Two,\nlonger."""\n\na = 1\nd = 4\ne = 5\n# why not\n\nc = 3\n')
    assert pairs.changed(before, after) == (2, 2)
    assert pairs.changed(after, before) == (2, 2)
    after.write_text(after.read_text() + "f = 6\n")
    assert pairs.changed(before, after) == (3, 2)
    assert pairs.diff(before, after, only_code=True).endswith("+f = 6\n")
