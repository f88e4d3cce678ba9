"""Topics about the speed of a step and about batch norm: the printed numbers prove the text."""

import ast
import json
import re
import threading
from functools import partial

import numpy as np
import pytest
import test_topics
import torch
from test_topics import TWO

import checks
import ladder
from ladder import ROOT

fork = partial(ladder.fork, whole=True)
topic = partial(test_topics.topic, whole=True)

# float16 is slow on a CPU: few images. 5 steps an epoch.
FEW = ["--dataset=fake:480", "--image-size=28"]


def assert_equal(ours, theirs, tolerance=0.0):
    """The same weights in two state dicts."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance)


# ---- mixed_precision -----------------------------------------------------------------------------


def precision_lines(done, world_size=2):
    """Return (loss scale, skipped steps, steps, largest norm), the same on all ranks."""
    lines = re.findall(
        r"^rank \d \| \w+ \| loss scale (\S+) \| (\d+) of (\d+) steps skipped"
        r" \| largest gradient norm (\S+) \| peak memory \d+ bytes$",
        done.out,
        re.M,
    )
    assert len(lines) == world_size and len(set(lines)) == 1, done.out
    scale, skipped, steps, norm = lines[0]
    return float(scale), int(skipped), int(steps), float(norm)


def scale_starts_at(scale):
    """To be called before a run: a GradScaler of that run begins with this scale."""
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=scale)


def test_mixed_precision_without_clipping_and_in_fp32_it_is_02():
    reference = fork("02_torchrun.py", 2, *TWO)
    done = topic("mixed_precision", 2, *TWO, "--precision=fp32", "--clip=inf")
    assert_equal(done.state["weights"], reference.state["weights"])
    scale, skipped, steps, norm = precision_lines(done)
    assert (scale, skipped, steps) == (1, 0, 82) and norm > 1


def test_mixed_precision_is_near_to_fp32():
    runs = {
        name: topic("mixed_precision", 2, "--epochs=1", f"--precision={name}")
        for name in ("fp32", "bf16")
    }
    losses = [run.epochs[-1]["train_loss"] for run in runs.values()]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    norms = [precision_lines(run)[3] for run in runs.values()]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    assert runs["bf16"].weights[0]["1.weight"].dtype == torch.float32

    few = [
        topic("mixed_precision", 2, "--epochs=1", *FEW, f"--precision={name}")
        for name in ("fp32", "fp16")
    ]
    losses = [run.epochs[-1]["train_loss"] for run in few]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    assert precision_lines(few[1]) == pytest.approx(
        (65536, 0, 5, precision_lines(few[0])[3]), rel=0.05
    )


def record_calls():
    """To be called before a run: print the name of each call of scaler, clip and optimizer."""
    scaler, clip = torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_

    def recorded(name, call):
        def wrapper(*args, **options):
            print("call", name)
            return call(*args, **options)

        return wrapper

    for name in ("scale", "unscale_", "step", "update"):
        setattr(scaler, name, recorded(name, getattr(scaler, name)))
    torch.nn.utils.clip_grad_norm_ = recorded("clip", clip)
    torch.Tensor.backward = recorded("backward", torch.Tensor.backward)


def test_mixed_precision_order_of_the_calls():
    options = ["--epochs=1", *FEW, "--precision=fp16"]
    calls = re.findall(
        "^call (.*)", topic("mixed_precision", 1, *options, before=record_calls).out, re.M
    )
    assert calls == ["scale", "backward", "unscale_", "clip", "step", "update"] * 5


def test_clipping_scaled_gradients_is_seen():
    """Without unscale_ the norm has the scale in it, and all that is left of a step is nothing."""
    options = ["--epochs=1", *FEW, "--precision=fp16", "--clip=0.1"]
    right = topic("mixed_precision", 2, *options)
    wrong = topic(
        "mixed_precision",
        2,
        *options,
        edit=lambda text: re.sub(r" +scaler\.unscale_.*\n", "", text),
    )
    assert precision_lines(wrong)[3] > 10_000 * precision_lines(right)[3]
    (first, second) = (run.state["weights"]["10.bias"] for run in (right, wrong))
    start = topic("mixed_precision", 2, *options, "--lr=1e-30").state["weights"]["10.bias"]
    assert (second - start).norm() < 1e-3 * (first - start).norm()


def test_overflow_is_skipped_by_all_ranks_alike():
    """2 ** 20 is too much for float16: the first steps are skipped, each halves the scale."""
    options = ["--epochs=1", *FEW, "--precision=fp16"]
    done = topic("mixed_precision", 2, *options, before=partial(scale_starts_at, 2.0**20))
    scale, skipped, steps, norm = precision_lines(done)
    assert steps == 5 and 0 < skipped < 5 and scale == 2.0 ** (20 - skipped) and 0 < norm < 1000
    assert_equal(done.weights[0], done.weights[1])
    assert all(value.isfinite().all() for value in done.weights[0].values())
    # No step at all: the weights are those of the start.
    done = topic("mixed_precision", 2, *options, before=partial(scale_starts_at, 2.0**60))
    start = topic("mixed_precision", 2, *options, "--lr=1e-30")
    assert precision_lines(done)[:3] == (2.0**55, 5, 5)
    assert_equal(done.state["weights"], start.state["weights"])


def test_an_overflow_on_one_rank_is_skipped_by_both():
    """From the third step on rank 1 has infinite gradients; the average hands them to rank 0."""
    done = topic(
        "mixed_precision",
        2,
        "--epochs=1",
        *FEW,
        "--precision=fp16",
        edit=lambda text: text.replace(
            "scale(loss)",
            "scale(loss * float('inf') if rank == 1 and len(applied_steps) == 2 else loss)",
        ),
    )
    assert precision_lines(done)[:3] == (65536 / 2**3, 3, 5)
    assert_equal(done.weights[0], done.weights[1])


def test_scale_is_in_the_checkpoint(tmp_path):
    """1 + 1 epochs are 2, bit for bit; the second run would begin with 65536 by itself."""
    options = [*FEW, "--precision=fp16"]
    high = partial(scale_starts_at, 2.0**20)
    whole = topic("mixed_precision", 2, *TWO, *options, before=high)
    first = topic("mixed_precision", 2, "--epochs=1", *options, folder=tmp_path, before=high)
    saved = first.state["optimizer"]["scaler"]
    assert saved["scale"] == precision_lines(first)[0] not in (65536, 2.0**20)
    (tmp_path / "stdout.0").unlink()
    (tmp_path / "stdout.1").unlink()
    second = topic("mixed_precision", 2, *TWO, *options, folder=tmp_path)
    assert precision_lines(second)[0] == precision_lines(whole)[0] == saved["scale"]
    assert_equal(second.state["weights"], whole.state["weights"])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_checkpoints_and_those_of_02(precision, tmp_path):
    """02, then this, then 02: each resumes from the file of the other."""
    runs = [("02_torchrun.py", 1), ("topics/mixed_precision.py", 2), ("02_torchrun.py", 3)]
    for rung, epochs in runs:
        option = [f"--precision={precision}"] if rung.startswith("topics") else []
        done = fork(rung, 2, f"--epochs={epochs}", *FEW, *option, folder=tmp_path)
        assert done.codes == [0, 0], done.err
    assert [entry["epoch"] for entry in done.epochs] == [1, 2, 3]
    losses = [entry["train_loss"] for entry in done.epochs]
    assert losses == sorted(losses, reverse=True)


def test_mixed_precision_refuses():
    for option, message in (
        ("--precision=fp8", "--precision: invalid choice: 'fp8' (choose from bf16, fp16, fp32)"),
        ("--clip=0", "--clip must be more than 0"),
        ("--clip=nan", "--clip must be more than 0"),
    ):
        wrong = fork("topics/mixed_precision.py", 1, option)
        assert wrong.codes == [2] and message in wrong.err and not wrong.checkpoint.exists()


# ---- sync_batchnorm ------------------------------------------------------------------------------


def statistics(done):
    """Return the sum of each rank's running statistics, before rank 0's are sent."""
    return ast.literal_eval(re.search(r"^measured .* add up to (\[.*?\])", done.out, re.M)[1])


def losses(done):
    return [entry["train_loss"] for entry in done.epochs]


@pytest.fixture(scope="module")
def one_process():
    """Rung 00 with batch norm in its model."""

    def with_norms(text):
        line = "    optimizer = torch.optim.SGD("
        norms = "    model.insert(2, torch.nn.BatchNorm2d(16))\n"
        norms += "    model.insert(6, torch.nn.BatchNorm2d(32))\n"
        return text.replace(line, norms + line)

    return fork("00_single_gpu.py", 1, "--epochs=1", edit=with_norms)


def test_local_statistics_are_those_of_a_rank(one_process):
    """In one process the topic is 00 bit for bit; two ranks are off in the third decimal."""
    alone = topic("sync_batchnorm", 1, "--epochs=1")
    assert_equal(alone.state["weights"], one_process.state["weights"])
    assert "expected equal sums, therefore all ranks test one model\n" in alone.out
    done = topic("sync_batchnorm", 2, "--epochs=1")
    assert "expected different sums, therefore a rank tests another model" in done.out
    for ours, theirs in zip(losses(done), losses(one_process), strict=True):
        assert 5e-4 < abs(ours - theirs) < 0.1
    first, second = statistics(done)
    assert abs(first - second) > 1e-3
    names = [name for name in done.weights[0] if "running" in name]
    assert len(names) == 4
    assert_equal(done.weights[0], done.weights[1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_synced_statistics_are_those_of_the_whole_batch(world_size, one_process):
    done = topic("sync_batchnorm", world_size, "--epochs=1", "--norm=by_hand")
    assert losses(done) == pytest.approx(losses(one_process), abs=1e-4)
    assert_equal(done.state["weights"], one_process.state["weights"], 1e-4)
    assert len(statistics(done)) == world_size and len(set(statistics(done))) == 1


def test_synced_running_statistics_of_a_small_batch():
    """Where n - 1 is not nearly n: 4 images of 4 x 4 pixels, and a fourth of them after pooling."""
    options = ["--epochs=1", "--dataset=fake:32", "--image-size=4", "--batch-size=4"]
    alone = topic("sync_batchnorm", 1, *options)
    done = topic("sync_batchnorm", 2, *options, "--norm=by_hand")
    assert_equal(done.state["weights"], alone.state["weights"], 1e-4)


def test_group_norm_does_not_see_the_batch():
    alone, done = (topic("sync_batchnorm", ranks, "--epochs=1", "--norm=group") for ranks in (1, 2))
    assert losses(done) == pytest.approx(losses(alone), abs=5e-5)
    assert statistics(done) == [0, 0]


def test_sync_batchnorm_refuses():
    for options, message in (
        (["--norm=sync"], "--norm sync (SyncBatchNorm) trains on GPUs only: use by_hand or group"),
        (
            ["--norm=batch"],
            "--norm: invalid choice: 'batch' (choose from local, sync, by_hand, group)",
        ),
        (["--norm=by_hand", "--model=resnet18"], "--norm by_hand is for --model small: use local"),
    ):
        wrong = fork("topics/sync_batchnorm.py", 1, *options)
        assert wrong.codes == [2] and message in wrong.err and not wrong.checkpoint.exists()


def test_a_model_with_batch_norm_of_its_own():
    done = topic(
        "sync_batchnorm",
        2,
        "--epochs=1",
        "--model=resnet18",
        "--dataset=fake:64",
        "--batch-size=32",
    )
    first, second = statistics(done)
    assert first != second
    for name, value in done.weights[0].items():
        assert "running" not in name or torch.equal(value, done.weights[1][name])


# ---- ddp_tuning ----------------------------------------------------------------------------------

WEIGHTS = 114_314  # of the small model


@pytest.fixture(scope="module")
def epoch_of_02():
    return fork("02_torchrun.py", 2, "--epochs=1")


def tuned(done):
    """Return all-reduces and bytes of a step, max weight divergence, and how far from 02."""
    line = re.findall(
        r"^\w+ \| a step: \S+ ms, (\S+) all-reduces, (\d+) bytes \| max weight divergence (\S+)$",
        done.out,
        re.M,
    )
    off = re.findall(r"^measured .*, weights (\S+) from 02's after 1 epochs, ", done.out, re.M)
    assert len(line) == len(off) == 1, done.out
    return (*map(float, line[0]), float(off[0]))


@pytest.mark.parametrize(
    ("variant", "all_reduces", "size", "off"),
    [
        ("plain", 1, 4 * WEIGHTS, 0),
        ("bucket_view", 1, 4 * WEIGHTS, 0),
        ("static_graph", 1, 4 * WEIGHTS, 0),
        ("find_unused", 1, 4 * WEIGHTS, 0),
        ("fp16", 1, 2 * WEIGHTS, 1e-2),
        ("bf16", 1, 2 * WEIGHTS, 5e-2),
    ],
)
def test_ddp_tuning(variant, all_reduces, size, off, epoch_of_02):
    options = ["--epochs=1", f"--variant={variant}", f"--compare={epoch_of_02.checkpoint}"]
    done = topic("ddp_tuning", 2, *options)
    *found, difference = tuned(done)
    assert found == [all_reduces, size, 0]
    assert difference == off == 0 or 0 < difference < off
    assert_equal(done.state["weights"], epoch_of_02.state["weights"], off)
    assert list(done.state["weights"]) == list(epoch_of_02.state["weights"])


@pytest.mark.parametrize("given, size", [("25", "None"), ("5", "5.0")])
def test_plain_has_the_buckets_of_02(given, size):
    """DDP's own first bucket is small; with bucket_cap_mb=25 it would have 25 MB as the others."""
    said = {"edit": lambda text: text.replace("    model = DDP(", "    print(settings)\n    DDP(")}
    done = fork("topics/ddp_tuning.py", 1, "--epochs=1", f"--bucket-mb={given}", **said)
    assert f"{{'bucket_cap_mb': {size}}}" in done.out, done.err


def test_small_buckets(epoch_of_02):
    """More all-reduces, the same bytes and sums. The first step has one bucket, the others 7."""
    options = ["--epochs=1", "--bucket-mb=0.0001", f"--compare={epoch_of_02.checkpoint}"]
    assert tuned(topic("ddp_tuning", 2, *options)) == (6.85, 4 * WEIGHTS, 0, 0)


@pytest.mark.parametrize("variant", ["powersgd", "local_sgd"])
def test_variants_that_change_the_numbers(variant, epoch_of_02):
    """After 20 of 41 steps PowerSGD sends a fraction, local SGD the weights every fourth step."""
    options = ["--epochs=1", f"--variant={variant}", f"--compare={epoch_of_02.checkpoint}"]
    done = topic("ddp_tuning", 2, *options)
    all_reduces, size, divergence, off = tuned(done)
    assert 1e-3 < off < 2
    last = [entry["train_loss"] for entry in (*done.epochs, *epoch_of_02.epochs)]
    assert last[0] == pytest.approx(last[1], rel=0.2)
    plain = 4 * WEIGHTS * 20
    if variant == "powersgd":
        thin = (41 * size - plain) / 21
        assert 0 < thin < 4 * WEIGHTS / 20 and divergence == 0
        assert_equal(done.weights[0], done.weights[1])
    else:
        # Steps 21, 25, 29 ... 41 average the weights: six times. The last one leaves them equal.
        assert all_reduces == pytest.approx(26 / 41, abs=5e-3)
        assert size == pytest.approx(26 / 41 * 4 * WEIGHTS, abs=1)
        assert divergence == 0


def test_local_sgd_lets_the_ranks_drift_apart(tmp_path):
    """In 82 steps the last average is one step ago. Ten of the last 41 steps end with one."""
    done = topic("ddp_tuning", 2, *TWO, "--variant=local_sgd")
    assert 0 < float(re.findall(r"max weight divergence (\S+)", done.out)[-1]) < 1
    assert re.findall(r"(\S+) all-reduces", done.out) == ["0.63", "0.24"]
    assert any(
        not torch.equal(value, done.weights[1][name]) for name, value in done.weights[0].items()
    )


def test_unused_weights():
    """The error is that of the second step; find_unused or a static graph is the answer."""
    options = ["--epochs=1", "--unused=1", *FEW]
    for variant in ("plain", "fp16"):
        wrong = fork("topics/ddp_tuning.py", 2, *options, f"--variant={variant}", "--timeout=20")
        assert wrong.codes == [1, 1] and not wrong.checkpoint.exists()
        assert (
            wrong.err.count("RuntimeError: Expected to have finished reduction in the prior") == 2
        )
    for variant in ("find_unused", "static_graph"):
        done = topic("ddp_tuning", 2, *options, f"--variant={variant}")
        assert_equal(done.weights[0], done.weights[1])
    words = " ".join((ROOT / "topics/ddp_tuning.py").read_text().split())
    assert '"Expected to have finished reduction in the prior iteration"' in words


def test_ddp_tuning_refuses(epoch_of_02):
    for options, message in (
        (
            ["--variant=fast"],
            "--variant: invalid choice: 'fast' (choose from plain, bucket_view, static_graph,",
        ),
        (["--bucket-mb=0"], "--bucket-mb must be more than 0"),
        (["--compare=nothing.pt"], "no such run in --compare nothing.pt: run 02_torchrun.py"),
        ([f"--compare={epoch_of_02.checkpoint}", "--batch-size=32"], "no such run in --compare"),
    ):
        wrong = fork("topics/ddp_tuning.py", 1, *options)
        assert wrong.codes == [2] and message in wrong.err and not wrong.checkpoint.exists()


# ---- feeding -------------------------------------------------------------------------------------

FEEDS = ["prefetched", "samples", "batches", "resident", "batches --num-workers=1"]


def forget_what_is_saved():
    """To be called before a run: an array that was written to a file is black in memory."""
    save = np.save

    def saved(file, array):
        save(file, array)
        array[:] = 0

    np.save = saved


def test_who_feeds_changes_no_number(tmp_path):
    """The same batches in the same order, from memory or from an array on the disk."""
    reference, file = ladder.fork("02_torchrun.py", 2, "--epochs=1"), tmp_path / "images.npy"
    for feed in (*FEEDS, f"prefetched --file={file}"):
        words = ["--epochs=1", *f"--feed={feed}".split()]
        done = test_topics.topic("feeding", 2, *words, before=forget_what_is_saved)
        assert losses(done) == losses(reference), feed
        assert_equal(done.state["weights"], reference.state["weights"])
    assert file.stat().st_size == 128 + 480 * 28 * 28


def test_a_feeder_asks_for_whole_batches_and_ends_its_thread():
    """Seven samples are three batches of two; who leaves early leaves no thread behind."""
    from topics.feeding import Batches, Prefetched, Resident

    data = Batches(torch.arange(70).view(7, 10), torch.arange(7))
    assert [len(part) for part in data.__getitems__([4, 2, 0])] == [3, 3]
    threads = threading.active_count()
    order = [3, 1, 6, 0, 2, 5, 4]
    for feeder in (
        Resident(data.tensors, 2, order),
        Prefetched(data.tensors, 2, order, torch.device("cpu")),
    ):
        assert len(feeder) == 3
        for _ in range(2):  # two epochs
            found = [(images[:, 0].tolist(), labels.tolist()) for images, labels in feeder]
            assert found == [([30, 10], [3, 1]), ([60, 0], [6, 0]), ([20, 50], [2, 5])]
        for _ in feeder:
            break
        assert threading.active_count() == threads
    with pytest.raises(IndexError):  # of the thread, handed on
        list(Prefetched(data.tensors, 1, [0, 99], torch.device("cpu")))


def test_feeding_refuses(tmp_path):
    for options, message in (
        (["--feed=fast"], "--feed: invalid choice: 'fast' (choose from prefetched, samples,"),
        ([f"--file={tmp_path}"], f"cannot write {tmp_path}: Is a directory. Make room, or use"),
    ):
        wrong = fork("topics/feeding.py", 1, *options)
        assert wrong.codes == [2] and message in wrong.err and not wrong.checkpoint.exists()


# ---- profiling -----------------------------------------------------------------------------------


def spans(done):
    """Return {rank: ms a step: all, compute, communication, exposed, idle}."""
    lines = re.findall(
        r"^rank (\d) \| a step (\S+) ms \| compute (\S+) \| communication (\S+), exposed (\S+)"
        r" \| idle (\S+)$",
        done.out,
        re.M,
    )
    return {int(rank): tuple(map(float, times)) for rank, *times in lines}


def test_profiling(epoch_of_02, tmp_path):
    """The parts add up, the traces hold five steps, and the numbers are those of 02."""
    done = topic("profiling", 2, "--epochs=1", f"--traces={tmp_path / 'traces'}", folder=tmp_path)
    found = spans(done)
    assert set(found) == {0, 1}
    for rank, (whole, compute, communication, exposed, idle) in found.items():
        assert 0 < compute < whole and 0 < communication < whole
        assert 0 <= exposed <= communication + 0.002
        assert idle >= -0.002 and compute + exposed + idle == pytest.approx(whole, abs=0.01)
        events = json.loads((tmp_path / "traces" / f"trace.{rank}.json").read_text())
        names = [event["name"] for event in events["traceEvents"]]
        assert names.count("gloo:all_reduce") == 5, "one bucket a step"
        steps = [f"ProfilerStep#{number}" for number in range(7, 12)]
        assert [name for name in names if name.startswith("ProfilerStep")] == steps
    assert len(re.findall("^ *aten::convolution_backward ", done.out, re.M)) == 1, "rank 0's table"
    assert_equal(done.state["weights"], epoch_of_02.state["weights"])
    assert not (tmp_path / "checkpoints").exists(), "all of it is where it was to be"


def test_no_place_for_the_traces_is_said_in_one_line(tmp_path):
    """They go to checkpoints/traces by default, here where that cannot be made."""
    (tmp_path / "checkpoints").write_text("a file")

    def no_patience():
        checks.time.sleep = lambda seconds: None  # in checks.fail, where rank 1 lets rank 0 speak

    done = fork("topics/profiling.py", 2, "--epochs=1", folder=tmp_path, before=no_patience)
    assert 2 in done.codes, done.err
    message = "profiling.py: cannot write checkpoints/traces/trace.0.json: Not a directory. Make"
    assert message in done.err and "use another --traces" in done.err


def test_a_slow_rank_is_exposed_communication_of_the_others():
    """Rank 1 sleeps 0.2 s before each backward pass: it is idle, and rank 0 waits for its sums."""
    line = "            loss.backward()\n"
    done = topic(
        "profiling",
        2,
        "--epochs=1",
        "--dataset=fake:1152",
        "--image-size=28",
        edit=lambda text: text.replace(line, f"            time.sleep(0.2 * rank)\n{line}"),
    )
    found = spans(done)
    (*_, waits, idle), (*_, waits_less, idle_more) = found[0], found[1]
    assert waits > 100 > waits_less and idle_more > 200 > 100 > idle, found


def test_spans_of_a_gpu():
    """Only what runs on the GPU counts. 5 steps; of 10 ms all-reduce 4 are behind the kernels."""
    from topics.profiling import add_up

    rows = [
        ("kernel", "gemm", 1, 9),
        ("kernel", "add", 8, 12),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 8, 18),
        ("gpu_memcpy", "Memcpy HtoD", 20, 21),
        ("user_annotation", "nccl:all_reduce", 0, 30),
        ("gpu_user_annotation", "nccl:all_reduce", 8, 18),
        ("cpu_op", "aten::mm", 0, 40),
    ]
    names = ("cat", "name", "ts", "dur")
    events = [
        dict(zip(names, (cat, name, start * 1e3, (end - start) * 1e3), strict=True))
        for cat, name, start, end in rows
    ]
    trace = {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}
    times = add_up(trace, torch.device("cuda"))
    assert times == pytest.approx([20 / 5, 12 / 5, 10 / 5, 6 / 5])


def test_profiling_refuses():
    wrong = fork("topics/profiling.py", 1, "--batch-size=400")
    assert wrong.codes == [2] and not wrong.checkpoint.exists()
    assert "10 steps an epoch are too few: use a smaller --batch-size" in wrong.err
