"""What every rung does beside the numbers: resume, odd data sets, wrong uses, its own launcher."""

import ast
import errno
import functools
import gzip
import http.server
import json
import math
import os
import re
import resource
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_contract import LOSS, assert_same, assert_weights, run, swap

import checks
import common
from ladder import PARALLEL, ROOT, RUNGS, TORCHRUN, changed, fork, launch, of_the_day, only

WORLD_SIZE = 2
PLAIN = [name for name in RUNGS if not name.startswith("04")]  # 04's file is Lightning's own
BY_TORCHRUN = ["02_torchrun.py", "03_multinode.py", "04_lightning.py"]


# ---- checkpoints ---------------------------------------------------------------------------------


def size(rung: str) -> int:
    return WORLD_SIZE if rung in PARALLEL else 1


def saved_weights(state: dict) -> dict:
    """Return the weights of a checkpoint file, of Lightning's too."""
    lightning = state.get("state_dict", {})
    return state.get("weights") or {k.removeprefix("model."): v for k, v in lightning.items()}


def saved_lr(state: dict) -> float:
    optimizer = state.get("optimizer") or state["optimizer_states"][0]
    return optimizer["param_groups"][0]["lr"]


def complaints(result) -> set[str]:
    """Return the different lines on stderr, without those of mp.spawn and Lightning's hints."""
    noise = ("HINT", "Terminating process")
    return {line for line in result.err.splitlines() if not any(word in line for word in noise)}


def all_speak_at_once():
    """Rank 1 does not give rank 0 its 10 s: each rank says its line and takes its exit code."""
    checks.time.sleep = lambda seconds: None


def test_checkpoints_are_off_by_default(tmp_path):
    assert not launch(sys.executable, ROOT / RUNGS[0], "--epochs=1", cwd=tmp_path).returncode
    assert not list(tmp_path.iterdir())
    for rung in RUNGS:
        result = fork(rung, 1, "--epochs=1", "--checkpoint=", folder=tmp_path)
        assert not any(result.codes), result.err
        assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize("rung", RUNGS)
def test_3_and_3_epochs_are_6(rung, tmp_path):
    fork(rung, size(rung), "--epochs=3", folder=tmp_path)
    resumed = fork(rung, size(rung), "--epochs=6", folder=tmp_path)
    whole = run(rung, size(rung), "--epochs=6")
    assert resumed.out.count("checkpoint.pt: resumes after epoch 3") == 1
    assert [entry["epoch"] for entry in resumed.epochs] == [1, 2, 3, 4, 5, 6]  # each once
    for one, other in zip(resumed.epochs, whole.epochs, strict=True):
        assert one["train_loss"] == other["train_loss"]
    assert_weights(saved_weights(resumed.state), saved_weights(whole.state), 0)


def dropout_added(model):
    return model.insert(len(model) - 1, torch.nn.Dropout(0.3))


@pytest.mark.parametrize("rung", PLAIN)
def test_a_resumed_run_draws_the_random_numbers_of_a_whole_one(rung, tmp_path):
    options = {"folder": tmp_path, "before": changed(dropout_added)}
    fork(rung, size(rung), "--epochs=1", **options)
    resumed = fork(rung, size(rung), "--epochs=2", **options)
    whole = fork(rung, size(rung), "--epochs=2", before=changed(dropout_added))
    assert not any(resumed.codes + whole.codes), resumed.err + whole.err
    assert_weights(resumed.state["weights"], whole.state["weights"], 0)


@functools.cache
def two_epochs(rung: str):
    return run(rung, size(rung), "--epochs=2")


@pytest.mark.parametrize("reader", PLAIN)
@pytest.mark.parametrize("writer", PLAIN)
def test_any_rung_resumes_from_any_checkpoint(writer, reader, tmp_path):
    shutil.copy(two_epochs(writer).checkpoint, tmp_path / "checkpoint.pt")
    result = fork(reader, size(reader), "--epochs=3", folder=tmp_path)
    assert not any(result.codes), result.err
    [entry] = result.epochs
    third = run("00_single_gpu.py", 1, "--seed=0").epochs[2]
    assert entry["epoch"] == 3
    assert abs(entry["train_loss"] - third["train_loss"]) < LOSS
    assert entry["test_accuracy"] == third["test_accuracy"]
    assert not [key for key in result.state["weights"] if "module." in key or "_orig_mod" in key]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_resumed_run_takes_its_lr_from_the_command_line(rung, tmp_path):
    shutil.copy(two_epochs(rung).checkpoint, tmp_path / "checkpoint.pt")
    result = fork(rung, size(rung), "--epochs=3", "--lr=0.01", folder=tmp_path)
    assert not any(result.codes), result.err
    assert (saved_lr(two_epochs(rung).state), saved_lr(result.state)) == (0.05, 0.01)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_finished_run_does_nothing_and_is_left_alone(rung, tmp_path):
    def no_forward():
        def forward(*args):
            raise AssertionError("it computes")

        common.BytesToFloats.forward = forward

    file = tmp_path / "checkpoint.pt"
    shutil.copy(two_epochs(rung).checkpoint, file)
    before = file.read_bytes(), file.stat().st_mtime_ns
    result = fork(rung, size(rung), "--epochs=2", folder=tmp_path, before=no_forward)
    assert not any(result.codes) and not result.epochs, result.err
    assert result.out.count("nothing left to do: it has 2 epochs. For more raise --epochs") == 1
    assert "test accuracy" not in result.out
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def assert_file_refused(result, rung: str, text: str) -> None:
    """One line. In 03 rank 0 alone reads: the broadcast of the others ends when it has ended."""
    if rung.startswith("03"):
        [line] = [line for line in result.err.splitlines() if line.startswith(rung)]
        assert text in line and result.codes[0] == 2 and all(result.codes) and not result.epochs
    else:
        assert set(result.codes) == ({1} if rung.startswith("01") else {2}), result.err
        assert_one_line(result, text)


def stale_handle():
    def load(*args, **options):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    torch.load = load


UNREADABLE = {
    "half": "cannot read",
    "empty": "cannot read",
    "Namespace": "it holds a argparse.Namespace, and weights_only=True takes plain data",
    "plain weights": "is not a checkpoint of",
    "text": "cannot read",
    "read error": "Stale file handle",
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_file_that_cannot_be_read_stops_the_run_and_stays(rung, kind, tmp_path):
    good, file = two_epochs(rung), tmp_path / "checkpoint.pt"
    file.write_bytes(good.checkpoint.read_bytes())
    if kind == "half":
        os.truncate(file, file.stat().st_size // 2)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "text":
        file.write_text("a note\n")
    elif kind == "Namespace":
        torch.save(good.state | {"args": Namespace(lr=0.1)}, file)
    elif kind == "plain weights":
        torch.save(good.weights[0], file)
    before = file.read_bytes()

    def hook():
        no_waiting()
        if kind == "read error":
            stale_handle()

    result = fork(rung, size(rung), "--epochs=3", folder=tmp_path, before=hook)
    assert_file_refused(result, rung, UNREADABLE[kind])
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint.pt"]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_link_to_a_checkpoint_stays_a_link(rung, tmp_path):
    """As from a home to a larger disk. The temporary is on the disk of the file itself."""
    here, there = tmp_path / "home", tmp_path / "scratch"
    here.mkdir()
    there.mkdir()
    shutil.copy(two_epochs(rung).checkpoint, there / "real.pt")
    (here / "checkpoint.pt").symlink_to("../scratch/real.pt")
    result = fork(rung, size(rung), "--epochs=3", folder=here)
    assert not any(result.codes), result.err
    assert (here / "checkpoint.pt").is_symlink()
    assert [path.name for path in there.iterdir()] == ["real.pt"]
    state = torch.load(there / "real.pt", weights_only=True)
    assert state.get("epochs", state.get("epoch", 0) + 1) == 3


@pytest.mark.parametrize("rung", PLAIN)
def test_what_a_kill_left_is_written_over(rung, tmp_path):
    (tmp_path / "checkpoint.pt.tmp").write_bytes(b"half a file")
    result = fork(rung, size(rung), "--epochs=2", folder=tmp_path)
    assert not any(result.codes), result.err
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint.pt"]


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    fsync, replace, calls = os.fsync, os.replace, []

    def synced(number):
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{number}")))
        assert torch.load(calls[-1][1], weights_only=True)["epochs"] == 4  # all of it is written
        fsync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: calls.append((str(a), str(b))) or replace(a, b))
    file = str(tmp_path.resolve() / "x.pt")
    args = Namespace(checkpoint=file, **dict.fromkeys(checks.RESUME_KEYS, 1))
    model = torch.nn.Linear(2, 2)
    common.save_checkpoint(args, 4, model, torch.optim.SGD(model.parameters()))
    assert calls == [("fsync", f"{file}.tmp"), (f"{file}.tmp", file)]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_loss_that_is_not_finite_ends_all_ranks_and_spares_the_checkpoint(rung, tmp_path):
    good = two_epochs(rung)
    shutil.copy(good.checkpoint, tmp_path / "checkpoint.pt")
    options = ("--epochs=5", "--lr=1e6")
    result = fork(rung, size(rung), *options, folder=tmp_path, before=all_speak_at_once)
    assert set(result.codes) == {1}, result.err
    [line] = complaints(result)
    assert re.search(
        r"train loss (nan|inf) in epoch [345]; \S+/checkpoint.pt stays as it was", line
    )
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert all(weights.isfinite().all() for weights in saved_weights(state).values())
    assert "NaN" not in (tmp_path / "log.json").read_text() if result.epochs else True
    if "epoch 3;" in line:
        assert (tmp_path / "checkpoint.pt").read_bytes() == good.checkpoint.read_bytes()


@pytest.mark.parametrize("rung", [*RUNGS, "topics/fsdp.py"])
def test_weights_that_are_not_finite_are_not_saved(rung, tmp_path):
    """The last step of an epoch may spoil them: its loss is that of the step before."""

    def spoil():
        models, build_model, seconds_since = [], common.build_model, common.seconds_since

        def spoiled(*args):  # after the last step
            for model in models:
                torch.nn.init.constant_(next(model.parameters()), torch.nan)
            return seconds_since(*args)

        common.build_model = lambda args: models.append(build_model(args)) or models[-1]
        common.seconds_since = spoiled

    result = fork(rung, size(rung), "--epochs=1", folder=tmp_path, before=spoil)
    assert 1 in result.codes, result.err
    [line] = [line for line in complaints(result) if line.startswith(Path(rung).name)]
    assert "is not finite after epoch 1: nothing was saved" in line
    assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize("option", ["--lr=0.2", "--seed=1", "--epochs=2", "--batch-size=48"])
@pytest.mark.parametrize("rung", BY_TORCHRUN)
def test_ranks_with_other_options_are_refused(rung, option):
    options = {"rank_argv": {1: [option]}, "before": all_speak_at_once}
    result = fork(rung, 2, "--epochs=1", **options)
    assert result.codes == [2, 2] and not result.epochs, result.err
    [line] = complaints(result)
    name, value = option.split("=")
    assert re.search(rf"rank 0 has {name} \S+, rank 1 has {value}: make them equal$", line)


def no_room(name, room):
    """Return what ranks do first: once common.NAME is called, no file may grow over room bytes."""

    def before():
        function = getattr(common, name)

        def limited(*args):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            function(*args)

        setattr(common, name, limited)

    return before


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("rung", PLAIN)
def test_a_full_disk_is_said_in_one_line_and_leaves_the_checkpoint_whole(rung, epochs, tmp_path):
    if epochs == 3:
        shutil.copy(two_epochs(rung).checkpoint, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    fill = no_room("save_checkpoint", 50_000)
    result = fork(rung, size(rung), f"--epochs={epochs}", folder=tmp_path, before=fill)
    assert result.codes == [1] if rung.startswith("01") else 2 in result.codes, result.err
    lines = [line for line in result.err.splitlines() if line.startswith(rung)]
    assert len(lines) == 1 and "tmp: File too large. Make room" in lines[0], result.err
    assert "torch.save" not in result.err, result.err
    assert {path: path.read_bytes() for path in tmp_path.glob("checkpoint*")} == before


@pytest.mark.parametrize("rung", RUNGS)
def test_a_full_disk_at_the_log_is_said_in_one_line_and_leaves_no_half_line(rung, tmp_path):
    log = tmp_path / "log.json"
    before = json.dumps({"epoch": 0, "rest": "x" * 4000}) + "\n"
    log.write_text(before)

    fill = no_room("log_epoch", len(before) + 100)  # for the first part of a line
    options = ("--epochs=1", "--checkpoint=")
    world_size = WORLD_SIZE if rung in PARALLEL else 1
    result = fork(rung, world_size, *options, folder=tmp_path, before=fill)
    assert result.codes == [1] if rung.startswith("01") else 2 in result.codes, result.err
    [line] = [line for line in result.err.splitlines() if line.startswith(rung)]
    assert line.endswith("log.json: File too large. Make room, or use another --log-json")
    assert log.read_text() == before


def test_data_that_have_no_place_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")  # as in a read-only clone: no mkdir
    args = Namespace(dataset="MNIST", data_dir=tmp_path / "file" / "none")
    with pytest.raises(SystemExit) as end:
        common.load_datasets(args)
    assert end.value.code == 2 and "cannot download MNIST" in capsys.readouterr().err


def test_a_checkpoint_is_loaded_to_the_cpu(tmp_path):
    """Or GPU 0 would hold a copy of it for every rank."""
    shutil.copy(two_epochs("00_single_gpu.py").checkpoint, tmp_path / "checkpoint.pt")

    def watch():
        load = torch.load

        def checked(*args, map_location, weights_only):
            assert (map_location, weights_only) == ("cpu", True)
            return load(*args, map_location=map_location, weights_only=weights_only)

        torch.load = checked

    for rung in PLAIN:
        result = fork(rung, 1, "--epochs=2", folder=tmp_path, before=watch)
        assert not any(result.codes), result.err


@pytest.mark.parametrize("rung", PARALLEL)
def test_only_rank_0_writes(rung, tmp_path):
    def watch():
        save = torch.save

        def checked(*args):
            if "weights." not in str(args[1]):  # what the test itself keeps
                print(f"SAVED BY {checks.rank()}", flush=True)
            return save(*args)

        torch.save = checked

    result = fork(rung, WORLD_SIZE, "--epochs=2", folder=tmp_path, before=watch)
    assert result.out.count("SAVED BY 0") >= 2
    assert "SAVED BY 1" not in result.out
    assert result.out.count("epoch 1/2") == 1
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint.pt"]


# ---- data ----------------------------------------------------------------------------------------


SIZES = [(97, 1), (100, 2), (101, 3), (96, 4), (131, 22)]


# Lightning skips validation where a rank has no test sample: 04 refuses such a set in one line.
@pytest.mark.parametrize(
    ("rung", "train", "test"),
    [(rung, *sizes) for rung in PARALLEL for sizes in SIZES if sizes[1] > 2 or "04" not in rung],
)
def test_every_test_sample_counts_once(rung, train, test):
    """Sets that do not divide by three ranks, and ranks without any test sample."""
    before = only(slice(train), slice(test))
    options = ("--epochs=1", "--batch-size=12")
    result = fork(rung, 3, *options, before=before)
    assert not any(result.codes), result.err
    assert result.epochs[0]["test_samples"] == test
    assert_same(result, fork("00_single_gpu.py", 1, *options, before=before))


def test_samples_are_shuffled_anew_each_epoch():
    """The order of 00 and that of DistributedSampler are the same, and another one each epoch."""
    dataset = range(10)
    orders = []
    for epoch in range(3):
        sampler = torch.utils.data.RandomSampler(dataset, generator=torch.Generator())
        sampler.generator.manual_seed(5 + epoch)
        order = list(sampler)
        shares = []
        for rank in range(2):
            share = torch.utils.data.DistributedSampler(dataset, 2, rank, seed=5, drop_last=True)
            share.set_epoch(epoch)
            shares.append(list(share))
        assert [x for pair in zip(*shares, strict=True) for x in pair] == order
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


class Mirror(http.server.BaseHTTPRequestHandler):
    """A small MNIST, served to torchvision's own download code."""

    requests: Counter = Counter()

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        Mirror.requests[name] += 1
        count = 600 if name.startswith("train") else 100
        if "images" in name:
            body = struct.pack(">IIII", 2051, count, 28, 28) + bytes(range(256)) * (
                count * 784 // 256
            )
            body += bytes(16 + count * 784 - len(body))
        else:
            body = struct.pack(">II", 2049, count) + bytes(i % 10 for i in range(count))
        body = gzip.compress(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(monkeypatch):
    """Let torchvision find its MNIST on this machine; return the names of the files."""
    import torchvision

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    mnist = torchvision.datasets.MNIST
    names = [name for name, _ in mnist.resources]
    monkeypatch.setattr(mnist, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    monkeypatch.setattr(mnist, "resources", [(name, None) for name in names])
    yield names
    server.shutdown()


@pytest.mark.parametrize("rung", PARALLEL)
def test_a_data_set_is_downloaded_once(rung, tmp_path, mirror):
    """All ranks start at once, none finds half a file, and no file is fetched twice."""
    seen = {}
    for name, world_size in (("00_single_gpu.py", 1), (rung, 3), (rung, 3)):
        # the second run of the rung finds everything there
        options = ("--dataset=MNIST", f"--data-dir={tmp_path / name}", "--epochs=1")
        Mirror.requests.clear()
        result = fork(name, world_size, *options, "--checkpoint=")
        assert not any(result.codes), result.err
        assert result.epochs[0]["test_samples"] == 100
        seen.setdefault(name, []).append(dict(Mirror.requests))
    assert list(seen["00_single_gpu.py"][0]) == mirror
    assert seen[rung] == [seen["00_single_gpu.py"][0], {}]


def test_data_that_are_there_are_read_without_a_lock(tmp_path, mirror):
    """The folder may be somebody else's, where this user may read and not write."""

    def no_lock():
        import filelock

        def refuse(*args, **options):
            raise PermissionError("the lock is in a folder of another user")

        filelock.FileLock = refuse

    options = ("--dataset=MNIST", "--data-dir=data", "--epochs=1", "--checkpoint=", "--log-json=")
    refused = fork("00_single_gpu.py", 1, *options, folder=tmp_path, before=no_lock)
    assert refused.codes == [2] and "cannot download MNIST" in refused.err  # not there yet
    assert fork("00_single_gpu.py", 1, *options, folder=tmp_path).codes == [0]
    result = fork("02_torchrun.py", 2, *options, folder=tmp_path, before=no_lock)
    assert result.codes == [0, 0], result.err
    assert "epoch 1/1" in result.out


def test_a_training_set_without_a_full_batch_is_refused_on_all_ranks(tmp_path):
    def hook():
        only(slice(50), slice(10))()
        all_speak_at_once()

    for rung in RUNGS:
        result = fork(rung, size(rung), "--epochs=1", folder=tmp_path / rung, before=hook)
        assert set(result.codes) == ({1} if rung.startswith("01") else {2}), result.err
        [line] = complaints(result)
        assert "no full batch of 96 in the training set" in line
        assert not result.checkpoint.exists() and not result.epochs


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root on Linux")
def test_without_a_network():
    """The embedded data need none; for the others one line says where to run what."""
    offline = ["unshare", "-n", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    result = launch(*offline, sys.executable, "00_single_gpu.py", *SHORT)
    assert result.returncode == 0, result.stderr
    command = [*offline, *TORCHRUN, "--standalone", "--nproc-per-node=2", "02_torchrun.py", *SHORT]
    result = launch(*command, "--dataset=FashionMNIST", env={"TORCHELASTIC_LOG_LEVEL": "ERROR"})
    assert result.returncode != 0
    advice = "Where there is a network, run: python data/datasets.py FashionMNIST"
    assert result.stderr.count(advice) == 1


def test_fake_images_of_any_size_and_torchvision_models():
    options = ("--dataset=fake:64", "--image-size=40", "--batch-size=32", "--epochs=1")
    for model in ("small", "mobilenet_v3_small"):
        result = fork("02_torchrun.py", WORLD_SIZE, *options, f"--model={model}")
        assert not any(result.codes), result.err
        assert result.epochs[0]["test_samples"] == 16
    sizes = Namespace(dataset="fake:64", train_size=64, image_size=40)
    images = common.load_datasets(sizes)[0].tensors[0]
    assert images.dtype == torch.uint8
    assert images.shape == (64, 3, 40, 40)


def test_workers():
    result = fork("02_torchrun.py", WORLD_SIZE, "--num-workers=1", "--epochs=1")
    assert_same(result, run("00_single_gpu.py", 1, "--epochs=1"))


# ---- wrong uses: one line, exit code 2, nothing left behind

WRONG = {
    "batch does not divide": (["--batch-size=97"], "use 96 or 98"),
    "batch smaller than world": (["--batch-size=1"], "use 2"),
    "batch larger than data": (["--batch-size=5000"], "more than the 4000 training images"),
    "no epochs": (["--epochs=0"], "--epochs must be more than 0"),
    "no rate": (["--lr=0"], "--lr must be more than 0"),
    "not a number": (["--lr=fast"], "invalid float value"),
    "no workers": (["--num-workers=-1"], "--num-workers must be 0 or more"),
    "no timeout": (["--timeout=0"], "argument --timeout: must be more than 0"),
    "unknown option": (["--epoch-count=3"], "unrecognized arguments"),
    "unknown data": (["--dataset=imagenet"], "no --dataset imagenet: use digits, MNIST"),
    "unknown model": (["--model=resnet51"], "--model resnet51"),
    "model and size": (["--model=vit_b_16", "--image-size=30"], "--image-size 30 does not work"),
    "checkpoint is a folder": (["--checkpoint=."], "cannot use .:"),
    "log in no folder": (["--log-json=/dev/null/log"], "cannot use /dev/null/log"),
}


def assert_one_line(result, text: str) -> None:
    assert all(result.codes), result.out
    noise = ("HINT", "Terminating process")  # of Lightning and of mp.spawn
    lines = [line for line in result.err.splitlines() if not any(word in line for word in noise)]
    assert len(lines) == 1, result.err  # of all ranks together
    assert text in lines[0], result.err
    assert not result.epochs


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("rung", PARALLEL)
def test_wrong_options(rung, wrong):
    options, text = WRONG[wrong]
    assert_one_line(fork(rung, 2, *options, before=no_waiting), text)


def no_waiting():
    """Rank 1 gives rank 0 its 10 s, and speaks where no launcher has ended it: here it does not.

    It only waits for rank 0's line, because with 01 its end is the end of all.
    """
    sleep = time.sleep

    def until_rank_0_has_spoken(seconds):
        deadline = time.monotonic() + seconds
        while not any(file.stat().st_size for file in Path().glob("stderr.*")):
            if time.monotonic() > deadline:
                break
            sleep(0.01)
        os._exit(2)

    checks.time.sleep = until_rank_0_has_spoken


@pytest.mark.parametrize("rung", RUNGS[:3])
def test_torchrun_is_refused_where_it_makes_no_sense(rung, tmp_path):
    """00 would train twice over, and 01 hang: each of its ranks would start ranks."""
    done = fork(rung, 1, env={"TORCHELASTIC_RUN_ID": "test"}, folder=tmp_path)
    assert done.codes == [2] and done.out == "" and not done.checkpoint.exists()
    line = f"{rung}: is not for torchrun: start it with python, or use 02_torchrun.py\n"
    assert done.err == line


@pytest.mark.parametrize("rung", RUNGS)
def test_a_checkpoint_of_another_run_is_refused(rung, tmp_path):
    world_size = WORLD_SIZE if rung in PARALLEL else 1
    other = two_epochs(rung).checkpoint
    for options, text in (
        (["--model=resnet18"], "was made with --model small"),
        (["--batch-size=48"], "was made with --batch-size 96"),
        (["--seed=1"], "was made with --seed 0"),
        (["--dataset=fake:96", "--image-size=28"], "was made with --dataset digits"),
    ):
        folder = tmp_path / text.replace(" ", "")
        folder.mkdir()
        shutil.copy(other, folder / "checkpoint.pt")
        result = fork(rung, world_size, "--epochs=5", *options, folder=folder, before=no_waiting)
        assert_file_refused(result, rung, text)


def test_number_of_processes():
    result = fork("01_single_node_multi_gpu.py", 0)
    assert_one_line(result, "--nproc must be more than 0")
    for name in ("devices", "num-nodes"):
        result = fork("04_lightning.py", 1, f"--{name}=0")
        assert_one_line(result, f"--{name} must be more than 0")

    def two_gpus():
        common.gpu_count = lambda: 2
        no_waiting()

    for rung in PARALLEL:
        assert_one_line(fork(rung, 3, before=two_gpus), "3 processes for 2 GPUs: start 2")


@pytest.mark.parametrize("rung", ["02_torchrun.py", "03_multinode.py"])
def test_plain_python_prints_the_torchrun_command(rung, tmp_path):
    """With the user's options, to be copied as it is: the path and the options may need quotes."""
    script = tmp_path / "a b" / rung
    script.parent.mkdir()
    shutil.copy(ROOT / rung, script)
    options = ["--epochs=1", "--lr", "0.2", f"--log-json={tmp_path}/my log"]
    env = {"PYTHONPATH": str(ROOT), "RANK": ""}  # an empty variable is as good as none
    result = launch(sys.executable, script, *options, env=env)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    command = shlex.split(result.stderr.split("Start it with: ")[1])
    assert command[0] == "torchrun" and command[-5:] == [str(script), *options]
    result = launch(*TORCHRUN, *command[1:], env={"PYTHONPATH": str(ROOT)})  # and it works
    assert result.returncode == 0, result.stderr
    assert "epoch 1/1" in result.stdout and "lr 0.2" in result.stdout
    assert (tmp_path / "my log").exists()


def test_02_on_two_nodes_names_03():
    env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    result = fork("02_torchrun.py", 2, env=env, before=no_waiting)
    assert_one_line(result, "use 03_multinode.py")


@pytest.mark.parametrize("rung", RUNGS)
def test_nothing_happens_on_import(rung):
    """Spawned processes import the file again, on Windows and macOS those of a DataLoader too."""
    runpy.run_path(str(ROOT / rung), run_name="imported")


def test_windows_has_no_libuv(monkeypatch):
    """There the spawned ranks must not ask for it; without it a run is as ever."""
    monkeypatch.setenv("USE_LIBUV", "unset")
    monkeypatch.delenv("USE_LIBUV")
    monkeypatch.setattr(sys, "platform", "win32")
    runpy.run_path(str(ROOT / "checks.py"), run_name="checks")
    assert os.environ["USE_LIBUV"] == "0"
    monkeypatch.undo()
    done = fork("01_single_node_multi_gpu.py", 2, "--epochs=1", env={"USE_LIBUV": "0"})
    assert done.codes == [0] and len(done.epochs) == 1


@pytest.mark.parametrize("rung", PARALLEL)
def test_no_collective_under_a_rank_test(rung):
    """What only one rank calls, the others never answer."""
    collectives = {"all_reduce", "broadcast_object_list", "from_rank_0", "barrier", "reduce", "DDP"}
    collectives |= {"same_on_all_ranks", "loss_is_finite"}
    for node in ast.walk(ast.parse((ROOT / rung).read_text())):
        if isinstance(node, ast.If) and "rank" in ast.unparse(node.test):
            calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
            names = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
            assert not names & collectives


# ---- devices, without having them


@pytest.mark.parametrize(
    ("kind", "count", "local_rank", "torchrun", "device"),
    [
        (None, 0, None, False, "cpu"),
        (None, 0, 1, False, "cpu"),
        ("cuda", 4, None, False, "cuda:0"),
        ("cuda", 4, 3, True, "cuda:3"),
        ("cuda", 4, 3, False, "cuda:3"),
        ("cuda", 1, 3, False, "cuda:0"),  # srun has given each task its own GPU
        ("mps", 1, None, False, "mps:0"),
        ("mps", 1, 1, True, "cpu"),  # no collectives on mps
    ],
)
def test_take_device(monkeypatch, kind, count, local_rank, torchrun, device):
    accelerator = torch.device(kind) if kind else None
    chosen = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: accelerator
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    if not torchrun:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert str(common.take_device(local_rank)) == device
    assert chosen == ([] if device == "cpu" else [int(device[-1])])


def test_03_takes_the_gpu_of_its_local_rank(tmp_path):
    """Rank 3 is the second process of the second node."""

    def show():
        def take_device(number=None):
            print(f"takes {number}", flush=True)
            sys.exit(0)

        common.take_device = take_device

    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert "takes 1\n" in fork("03_multinode.py", 1, env=env, before=show).out


@pytest.mark.parametrize("rung", [name for name in PARALLEL if name in PLAIN])
def test_each_rank_says_what_it_has(rung):
    out = run(rung, 3, "--seed=0").out
    where = r"\| local rank {} on \S+ \| cpu" if rung.startswith("03") else r"\| cpu"
    for rank in range(3):
        line = rf"^rank {rank} of 3 {where.format(rank)} \| 160 samples$"
        assert len(re.findall(line, out, re.MULTILINE)) == 1, out
    assert len(re.findall(r"^rank ", out, re.MULTILINE)) == 3


@pytest.mark.parametrize(("device", "workers"), [("cpu", 0), ("cuda", 2)])
def test_loader_options(device, workers):
    assert common.loader_options(Namespace(num_workers=workers), torch.device(device)) == {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "pin_memory": device == "cuda",
        "worker_init_fn": checks.ignore_signals,
    }


def test_the_clock_waits_for_the_device(monkeypatch):
    """A GPU computes on while Python goes on."""
    device, waited = torch.device("cuda", 3), []

    def module(of):
        assert of == device
        return Namespace(synchronize=lambda: waited.append(time.sleep(0.05)))

    monkeypatch.setattr(torch, "get_device_module", module)
    assert common.seconds_since(time.perf_counter(), device) >= 0.05
    assert len(waited) == 1


@pytest.mark.parametrize("rung", RUNGS)
def test_it_trains_with_gradients_and_evaluates_without(rung):
    """In train mode wherever gradients are kept, and in no other place."""

    def watch():
        forward = common.BytesToFloats.forward

        def checked(self, images):
            assert self.training == torch.is_grad_enabled()
            print("TRAINS" if self.training else "TESTS", flush=True)
            return forward(self, images)

        common.BytesToFloats.forward = checked

    result = fork(rung, size(rung), "--epochs=2", before=watch)
    assert not any(result.codes), result.err
    assert result.out.count("TRAINS") == 2 * 5 * size(rung)  # 5 batches of 96
    assert result.out.count("TESTS") == 2 * math.ceil(125 / 96) * size(rung)


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("rung", BY_TORCHRUN[:2])
def test_a_checkpoint_that_one_rank_has(rung, owner, tmp_path):
    """In 02 all ranks read it, in 03 rank 0 alone, for all; but no rank's is ignored."""
    shutil.copy(two_epochs(rung).checkpoint, tmp_path / "checkpoint.pt")
    options = {"rank_argv": {1 - owner: ["--checkpoint=none.pt"]}, "before": all_speak_at_once}
    if alone := (rung, owner) == ("03_multinode.py", 0):
        (tmp_path / "none.pt").write_text("nobody reads the file of rank 1")
    result = fork(rung, 2, "--epochs=3", folder=tmp_path, **options)
    if alone:
        assert result.codes == [0, 0] and result.epochs[0]["epoch"] == 3, result.err
        (tmp_path / "02").mkdir()
        shutil.copy(two_epochs(rung).checkpoint, tmp_path / "02" / "checkpoint.pt")
        all_read = fork("02_torchrun.py", 2, "--epochs=3", folder=tmp_path / "02")
        assert_weights(result.state["weights"], all_read.state["weights"], 0)
        return
    assert result.codes == [2, 2] and not result.epochs, result.err
    behind = f"rank 0 has epochs behind it {2 - 2 * owner}, rank 1 has {2 * owner}: make them equal"
    there = "is there for rank 1, but not for rank 0: copy it to rank 0's machine"
    text = behind if rung.startswith("02") else there
    assert complaints(result) and all(text in line for line in complaints(result)), result.err


def test_what_an_epoch_prints_and_logs(tmp_path, capsys):
    """Of sums over all ranks: 6 of loss in 4 samples, 3 of 5 right, in 8 seconds."""
    args = Namespace(epochs=7, log_json=str(tmp_path / "log"))
    common.log_epoch(args, 2, torch.tensor([6.0, 4, 3, 5]), 8.0)
    line = "epoch 3/7 | train loss 1.5000 | test accuracy 60.0% | 0 samples/s\n"  # 0.5, rounded
    assert capsys.readouterr().out == line
    entry = json.loads((tmp_path / "log").read_text())
    expected = {"epoch": 3, "train_loss": 1.5, "test_samples": 5, "samples_per_second": 0.5}
    assert entry["test_accuracy"] == pytest.approx(0.6)
    assert {name: entry[name] for name in expected} == expected


def test_the_random_state_of_a_gpu_is_saved_and_restored(tmp_path, monkeypatch):
    """Dropout on a GPU draws from it. Here it is made up."""
    state, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    names = dict.fromkeys(checks.RESUME_KEYS, 1)
    args = Namespace(checkpoint=str(tmp_path / "x.pt"), lr=0.1, epochs=5, **names)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    common.save_checkpoint(args, 4, model, optimizer)
    assert common.resume(common.read_checkpoint(args), args, model, optimizer) == 4
    assert len(restored) == 1 and torch.equal(restored[0], state)


def test_every_wait_for_other_ranks_has_a_timeout():
    """A rank that never comes is an error within a stated time, in rungs and topics."""
    groups = []
    for path in [*ROOT.glob("[0-9]*.py"), *ROOT.glob("topics/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "attr", "")
            if name in ("init_process_group", "new_group"):
                assert "timeout" in {word.arg for word in node.keywords}, path
                groups.append(path)
    assert len(groups) > 20


# ---- the real launchers --------------------------------------------------------------------------


def check(result: subprocess.CompletedProcess, epochs: int = 2) -> None:
    assert result.returncode == 0, result.stderr
    assert "destroy_process_group" not in result.stderr
    expected = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs[epochs - 1]["train_loss"]
    lines = [line for line in result.stdout.splitlines() if line.startswith("epoch")]
    assert len(lines) == epochs  # each line once, whatever the number of ranks
    assert f"epoch {epochs}/{epochs} | train loss {expected:.4f} | test accuracy" in lines[-1]


SHORT = ["--epochs=2", "--checkpoint="]


def test_start_00_and_00b():
    for rung in ("00_single_gpu.py", "00b_data_parallel.py"):
        result = launch(sys.executable, rung, *SHORT)
        check(result)
        assert "inactive" in result.stdout or rung.startswith("00_")


@pytest.mark.cold
def test_start_two_of_01_at_once():
    command = [sys.executable, "01_single_node_multi_gpu.py", f"--nproc={WORLD_SIZE}"]
    command += [*SHORT, "--epochs=1"]
    results = []
    threads = [threading.Thread(target=lambda: results.append(launch(*command))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for result in results:
        check(result, epochs=1)


# Says how many threads of Gloo live when Python ends: each may abort the process (exit code -6).
# One write, since three processes share the pipe: print() may write its parts one by one.
COUNT = """
import atexit, glob, os
atexit.register(lambda: os.write(1, b"gloo threads: %d\\n" % sum("gloo" in open(name).read()
                                 for name in glob.glob("/proc/self/task/*/comm"))))
"""


@pytest.mark.cold
@pytest.mark.parametrize(
    "script", of_the_day(["02_torchrun.py", "03_multinode.py", "topics/standalone.py"], 1)
)
def test_start_of_a_module(script, tmp_path):
    """The old launcher adds an argument --local-rank=N, which 02 takes and does not need."""
    (tmp_path / "sitecustomize.py").write_text(COUNT)
    module = "torch.distributed.launch" if script.startswith("02") else "torch.distributed.run"
    command = [sys.executable, "-m", module, f"--nproc-per-node={WORLD_SIZE}"]
    command += [f"--master-port={checks.free_port()}", script, "--epochs=2"]
    result = launch(*command, env={"PYTHONPATH": str(tmp_path)})
    if "/" not in script:
        check(result)
    assert result.returncode == 0, result.stderr
    ended = re.findall(r"gloo threads: (\d+)", result.stdout)
    assert ended == ["0"] * (WORLD_SIZE + 1), result.stdout  # its ranks, and torchrun itself


def test_start_03_on_two_nodes_with_one_checkpoint(tmp_path):
    """Two launchers play two nodes: other folders, and only the first has the checkpoint."""
    done = tmp_path / "node0" / "run.pt"
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    shutil.copy(run("00_single_gpu.py", 1, "--epochs=2", whole=True).checkpoint, done)
    # Not with c10d: there the node that comes first is rank 0's, and it may be the other one.
    command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    command += [f"--master-port={checks.free_port()}"]
    training = [ROOT / "03_multinode.py", "--epochs=3", "--checkpoint=run.pt"]
    results = {}

    def start(number: int) -> None:
        results[number] = launch(*command, f"--node-rank={number}", *training, cwd=nodes[number])

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number].returncode for number in range(2)] == [0, 0], results
    out = results[0].stdout + results[1].stdout
    for rank in range(2):
        assert f"rank {rank} of 2 | local rank 0 on " in out
    assert out.count("epoch 3/3 | ") == 1
    assert "epoch 1/3" not in out
    # rank 0 read its file; the agent that came first made rank 0, so either node may have it
    first = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs
    assert f"train loss {first[2]['train_loss']:.4f}" in out


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_start_04(launcher):
    command = [sys.executable, "04_lightning.py", f"--devices={WORLD_SIZE}"]
    if launcher == "torchrun":
        command = [*TORCHRUN, f"--nproc-per-node={WORLD_SIZE}", "04_lightning.py"]
    check(launch(*command, *SHORT))


@pytest.mark.parametrize("rung", BY_TORCHRUN[:2])
def test_the_traceback_of_a_failed_rank_reaches_the_user(rung, tmp_path):
    source = (ROOT / rung).read_text()
    broken = swap(("model.train()", 'model.train(); 1 / (rank != 1 or "one rank fails")'))(source)
    broken = broken.replace('1 / (rank != 1 or "one rank fails")', "fail_on_one(rank)")
    broken = broken.replace("import common\n", FAIL_ON_ONE)
    (tmp_path / rung).write_text(broken)
    command = [*TORCHRUN, "--nproc-per-node=2", tmp_path / rung, "--checkpoint="]
    result = launch(*command, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode != 0
    summary = result.stderr.split("Root Cause", 1)[-1]
    assert "ValueError: rank 1 fails on purpose" in summary
    assert "rank      : 1" in summary


FAIL_ON_ONE = """import common

def fail_on_one(rank):
    if rank == 1:
        raise ValueError("rank 1 fails on purpose")
"""


def test_a_failed_rank_of_01_shows_its_traceback(tmp_path):
    rung = "01_single_node_multi_gpu.py"
    broken = swap(
        ("import common\n", FAIL_ON_ONE), ("model.train()", "model.train(); fail_on_one(rank)")
    )((ROOT / rung).read_text())
    (tmp_path / rung).write_text(broken)
    command = [sys.executable, tmp_path / rung, "--nproc=2", "--checkpoint="]
    result = launch(*command, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode != 0
    assert "ValueError: rank 1 fails on purpose" in result.stderr
    assert "Process 1 terminated" in result.stderr
