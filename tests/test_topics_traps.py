"""The topics about what goes wrong in silence, and about models that hardly fit."""

import re
import socket
import sys
import urllib.request

import pytest
import torch

import checks
import common
from ladder import ROOT, fork, tell_timeouts, timeouts


def topic(name, world_size, *options, **more):
    done = fork(f"topics/{name}.py", world_size, *options, **more)
    assert done.codes == [0] * world_size, done.err
    return done


WRONG = [
    ("uneven_inputs", 3, "--dataset=fake:96", "1 batches are too few for 3 ranks"),
    ("device_mesh", 3, "--tensor=3 --shard=1 --checkpoint=", "--tensor 3 does not divide the lay"),
    ("debug_server", 1, "--sleep=-1", "--sleep must be 0 or more"),
    ("lr_scaling", 1, "--warmup-epochs=-1", "--warmup-epochs must be 0 or more"),
    ("fsdp", 1, "--plain=x.pt --checkpoint=", "give both"),
    ("lightning_checkpoint", 1, "--checkpoint=", "give --checkpoint, --plain or both"),
    ("sync_batchnorm", 1, "--model=wide", "--model wide has no batch norm"),
]


def no_wait():
    checks._launcher_ended = lambda: False


@pytest.mark.parametrize(("name", "world_size", "options", "line"), WRONG)
def test_what_a_topic_cannot_do(name, world_size, options, line):
    refused = fork(f"topics/{name}.py", world_size, *options.split(), before=no_wait)
    assert refused.codes == [2] * world_size and "Traceback" not in refused.err
    [said] = set(refused.err.splitlines())  # the launcher of these forks ends no rank
    assert line in said


def test_a_checkpoint_of_other_layers(tmp_path):
    assert fork("02_torchrun.py", 1, "--epochs=1", folder=tmp_path).codes == [0]
    options = {"folder": tmp_path, "before": no_wait}
    refused = fork("topics/sync_batchnorm.py", 2, "--norm=local", **options)
    [said] = set(refused.err.splitlines())
    assert refused.codes == [2, 2] and "its model has other layers than this one" in said


@pytest.mark.parametrize("name", ["lr_scaling", "gradient_accumulation", "ddp_by_hand", "fsdp"])
def test_a_finished_run_shows_nothing_new(name, tmp_path):
    """It said of 0 steps what they had shown."""
    for _ in range(2):  # the second one's lines are behind the first one's
        said = topic(name, 2, "--epochs=1", folder=tmp_path).out
    assert said.count("\nmeasured ") == said.count("nothing left to do") == 1


def same(weights, others, tolerance=1e-5):
    return all(torch.allclose(weights[name], others[name], 0, tolerance) for name in others)


def concluded(done):
    """Return the one line that ends a topic, in its three parts."""
    (found,) = re.findall(r"measured (.*), expected (.*), therefore (.*)$", done.out, re.M)
    return found


@pytest.mark.parametrize(
    ("variant", "apart"),
    [("none", []), ("added", ["11.weight", "11.bias"]), ("replaced", ["10.weight", "10.bias"])]
    + [("unfrozen", ["10.weight", "10.bias"]), ("cast", "all"), ("method", "all"), ("grad", "all")],
)
def test_after_wrapping(variant, apart):
    """Each is silent, and the loss falls; wrapped late (or not at all that way) it is one model."""
    options = ["--checkpoint=", "--lr=0.1", f"--variant={variant}"]
    early = topic("after_wrapping", 2, "--epochs=2", *options)
    assert early.epochs[1]["train_loss"] < early.epochs[0]["train_loss"]
    text = concluded(early)[0]
    count, names = re.match(r"(\d+) of \d+ weights differ between ranks ?(.*)", text).groups()
    first, second = early.weights
    found = [name for name in first if not torch.equal(first[name], second[name])]
    assert names.split() == found and int(count) == len(found)
    assert found == (list(first) if apart == "all" else apart)
    if variant not in ("none", "method", "grad"):
        late = topic("after_wrapping", 2, "--epochs=1", *options, "--wrap=late")
        assert concluded(late)[0].startswith(f"0 of {10 if variant == 'added' else 8} ")


def test_a_replaced_layer_is_an_error_without_find_unused():
    """The header says that this option is what hides it. And it refuses what it cannot show."""
    edit = {"edit": lambda text: text.replace('=args.variant == "replaced"', "=False")}
    done = fork("topics/after_wrapping.py", 2, "--variant=replaced", "--checkpoint=", **edit)
    assert all(done.codes) and "finished reduction in the prior iteration" in done.err
    for option, line in {
        "--checkpoint=x": "leave out --checkpoint",
        "--variant=moved": "needs a GPU",
        "--model=resnet18": "--model small or wide",
    }.items():
        refused = fork("topics/after_wrapping.py", 1, "--checkpoint=", option)
        assert refused.codes == [2] and line in refused.err and "Traceback" not in refused.err


def test_mean_of_means():
    """By tokens: one training at all numbers of ranks and micro-batches. By means: others."""
    ends = {}
    for weighting in ("tokens", "means"):
        for ranks, steps in ((1, 1), (1, 4), (2, 4)):
            options = ["--epochs=1", f"--weighting={weighting}", f"--accumulation-steps={steps}"]
            done = topic("mean_of_means", ranks, *options)
            off = float(re.search(r"gradient (\S+) ", concluded(done)[0])[1])
            assert (off > 1e-2) == (weighting == "means" and (ranks, steps) != (1, 1))
            assert off > 1e-2 or off < 1e-4
            ends[weighting, ranks, steps] = done.weights[-1]
    right = ends["tokens", 1, 1]
    assert same(ends["tokens", 1, 4], right) and same(ends["tokens", 2, 4], right)
    assert same(ends["means", 1, 1], right) and not same(ends["means", 1, 4], right, 1e-4)
    assert not same(ends["means", 1, 4], ends["means", 2, 4], 1e-4)


def test_activation_checkpointing():
    """02's weights, from half of the memory. In a model of blocks batch norm counts twice."""
    done, plain = (
        topic(x, 2, "--epochs=1") for x in ("activation_checkpointing", "../02_torchrun")
    )
    assert all(same(weights, plain.state["weights"]) for weights in done.weights)
    kept = [float(x) for x in re.match(r"(\S+) to (\S+) MB kept", concluded(done)[0]).groups()]
    assert kept[1] < 0.6 * kept[0]
    tiny = ["--dataset=fake:8", "--image-size=8", "--batch-size=8", "--epochs=1"]
    weights = topic("activation_checkpointing", 1, *tiny, "--model=resnet18").state["weights"]
    stem, block = (weights[f"1.{x}bn1.num_batches_tracked"] for x in ("", "layer1.0."))
    assert block - stem == 7, "in the six passes that are measured, and in one step of training"


@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 1, 2)])
def test_device_mesh(grid):
    """Replicate x shard x tensor on four ranks: 02's losses, and as many weights as promised."""

    def before():
        tell_timeouts()
        common.seconds_since = lambda *_: 1.0  # then samples/s are the samples that were counted

    plain = topic("../02_torchrun", 2, "--epochs=1", before=before)
    options = ["--epochs=1", "--checkpoint=", f"--shard={grid[1]}", f"--tensor={grid[2]}"]
    done = topic("device_mesh", 4, *options, "--timeout=77", before=before)
    assert done.epochs[0]["samples_per_second"] == plain.epochs[0]["samples_per_second"] > 99
    assert len(timeouts(done.out)) >= 4 and set(timeouts(done.out)) == {"77"}
    assert done.epochs[0]["train_loss"] == pytest.approx(plain.epochs[0]["train_loss"], abs=5e-5)
    assert done.epochs[0]["test_accuracy"] == plain.epochs[0]["test_accuracy"]
    assert done.epochs[0]["test_samples"] == 125 and not done.err
    kept, wanted, share = (re.search(r"\d+", part)[0] for part in concluded(done))
    assert kept == wanted and int(share) == pytest.approx(28 * grid[0], abs=1)


def test_device_mesh_refuses():
    for option, line in {
        "--tensor=3": "4 ranks are no grid of --shard 2 x --tensor 3",
        "--checkpoint=x": "saves nothing: leave out --checkpoint",
        "--model=resnet18": "--model small or wide",
    }.items():
        env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        refused = fork("topics/device_mesh.py", 1, "--checkpoint=", option, env=env)
        assert refused.codes == [2] and line in refused.err and "Traceback" not in refused.err


def test_sampler_weighted():
    """Dealt: one list, so one training at one rank and two. Not dealt: all ranks draw the same."""
    for draw in ("weighted", "subset"):
        options = ["--epochs=1", f"--draw={draw}"]
        alone, both = (topic("sampler_weighted", ranks, *options) for ranks in (1, 2))
        assert same(both.weights[1], alone.weights[0])
        wrong = topic("sampler_weighted", 2, *options, "--sampler=same")
        for done, most in ((both, 5), (wrong, 100)):
            equal, few = map(int, re.findall(r"(\d+)%", concluded(done)[0]))
            wanted = int(re.findall(r"(\d+)%", concluded(done)[1])[1])
            assert (equal < 5 if most == 5 else equal == 100) and abs(few - wanted) < 8


def test_the_debug_pages_show_where_each_rank_waits():
    pytest.importorskip("tabulate")

    def count():
        ask = urllib.request.urlopen

        def told(*words, **more):
            page = ask(*words, **more)
            print("answered\n", end="", flush=True)
            return page

        urllib.request.urlopen = told

    reference = fork("02_torchrun.py", 2, "--epochs=1")
    done = topic("debug_server", 2, "--epochs=1", before=count)
    for name in ("train_loss", "test_accuracy", "test_samples"):
        assert done.epochs[0][name] == reference.epochs[0][name]
    assert done.out.count("answered") > 1  # one may be from before the hang
    shown = re.findall(r"^rank (\d) \| line (\d+): (.*) \| in (.*)$", done.out, re.M)
    assert [rank for rank, *_ in shown] == ["0", "1"]
    assert shown[0][2] == "loss.backward()" and shown[1][2:] == ("time.sleep(args.sleep)", "main")
    source = (ROOT / "topics/debug_server.py").read_text().splitlines()
    assert all(source[int(line) - 1].strip() == text for _, line, text, _ in shown)
    lines = [int(line) for _, line, *_ in shown]
    assert concluded(done)[0] == f"stacks by one request: 2, in lines {lines}"
    assert concluded(done)[2].startswith("the rank that stands elsewhere")
    port = re.search(r"server started on port (\d+)", done.err)[1]
    with pytest.raises(ConnectionRefusedError):  # it goes with the ranks
        socket.create_connection(("localhost", int(port)), timeout=10)


def test_the_debug_pages_that_do_not_answer():
    """It claims no stacks that it has not seen."""
    pytest.importorskip("tabulate")

    def no_answer():
        def refused(*_, **more):
            raise ConnectionRefusedError

        urllib.request.urlopen = refused

    done = topic("debug_server", 1, "--epochs=1", "--sleep=0", "--timeout=3", before=no_answer)
    measured, _, therefore = concluded(done)
    assert measured == "stacks by one request: 0, in lines []" and therefore == "nothing was seen"


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_debug_pages_where_nobody_sleeps(world_size):
    """No rank ends while it is asked. One rank has no other that stands elsewhere."""
    pytest.importorskip("tabulate")
    done = topic("debug_server", world_size, "--epochs=1", "--sleep=0")
    measured, _, therefore = concluded(done)
    assert measured.startswith(f"stacks by one request: {world_size}, in lines")
    assert "Traceback" not in done.err
    assert world_size > 1 or therefore == "no rank waits for another"


def test_the_debug_pages_say_what_they_need(monkeypatch):
    monkeypatch.setitem(sys.modules, "tabulate", None)
    refused = fork("topics/debug_server.py", 1)
    assert refused.codes == [2] and "pip install tabulate" in refused.err
    assert "Traceback" not in refused.err
