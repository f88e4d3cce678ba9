"""Each topic proves its point: the numbers that it prints are those that its text promises."""

import ast
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

import common
import pairs
from ladder import ROOT, changed, fork, launch, only, tell_timeouts, timeouts
from topics import feeding

TWO = ["--epochs=2"]
APART = ("standalone",)
# How each topic ends on rank 0. topic() looks for it in what the tests run.
CONCLUSION = r"^measured .*\d.*, expected \S.*, therefore \S.*$"


def test_each_topic_concludes():
    """standalone.py is a file to copy, and lightning_graph.py has its base's line."""
    apart = {ROOT / f"topics/{x}.py" for x in (*APART, "lightning_graph")}
    for path in set(ROOT.glob("topics/[!_]*.py")) - apart:
        assert path.read_text().count("checks.conclude(") == 1, path


@pytest.fixture(scope="module")
def reference():
    """Rung 02 on two ranks."""
    return fork("02_torchrun.py", 2, *TWO)


def topic(name, world_size, *options, **more):
    done = fork(f"topics/{name}.py", world_size, *options, **more)
    assert done.codes == [0] * world_size, done.err
    assert name in APART or re.search(CONCLUSION, done.out, re.M), done.out
    return done


def assert_same(done, reference, tolerance=1e-5):
    """The same losses, and the same weights on all ranks and in the checkpoint."""
    assert len(done.epochs) == len(reference.epochs) > 0
    for entry, other in zip(done.epochs, reference.epochs, strict=True):
        assert entry["train_loss"] == pytest.approx(other["train_loss"], abs=5e-5)
        assert entry["test_accuracy"] == other["test_accuracy"]
    for weights in [*done.weights, done.state["weights"]]:
        for name, value in reference.state["weights"].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)


def test_ddp_by_hand(reference):
    assert_same(topic("ddp_by_hand", 2, *TWO), reference)


def test_ddp_by_hand_needs_the_average(reference):
    """Without it each rank trains alone, and the ranks drift apart."""
    alone = fork(
        "topics/ddp_by_hand.py",
        2,
        *TWO,
        edit=lambda text: text.replace("dist.all_reduce(flat)", "flat *= world_size"),
    )
    first, second = (weights["1.weight"] for weights in alone.weights)
    assert not torch.equal(first, second)
    assert "therefore the replicas have drifted apart" in alone.out


@pytest.mark.parametrize("steps", [1, 3, 5])  # 48 samples a rank: 5 leaves a smaller tail
def test_gradient_accumulation(steps, reference):
    done = topic("gradient_accumulation", 2, *TWO, f"--accumulation-steps={steps}")
    assert_same(done, reference, 1e-4)  # the contract's: smaller batches round otherwise
    assert f"measured 10 all-reduces of gradients in {10 * steps} backward passes" in done.out
    assert "expected one for each of 10 steps" in done.out
    assert f" of {-(-48 // steps)} of 48 images, and sends no more\n" in done.out
    if steps == 1:
        refused = fork("topics/gradient_accumulation.py", 1, "--accumulation-steps=0")
        assert refused.codes == [2]
        assert refused.err.endswith("--accumulation-steps must be more than 0\n")


def test_without_no_sync_each_micro_batch_is_averaged():
    done = fork(
        "topics/gradient_accumulation.py",
        2,
        "--epochs=1",
        edit=lambda text: text.replace("model.no_sync()", "nullcontext()"),
    )
    assert "20 all-reduces of gradients in 20 backward passes" in done.out  # 4 micro-batches
    assert "and sends more than once a step\n" in done.out
    options = ["--epochs=1", "--model=wide", "--dataset=fake:96", "--image-size=16"]
    done = topic("gradient_accumulation", 2, *options)  # several buckets
    assert "measured 1 all-reduces of gradients in 4 backward passes" in done.out


def test_evaluation():
    for world_size in (1, 2, 3):
        done = topic("evaluation", world_size, "--epochs=1", "--batch-size=96", whole=True)
        found = {
            variant: (int(correct), int(tested), share)
            for variant, correct, tested, share in re.findall(
                r"^(padded|one rank|exact) +(\d+) of (\d+) = (\S+)%$", done.out, re.M
            )
        }
        padded = -(-997 // world_size) * world_size
        assert [found[variant][1] for variant in ("padded", "one rank", "exact")] == [
            padded,
            997,
            997,
        ]
        assert found["one rank"] == found["exact"]
        assert padded == 997 or found["padded"][2] != found["exact"][2]
        sums = "and sums over shards count each once\n"
        assert f"therefore padding counts {padded - 997} twice, {sums}" in done.out
    shard = "range(rank, len(test_set), world_size)"
    edit = {"edit": lambda text: text.replace(shard, "[0] * 500")}
    done = topic("evaluation", 2, "--epochs=1", **edit)
    assert "and sums over shards do not count each once\n" in done.out


def test_uneven_inputs(tmp_path):
    """Rank 1 has a batch less: 40 of 41 batches of 48, and the ranks end with equal weights."""
    done = topic("uneven_inputs", 2, *TWO)
    assert len(done.epochs) == 2 and done.epochs[1]["train_loss"] < done.epochs[0]["train_loss"]
    for name, value in done.weights[0].items():
        assert torch.equal(value, done.weights[1][name])
    assert "measured [5, 4] batches an epoch on the ranks, expected [5, 4]," in done.out
    assert "therefore no batch is missing, and no rank still waits\n" in done.out
    edit = {"edit": lambda text: text.replace("len(train_loader) - rank", "2 - rank")}
    assert "therefore a batch is missing" in topic("uneven_inputs", 1, *TWO, **edit).out
    # And with equal momentum: a resumed run has rank 0's on all ranks, so it would be another one.
    topic("uneven_inputs", 2, "--epochs=1", folder=tmp_path)
    resumed = topic("uneven_inputs", 2, *TWO, folder=tmp_path)
    assert resumed.epochs[-1]["train_loss"] == done.epochs[-1]["train_loss"]
    hang = fork("topics/uneven_inputs.py", 2, "--join=0", "--timeout=5", "--epochs=1")
    assert all(hang.codes) and not hang.epochs
    assert re.search("Timed out waiting 5000ms|Connection closed by peer|[Mm]ismatch", hang.err)


def test_zero_optimizer(reference, tmp_path):
    done = topic("zero_optimizer", 2, *TWO)
    assert_same(done, reference)
    held, total = re.search(
        r"^measured (\[.*\]) of (\d+) numbers of momentum", done.out, re.M
    ).groups()
    held = ast.literal_eval(held)
    assert len(held) == 2 and sum(held) == int(total) and all(held)
    assert "therefore whole tensors are dealt out, and the fullest rank keeps " in done.out
    alone = topic("zero_optimizer", 1, "--epochs=1", "--checkpoint=")
    assert "therefore nothing is dealt out, and the fullest rank keeps 100%" in alone.out
    # 00 resumes from its checkpoint as from 02's.
    ends = []
    for path in (done.checkpoint, reference.checkpoint):
        folder = tmp_path / path.parent.name
        folder.mkdir()
        (folder / "checkpoint.pt").write_bytes(path.read_bytes())
        ends.append(fork("00_single_gpu.py", 1, "--epochs=3", folder=folder))
    assert ends[0].epochs[-1]["epoch"] == 3
    assert ends[0].epochs[-1]["train_loss"] == pytest.approx(
        ends[1].epochs[-1]["train_loss"], abs=5e-5
    )


@pytest.mark.parametrize("own", [0, 1])
def test_seeds_and_augmentation(own):
    done = topic("seeds_and_augmentation", 2, "--epochs=1", f"--seed-per-rank={own}")
    lines = re.findall(
        r"^rank (\d) \| first shifts (.*) \| weights (\w+), at the end (\w+)$", done.out, re.M
    )
    assert sorted(line[0] for line in lines) == ["0", "1"]
    (shifts, starts, ends) = ({line[i] for line in lines} for i in (1, 2, 3))
    assert len(shifts) == 1 + own, "the ranks' draws"
    assert len(starts) == len(ends) == 1 and starts != ends, "the ranks' weights"
    therefore = "each rank draws its own" if own else "more ranks bring no more variety"
    assert f"steps, models: 1, expected {'0 by chance' if own else 'all'}" in done.out
    assert f"therefore {therefore}\n" in done.out
    alone = topic("seeds_and_augmentation", 1, "--epochs=1", f"--seed-per-rank={own}")
    assert "therefore one rank has no other to draw the same\n" in alone.out


def test_a_resumed_run_draws_the_same_augmentation(tmp_path):
    """The second epoch has its own shifts, and a resumed run draws the same ones."""
    whole = topic("seeds_and_augmentation", 2, *TWO)
    first = topic("seeds_and_augmentation", 2, "--epochs=1", folder=tmp_path)
    shifts = re.findall("first shifts (.*?) \\|", first.out)
    resumed = topic("seeds_and_augmentation", 2, *TWO, folder=tmp_path)
    all_shifts = re.findall("first shifts (.*?) \\|", resumed.out)
    assert len(shifts) == 2 and len(set(all_shifts)) == 4
    assert resumed.epochs[-1]["train_loss"] == whole.epochs[-1]["train_loss"]


def test_lr_scaling():
    """Rule and warm-up: half way through a warm-up of two epochs the rate is half way as well."""
    options = ["--base-batch=24", "--lr=0.004", "--rule=linear", "--epochs=1"]
    done = topic("lr_scaling", 2, *options, whole=True)
    assert "linear: learning rate 0.004 to 0.016 in 82 steps" in done.out
    (group,) = done.state["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.01)
    wrong = fork("topics/lr_scaling.py", 1, "--rule=cubic")
    assert wrong.codes == [2] and "--rule: invalid choice: 'cubic'" in wrong.err


def seconds(*each):
    """A `before`: the seconds that each epoch takes."""
    left = iter(each)
    common.seconds_since = lambda *_: next(left)


def tell_parts(*each):
    """As seconds(); each step tells the type of its logits, a prefetched batch that it is one."""
    seconds(*each)
    cross_entropy, load = F.cross_entropy, feeding.Prefetched.load

    def step(logits, labels):
        print(f"{logits.dtype}\n", end="")
        return cross_entropy(logits, labels)

    F.cross_entropy = step
    feeding.Prefetched.load = lambda *some: print("prefetched\n", end="") or load(*some)


def test_fast(reference):
    """With all of it taken away it is rung 02; in bfloat16 it learns as well."""
    none = "--without=tf32,bf16,channels_last,autotune,fused,prefetch,bucket_view,static_graph"
    done = topic("fast", 2, *TWO, f"{none},compile", before=partial(seconds, 3.0, 1.0))
    assert_same(done, reference)
    assert "therefore 2.0 s have to be won back here\n" in done.out
    # With compile it averages by itself. To compile takes minutes, and is not the point.
    eager = partial(torch.compiler.set_stance, "force_eager")
    assert_same(topic("fast", 2, *TWO, none, before=eager), reference)
    done = topic("fast", 2, *TWO, "--without=compile", before=partial(tell_parts, 1.0, 1.1))
    assert "therefore nothing has to be won back here\n" in done.out
    assert done.epochs[-1]["train_loss"] == pytest.approx(
        reference.epochs[-1]["train_loss"], rel=0.1
    )
    assert list(done.state["weights"]) == list(reference.state["weights"])
    steps = 2 * 2 * 5  # ranks, epochs, and batches of an epoch
    told = done.out.splitlines()
    assert told.count("torch.bfloat16") == told.count("prefetched") == steps
    wrong = fork("topics/fast.py", 1, "--without=bf17")
    assert wrong.codes == [2] and "--without takes, between commas, names from: tf32" in wrong.err
    wrong = fork("topics/fast.py", 2, "--without=ddp")
    assert wrong.codes == [2, 2] and "--without ddp is for one process" in wrong.err


COMPILED = r"^measured (.*) of \S+ MiB of weights, graphs: (\d+), graph breaks: (\d+), expected"


@pytest.mark.parametrize("order", ["inside", "outside", "once"])
def test_compile(order, reference):
    """Equal numbers and names in each order. Around DDP the graph breaks, and no weight is in."""
    done = topic("compile", 2, *TWO, f"--order={order}", "--backend=aot_eager")
    assert_same(done, reference)
    pieces, graphs, breaks = re.search(COMPILED, done.out, re.M).groups()
    assert graphs == "1" and (breaks != "0") == (order == "outside")
    assert pieces == ("0.0" if order == "outside" else "0.4")
    assert list(done.state["weights"]) == list(reference.state["weights"])


@pytest.mark.parametrize("order", ["inside", "whole"])
def test_compile_is_cut_at_the_buckets(order):
    """A layer of 1.2 MiB fills a first bucket with what is behind it."""
    wider = changed(lambda model: model.extend([torch.nn.Linear(10, 30_000)]))
    options = ["--epochs=1", *TINY, f"--order={order}", "--backend=aot_eager"]
    pieces, _, breaks = re.search(
        COMPILED, topic("compile", 2, *options, before=wider).out, re.M
    ).groups()
    assert pieces == ("1.3" if order == "whole" else "0.1 + 1.3") and breaks == "0"


def test_fsdp(reference, tmp_path):
    """Half of the weights a rank; one rank resumes from two ranks' file, with 02's numbers."""
    folder = tmp_path / "run"
    done = topic("fsdp", 2, *TWO, f"--plain={tmp_path / 'plain'}", folder=folder)
    for ours, theirs in zip(done.epochs, reference.epochs, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]
    local, total = re.search(r"^measured (\S+) of (\S+) MB of weights", done.out, re.M).groups()
    assert float(local) == pytest.approx(float(total) / 2, rel=0.02)
    plain = torch.load(tmp_path / "plain", weights_only=True)
    for name, value in reference.state["weights"].items():
        torch.testing.assert_close(plain["weights"][name], value, rtol=0, atol=1e-5)

    topic("fsdp", 1, "--epochs=1", "--checkpoint=")  # and without any file
    alone = topic("fsdp", 1, "--epochs=3", folder=folder)
    whole = fork("02_torchrun.py", 2, "--epochs=3")
    (tmp_path / "00").mkdir()
    (tmp_path / "plain").rename(tmp_path / "00" / "checkpoint.pt")
    single = fork("00_single_gpu.py", 1, "--epochs=3", folder=tmp_path / "00")  # with its momentum
    assert single.epochs[0]["train_loss"] == pytest.approx(whole.epochs[-1]["train_loss"], abs=5e-5)
    assert [entry["epoch"] for entry in alone.epochs] == [1, 2, 3]
    assert alone.epochs[-1]["train_loss"] == pytest.approx(whole.epochs[-1]["train_loss"], abs=5e-5)
    bf16 = topic("fsdp", 2, "--epochs=1", "--param-dtype=bfloat16")
    assert bf16.epochs[0]["train_loss"] == pytest.approx(reference.epochs[0]["train_loss"], rel=0.1)

    for wrong, line in {
        "--seed=1": "was made with --seed 0",
        f"--checkpoint={reference.checkpoint}": "is one file, and not",  # 02's
        "--param-dtype=no": "--param-dtype: invalid choice: 'no'",
    }.items():
        refused = fork("topics/fsdp.py", 1, wrong, folder=folder)
        assert refused.codes == [2] and line in refused.err and "Traceback" not in refused.err


def test_fsdp_with_files_that_cannot_be_used(tmp_path):
    """A folder is made for --plain, where a link stays one. A half shard is said in one line."""
    (tmp_path / "link.pt").symlink_to("new/real.pt")
    options = ("--epochs=1", "--dataset=fake:96", "--image-size=8", "--timeout=30")
    plain = topic("fsdp", 2, *options, f"--plain={tmp_path}/link.pt", folder=tmp_path)
    assert (tmp_path / "link.pt").is_symlink() and not any(plain.codes)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["real.pt"]
    for shard in tmp_path.glob("*.shards/0001/*.distcp"):
        shard.write_bytes(shard.read_bytes()[:99])
    refused = fork("topics/fsdp.py", 1, *options, folder=tmp_path)
    [line] = refused.err.splitlines()
    assert refused.codes == [2] and re.search(r"cannot read \S+.shards/0001: \S+\(", line)


def test_fsdp_in_bfloat16_with_batch_norm():
    """Its weights stay in float32, or it would be refused: mixed dtypes."""
    norm = changed(lambda model: model.insert(2, torch.nn.BatchNorm2d(16)))
    done = topic("fsdp", 2, "--epochs=1", *TINY, "--param-dtype=bfloat16", before=norm)
    assert 0 < done.epochs[0]["train_loss"] < 5


def test_lightning_fsdp(reference, tmp_path):
    """The numbers of 02, and half of the states on each of two ranks."""
    options = ["--devices=2", "--checkpoint=", "--timeout=77"]
    done = topic("lightning_fsdp", 2, *TWO, *options, before=tell_timeouts)
    assert len(timeouts(done.out)) > 2 and set(timeouts(done.out)) == {"77"}
    for ours, theirs in zip(done.epochs, reference.epochs, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]
    local, total = re.search(r"^measured (\d+) of (\d+) numbers", done.out, re.M).groups()
    assert int(local) == int(total) / 2
    topic("lightning_fsdp", 2, "--epochs=1", "--devices=2", folder=tmp_path)
    assert (tmp_path / "checkpoint.pt").is_dir()


def test_lightning_fsdp_gathers_a_block_at_a_time():
    """Of a torchvision model, too: or each forward pass would gather all of its weights."""

    def tell_units():
        real = torch.distributed.fsdp.fully_shard

        def told(module, **options):
            print("sharded", type(module).__name__, flush=True)
            return real(module, **options)

        torch.distributed.fsdp.fully_shard = told

    options = ["--epochs=1", "--devices=1", "--checkpoint=", "--model=resnet18"]
    done = topic(
        "lightning_fsdp", 1, *options, "--dataset=fake:8", "--batch-size=8", before=tell_units
    )
    assert done.out.count("sharded BasicBlock") == 8
    assert done.out.rstrip().endswith("therefore a rank keeps 100% of the states")


def test_fsdp_is_killed_while_it_saves(tmp_path):
    """The folder of the epoch before is whole, and the next run resumes from it."""

    def before():
        def half(writer, plan, planner):
            (Path(writer.path) / "__1_0.distcp").write_bytes(b"half of it")
            os._exit(9)

        if os.environ["RANK"] == "1":
            dcp.FileSystemWriter.write_data = half

    whole = topic("fsdp", 2, *TWO)
    topic("fsdp", 2, "--epochs=1", folder=tmp_path)
    killed = fork("topics/fsdp.py", 2, *TWO, "--timeout=10", folder=tmp_path, before=before)
    assert killed.codes[1] == 9 and killed.codes[0] and len(killed.epochs) == 1
    again = topic("fsdp", 2, *TWO, folder=tmp_path)
    assert again.epochs[-1]["train_loss"] == whole.epochs[-1]["train_loss"]


def test_logging_metrics(reference, tmp_path):
    pytest.importorskip("tensorboard")
    done = topic("logging_metrics", 2, *TWO, f"--board={tmp_path / 'board'}")
    lines = re.findall(
        r"^rank-local (\S+) \| reduced (\S+) \| gathered \[(.*)\] \| even ranks (\S+)$",
        done.out,
        re.M,
    )
    assert len(lines) == 2
    for (local, reduced, gathered, even), other in zip(lines, reference.epochs, strict=True):
        first, second = map(float, gathered.split(", "))
        assert float(local) == float(even) == first != second
        assert float(reduced) == pytest.approx((first + second) / 2, abs=1e-4)
        assert float(reduced) == pytest.approx(other["train_loss"], abs=1e-4)
    assert len(list((tmp_path / "board").glob("events.*"))) == 1, "one run, from rank 0"


def test_a_topic_finds_common_from_any_folder_and_before_any_other(tmp_path):
    for name in ("common.py", "topics.py"):
        (tmp_path / name).write_text("raise ImportError('this is not the one')")
    for path in sorted(set(ROOT.glob("topics/[!_]*.py")) - {ROOT / "topics" / "standalone.py"}):
        [line] = [line for line in path.read_text().splitlines() if line.startswith("sys.path")]
        assert line.startswith('sys.path.insert(0, f"{os.path.dirname(__file__)}/..")'), path
    here = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}}
    done = launch(sys.executable, path := ROOT / "topics" / "fsdp.py", **here)
    assert done.returncode == 2
    assert f"Start it with: torchrun --standalone --nproc-per-node=2 {path}" in done.stderr
    done = launch(sys.executable, ROOT / "topics" / "lightning_dataset.py", "--epochs=0", **here)
    assert done.stderr == "lightning_dataset.py: --epochs must be more than 0\n"  # 04 was found


STARTED = ["02_torchrun.py", "03_multinode.py", "04_lightning.py", "topics/sync_once.py"]
STARTED += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("topics/lightning_*.py"))]


@pytest.mark.parametrize("script", STARTED)
def test_a_rank_that_fails_tells_torchrun_why(script, tmp_path):
    """Without @record torchrun would have nothing to report: error_file: <N/A>."""

    def no_optimizer():
        def fail(*args, **kwargs):
            raise ValueError("it is this one")

        torch.optim.SGD = fail

    env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    own = ["--graphs=96"] if "graph" in script else ["--dataset=fake:96", "--image-size=8"]
    options = [f"--checkpoint={tmp_path / 'x'}", *own]
    done = fork(script, 1, *options, before=no_optimizer, env=env)
    assert done.codes == [1] and "it is this one" in (tmp_path / "error.json").read_text(), done.err


# ---- planted faults that only these have seen ----------------------------------------------------

# Two steps an epoch, of 8 pixels: seconds, mostly to start.
TINY = ["--dataset=fake:96", "--image-size=8", "--batch-size=48"]


def loops_over_epochs(path):
    """Return the bodies of `for epoch in range(...)` in a script."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.For)]
    return [
        n.body for n in nodes if ast.unparse(n.target) == "epoch" and "range" in ast.dump(n.iter)
    ]


TRAINS = [path for path in pairs.scripts() if loops_over_epochs(path)]


def test_each_epoch_begins_in_train_mode():
    """Evaluation ends it: from the second epoch on dropout would be off and batch norm frozen."""
    assert len(TRAINS) > 20
    for path in TRAINS:
        for body in loops_over_epochs(path):
            places = [i for i, line in enumerate(body) if ast.unparse(line) == "model.train()"]
            loops = [i for i, line in enumerate(body) if "backward" in ast.unparse(line)]
            assert places and loops and places[0] < loops[0], path


@pytest.mark.parametrize("name", ["preemption", "dask_data", "standalone"])
def test_a_topic_for_several_nodes_takes_the_gpu_of_its_local_rank(name):
    """Rank 3 is the second process of the second node."""
    if name == "dask_data":
        pytest.importorskip("distributed")

    def show():
        def take(device=None):
            print(f"takes {device}", flush=True)
            sys.exit(0)

        common.take_device = torch.cuda.set_device = take
        torch.cuda.is_available = lambda: name == "standalone"
        del sys.argv[1:]  # standalone has other options

    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    done = fork(f"topics/{name}.py", 1, env=env, before=show)
    assert re.search(r"^takes (cuda:)?1$", done.out, re.M), done.out + done.err


def test_a_rank_without_a_batch_does_not_count_in_the_mean():
    """96 images in one batch: rank 0 has 48, rank 1 none. So it is 00 on rank 0's 48."""
    done = topic("uneven_inputs", 2, "--epochs=1", before=only(slice(96), slice(None)))
    own = list(DistributedSampler(range(96), 2, 0, seed=0))
    alone = fork(
        "00_single_gpu.py", 1, "--epochs=1", "--batch-size=48", before=only(own, slice(None))
    )
    assert alone.codes == [0] and len(own) == 48
    for weights in done.weights:
        for name, value in alone.weights[0].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
    assert done.epochs[0]["train_loss"] == pytest.approx(alone.epochs[0]["train_loss"], abs=1e-5)


def test_the_last_two_checkpoints_of_fsdp_stay(tmp_path):
    """After 3 epochs, and after 10: the tenth comes after the ninth, by name too."""
    for epochs, kept in ((3, ["0002", "0003"]), (10, ["0009", "0010"])):
        done = topic("fsdp", 1, f"--epochs={epochs}", *TINY, folder=tmp_path)
        assert sorted(path.name for path in (tmp_path / "checkpoint.pt.shards").iterdir()) == kept
    assert "resumes after epoch 3" in done.out
    end = "    dist.destroy_process_group()\n"
    show = '    print("rate", optimizer.param_groups[0]["lr"])\n'
    options = {"folder": tmp_path, "edit": lambda text: text.replace(end, show + end)}
    assert "rate 0.01\n" in topic("fsdp", 1, "--epochs=11", "--lr=0.01", *TINY, **options).out
    again = topic("fsdp", 1, "--epochs=11", *TINY, folder=tmp_path)
    assert "nothing left to do: it has 11 epochs" in again.out


def test_the_warm_up_is_not_run_again_after_a_resume(tmp_path):
    """Of a warm-up of two epochs the second begins half way, and ends with the target rate."""
    options = [*TINY, "--base-batch=24", "--lr=0.004", "--rule=linear"]
    for epochs, rate in ((1, 0.006), (2, 0.008), (3, 0.008)):
        done = topic("lr_scaling", 1, f"--epochs={epochs}", *options, folder=tmp_path)
        (group,) = done.state["optimizer"]["param_groups"]
        assert group["lr"] == pytest.approx(rate)
        reached = "rule's rate is reached" if epochs > 1 else "warm-up has not ended yet"
        assert f"therefore the {reached}\n" in done.out
    # Of the warm-up's end the last bit may be another one, and without a rule there is none.
    for options in (["--warmup-epochs=1", "--lr=0.1", "--base-batch=11"], ["--rule=none"]):
        done = topic("lr_scaling", 1, "--epochs=1", *TINY, *options)
        assert "therefore the rule's rate is reached\n" in done.out


def test_evaluation_with_batch_norm():
    """Rank 0 tests alone: through DDP it would send its buffers, and nobody receives them."""
    options = ["--epochs=1", "--timeout=10", *TINY]
    with_batch_norm = changed(lambda model: model.insert(2, torch.nn.BatchNorm2d(16)))
    done = topic("evaluation", 2, *options, before=with_batch_norm)
    lines = re.findall(r"^(padded|one rank|exact) +\d+ of (\d+)", done.out, re.M)
    assert lines == [("padded", "24"), ("one rank", "24"), ("exact", "24")]
