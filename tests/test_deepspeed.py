"""DeepSpeed's four stages have the numbers of rung 02, and each keeps less than the one before."""

import os
import re
import shutil
from functools import partial

import pytest
import torch

import ladder

fork = partial(ladder.fork, whole=True)

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as torch sees no GPU in forked processes
try:  # here, so that the forked processes need not do it; DeepSpeed imports the compiler, too
    import deepspeed  # noqa: F401
    import torch._inductor.compile_fx
except ImportError:
    if os.environ.get("CI"):
        raise
    pytest.skip("needs deepspeed", allow_module_level=True)

TOPIC = "topics/deepspeed_zero.py"
ONE, TWO = "--epochs=1", "--epochs=2"
LINE = re.compile(
    r"^rank (\d) \| stage (\d) \| momentum (\d+) \| gradients (\d+), for the step (\d+)"
    r" \| weights (\d+), copy (\d+) \| of (\d+)$",
    re.MULTILINE,
)


def run(world_size, *options, **more):
    done = fork(TOPIC, world_size, *options, **more)
    assert done.codes == [0] * world_size, done.err
    return done


def assert_same(done, reference):
    """The same losses, and in the checkpoint the same weights and momentum."""
    assert len(done.epochs) == len(reference.epochs) > 0
    for ours, theirs in zip(done.epochs, reference.epochs, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]
    assert list(done.state["weights"]) == list(reference.state["weights"])
    for name, value in reference.state["weights"].items():
        torch.testing.assert_close(done.state["weights"][name], value, rtol=0, atol=1e-5)
    ours, theirs = (result.state["optimizer"]["state"] for result in (done, reference))
    assert list(ours) == list(theirs)
    for number, value in theirs.items():
        buffer = ours[number]["momentum_buffer"]
        torch.testing.assert_close(buffer, value["momentum_buffer"], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def reference():
    """Rung 02 on two ranks."""
    return fork("02_torchrun.py", 2, ONE)


@pytest.fixture(scope="module")
def stages():
    """All stages on two ranks."""
    return [run(2, ONE, f"--stage={stage}") for stage in range(4)]


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_has_the_numbers_of_02(stage, stages, reference):
    assert_same(stages[stage], reference)


def test_each_stage_shards_more(stages):
    """In numbers that a rank keeps; a shard may be padded by one."""
    most_before = float("inf")
    for stage, done in enumerate(stages):
        lines = [[int(number) for number in line] for line in LINE.findall(done.out)]
        assert sorted(line[:2] for line in lines) == [[0, stage], [1, stage]], done.out
        for _, _, momentum, most, for_step, weights, copy, total in lines:
            half = pytest.approx(total / 2, abs=1)
            assert total == sum(value.numel() for value in done.state["weights"].values())
            assert momentum == for_step == (half if stage else total)
            assert weights == (half if stage == 3 else total)
            assert copy == (half if stage else 0)
            assert most == total if stage < 2 else for_step < most < total
        most = max(line[3] for line in lines)
        assert most <= most_before and (stage < 2 or most < most_before)
        most_before = most


def test_00_resumes_from_the_file(stages, reference, tmp_path):
    ends = []
    for done in (stages[3], reference):
        folder = tmp_path / done.checkpoint.parent.name
        folder.mkdir()
        shutil.copy(done.checkpoint, folder)
        ends.append(fork("00_single_gpu.py", 1, TWO, folder=folder).epochs[-1])
    assert ends[0]["epoch"] == 2
    assert ends[0]["train_loss"] == pytest.approx(ends[1]["train_loss"], abs=5e-5)


def test_it_resumes_bit_for_bit(tmp_path):
    whole = run(2, TWO, "--batch-size=800")
    run(2, ONE, "--batch-size=800", folder=tmp_path)
    done = run(2, TWO, "--batch-size=800", folder=tmp_path)
    assert "checkpoint.pt: resumes after epoch 1" in done.out
    assert [entry["epoch"] for entry in done.epochs] == [1, 2]
    for name, value in whole.state["weights"].items():
        assert torch.equal(done.state["weights"][name], value), name


def test_three_ranks_and_another_rate(tmp_path):
    """On three ranks shards are padded, and rank 0 has a test batch more than the others."""
    done = {}
    for name, stage in (("02_torchrun.py", ()), (TOPIC, ("--stage=3",))):
        options = {"folder": tmp_path / name[:2]}
        fork(name, 3, ONE, "--batch-size=996", *stage, **options)
        done[name] = fork(name, 3, TWO, "--batch-size=996", "--lr=0.2", *stage, **options)
    assert_same(done[TOPIC], done["02_torchrun.py"])


def test_without_being_told_it_clips_the_gradients(reference):
    done = run(
        2,
        ONE,
        "--stage=0",
        edit=lambda text: text.replace('config |= {"gradient_clipping": 0.0}', "pass"),
    )
    assert abs(done.epochs[0]["train_loss"] - reference.epochs[0]["train_loss"]) > 0.01


def test_what_cannot_work_is_refused_in_one_line(reference, tmp_path):
    cases = {
        "--stage: invalid choice: 4 (choose from 2, 0, 1, 3)": fork(TOPIC, 1, "--stage=4"),
        "needs deepspeed: pip install deepspeed": fork(
            TOPIC, 1, before=lambda: __import__("sys").modules.update(deepspeed=None)
        ),
    }
    shutil.copy(reference.checkpoint, tmp_path)
    message = f"cannot resume without {tmp_path}/checkpoint.pt.shards/stage2_ranks1_epoch1: use"
    cases[message] = fork(TOPIC, 1, TWO, folder=tmp_path)
    for message, done in cases.items():
        assert done.codes == [2] and message in done.err and "Traceback" not in done.err, done.err
        assert not done.epochs
