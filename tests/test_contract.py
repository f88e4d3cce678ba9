"""The contract: the same command line gives the same numbers, in every rung, at every world size.

On the CPU, with Gloo; test_tour.py does it on GPUs, with NCCL, where there are some.
"""

import functools
import hashlib
import os
import pickle
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import common
from ladder import PARALLEL, ROOT, RUNGS, Result, changed, fork, of_the_day

LOSS = 5e-5  # equal to 4 decimals
WEIGHTS = {torch.float32: 1e-4, torch.float64: 1e-11}


@functools.cache
def run(rung: str, world_size: int, *options: str, dtype=torch.float32, whole=False) -> Result:
    """Run a job once for all tests that look at it, also for those of other workers of pytest."""
    words = [word for word in options if word != "--seed=0"]  # which is the default
    sources = [path.read_text() for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("data/*.py")])]
    job = f"{rung} {world_size} {words} {dtype} {whole} {sources}"
    kept = Path(tempfile.gettempdir(), f"run-{hashlib.sha256(job.encode()).hexdigest()}")
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    before = functools.partial(torch.set_default_dtype, dtype)
    result = fork(rung, world_size, *options, before=before, whole=whole)
    assert not any(result.codes), result.err
    half = kept.with_suffix(f".{os.getpid()}")
    half.write_bytes(pickle.dumps(result))
    half.replace(kept)
    return result


def assert_same(result: Result, reference: Result, dtype: torch.dtype = torch.float32) -> None:
    """The contract between a run and the run of 00 with the same command line."""
    assert len(result.epochs) == len(reference.epochs) > 0
    for entry, other in zip(result.epochs, reference.epochs, strict=True):
        assert abs(entry["train_loss"] - other["train_loss"]) < LOSS
        assert entry["test_accuracy"] == other["test_accuracy"]
        assert entry["test_samples"] == other["test_samples"]
    assert len({entry["train_loss"] for entry in reference.epochs}) == len(reference.epochs)
    for weights in result.weights:
        assert_weights(weights, reference.weights[0], WEIGHTS[dtype])
        assert_weights(weights, result.weights[0], 0)  # the replicas are equal bit for bit


def assert_weights(weights: dict, other: dict, tolerance: float) -> None:
    assert list(weights) == list(other)
    for name in weights:
        assert (weights[name].cpu() - other[name].cpu()).abs().max() <= tolerance, name


def test_it_learns():
    epochs = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs
    assert epochs[-1]["train_loss"] < 0.1 < 1 < epochs[0]["train_loss"]
    assert epochs[-1]["test_accuracy"] >= 0.95
    assert [entry["epoch"] for entry in epochs] == [1, 2, 3, 4, 5]


# slow: not in `make check`, which is for whoever edits a rung.
CASES = [(rung, n, 0) for rung in RUNGS for n in ([1, 2, 3] if rung in PARALLEL else [1])]
CASES += [pytest.param(rung, 4, 0, marks=pytest.mark.slow) for rung in PARALLEL]
CASES += [pytest.param(rung, 3, 1, marks=pytest.mark.slow) for rung in of_the_day(PARALLEL, 1)]


@pytest.mark.parametrize(("rung", "world_size", "seed"), CASES)
def test_same_numbers(rung, world_size, seed):
    """The README's run on two ranks; two of its epochs on one and on more."""
    options = [f"--seed={seed}"] + ["--epochs=2"] * (world_size != 2)
    result = run(rung, world_size, *options, whole=True)
    assert_same(result, run("00_single_gpu.py", 1, *options, whole=True))
    assert result.epochs[0]["world_size"] == world_size
    assert len(result.weights) == world_size


@pytest.mark.parametrize("rung", PARALLEL)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_weights_in_fp64(rung, world_size):
    """What is left of the difference in fp32 is rounding, not mathematics."""
    options = ("--seed=0", "--epochs=2")
    result = run(rung, world_size, *options, dtype=torch.float64)
    assert_same(result, run("00_single_gpu.py", 1, *options, dtype=torch.float64), torch.float64)


@pytest.mark.parametrize("rung", PARALLEL)
def test_world_size_1_is_bitwise_00(rung):
    assert_weights(
        run(rung, 1, "--seed=0", "--epochs=2", whole=True).weights[0],
        run("00_single_gpu.py", 1, "--seed=0", "--epochs=2", whole=True).weights[0],
        0,
    )


def swap(*pairs: tuple[str, str]):
    """Return an edit of a file's text that must find each of its places."""

    def edit(source: str) -> str:
        for old, new in pairs:
            assert old in source, f"the file has no {old!r} any more"
            source = source.replace(old, new)
        return source

    return edit


MUTATIONS = {
    "no set_epoch": swap(("sampler.set_epoch(epoch)", "pass")),
    "no sampler": swap(("sampler=sampler", "shuffle=True")),
    "no DDP": swap(("model = DDP(model)", "pass"), ("model.module", "model")),
    "batch per rank": swap(("batch = args.per_rank_batch", "batch = args.batch_size")),
    "forward around DDP": swap(("model(images)", "model.module(images)")),
    "loss of rank 0 only": swap(("dist.all_reduce(sums)", "pass")),
    "each rank tests all": swap(("range(rank, len(test_set), world_size)", "range(len(test_set))")),
    "padded test shard": swap(
        ("range(rank, len(test_set), world_size)", "list(DistributedSampler(test_set))")
    ),
    "ranks of another seed": swap(("seed=args.seed", "seed=args.seed + rank")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("rung", [name for name in PARALLEL if not name.startswith("04")])
def test_the_contract_notices(rung, mutation):
    """Break the file, and the contract must fail: or it would be worth nothing."""
    world_size = 3 if mutation == "padded test shard" else 2  # 125 samples do not divide by 3
    reference = run("00_single_gpu.py", 1, "--epochs=2")
    broken = fork(rung, world_size, "--epochs=2", edit=MUTATIONS[mutation])
    assert not any(broken.codes), broken.err  # it runs: nothing else would tell
    with pytest.raises(AssertionError):
        assert_same(broken, reference)
    assert_same(run(rung, world_size, "--epochs=2"), reference)


def norm_added(model: torch.nn.Sequential) -> torch.nn.Sequential:
    """Running statistics without a memory: those of a rank's last few images."""
    return model.append(torch.nn.BatchNorm1d(10, momentum=1))


@pytest.mark.parametrize("rung", PARALLEL)
def test_the_accuracy_is_that_of_the_saved_model(rung):
    options = ("--epochs=1", "--batch-size=32")
    result = fork(rung, 2, *options, before=changed(norm_added), whole=True)
    assert not any(result.codes), result.err
    args = Namespace(model="small", dataset="digits", channels=1, image_size=28)
    model, (_, test_set) = norm_added(common.build_model(args)), common.load_datasets(args)
    model.load_state_dict(result.weights[0])
    correct, tested = common.evaluate(model, DataLoader(test_set, 100), torch.device("cpu"))
    assert result.epochs[0]["test_accuracy"] == pytest.approx(correct.item() / tested.item())
