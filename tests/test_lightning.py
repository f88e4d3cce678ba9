"""Lightning's strategies, and the topics that are variants of rung 04."""

import io
import os
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import common
from ladder import ROOT, TORCHRUN, fork, launch, launcher_env, without_launcher

TWO = ["--epochs=2"]
FILES = [f"topics/{path.name}" for path in ROOT.glob("topics/*.py") if "L.Tr" in path.read_text()]
FILES = ["04_lightning.py", *sorted(FILES)]


@pytest.fixture(scope="module")
def reference():
    """Three epochs of rung 00."""
    done = fork("00_single_gpu.py", 1, "--epochs=3")
    assert len(done.epochs) == 3
    return done.epochs


def assert_epochs(epochs, reference):
    """The losses of 00 to four decimals, and its accuracy exactly, each sample tested once."""
    assert [entry["epoch"] for entry in epochs] == [entry["epoch"] for entry in reference]
    for ours, theirs in zip(epochs, reference, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        for name in ("test_accuracy", "test_samples"):
            assert ours[name] == theirs[name]


def by_hand():
    """No launcher: Lightning makes the processes."""
    for name in launcher_env(0, 1, "0"):
        os.environ.pop(name, None)


def fsdp_on_the_cpu():
    """Lightning refuses it there; torch does not. So 04's own lines can be tried without GPUs."""
    from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
    from torch.distributed.fsdp import FullyShardedDataParallel

    class OnTheCPU(FSDPStrategy):
        def _setup_model(self, model):
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)

    common._check_lightning = lambda *args: None
    StrategyRegistry["fsdp"]["strategy"] = OnTheCPU


# ---- strategies of rung 04 -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_notebook", "sync_once", "fsdp"])
def test_strategies(strategy, reference, tmp_path):
    """One epoch, resumed for a second; its plain checkpoint goes on in 00."""
    if strategy == "fsdp" and torch.__version__.split(".")[:2] == ["2", "9"]:
        pytest.skip("torch 2.9 crashes where Lightning itself gathers CPU weights for its .ckpt")
    word = f"--strategy={strategy}"
    for epochs in (1, 2):
        if strategy in ("ddp_fork", "ddp_notebook"):
            words = [word, "--devices=2", f"--epochs={epochs}"]
            done = fork("04_lightning.py", 1, *words, folder=tmp_path, before=by_hand)
        else:
            before = fsdp_on_the_cpu if strategy == "fsdp" else None
            words = [word, f"--epochs={epochs}"]
            done = fork("04_lightning.py", 2, *words, folder=tmp_path, before=before)
        assert not any(done.codes), done.err
    assert done.out.count("world size 2 | batch 48 x 2 = 96") == 2
    assert_epochs(done.epochs, reference[:2])
    done = fork("00_single_gpu.py", 1, "--epochs=3", folder=tmp_path)
    assert_epochs(done.epochs, reference)


def test_ddp_spawn(reference, tmp_path):
    """Processes that import the file again: for this one, nothing is forked."""
    words = [f"--checkpoint={tmp_path / 'checkpoint.pt'}", f"--log-json={tmp_path / 'log.json'}"]
    words += ["--devices=2", "--strategy=ddp_spawn", "--epochs=2"]
    done = launch(sys.executable, "04_lightning.py", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("world size 2 | batch 48 x 2 = 96") == 1
    lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # of torch 2.9
    assert lines[0].startswith("04_lightning.py | world size 2"), "notes of Lightning"
    for noise in ("GLOBAL_RANK", "max_epochs", "treespec", "srun", "not empty"):
        assert noise not in done.stdout + done.stderr
    assert (tmp_path / "checkpoint.ckpt").exists()
    done = fork("00_single_gpu.py", 1, "--epochs=3", folder=tmp_path)
    assert_epochs(done.epochs, reference)


@pytest.mark.parametrize(
    "strategy, method", [("ddp_spawn", "spawn"), ("ddp_fork", "fork"), ("ddp_notebook", "fork")]
)
def test_how_the_processes_are_made(strategy, method):
    """With ddp in their place the numbers would be the same, so the tests above cannot tell."""

    def show_and_end():
        def start_processes(*args, start_method, **options):
            print("makes them by", start_method)
            sys.exit(7)

        by_hand()
        torch.multiprocessing.start_processes = start_processes

    done = fork("04_lightning.py", 1, f"--strategy={strategy}", before=show_and_end)
    assert done.codes == [7] and done.out == f"makes them by {method}\n", done.err


def test_strategies_that_cannot_work():
    """One line that says why and what to use, before anything is started."""
    known = "use ddp, ddp_spawn, ddp_fork, ddp_notebook, sync_once, fsdp, deepspeed_stage_2"
    for strategy, launched, text in (
        ("zero", False, f"no --strategy zero: {known}"),
        ("fsdp", False, "fsdp is for GPUs only in Lightning: use torchrun -m topics.fsdp"),
        ("deepspeed_stage_2", False, "GPUs only in Lightning: use torchrun -m topics.zero_optim"),
        ("ddp_spawn", True, "ddp_spawn makes its own processes: start it with python, or use ddp"),
        ("ddp_notebook", True, "ddp_notebook makes its own processes"),
    ):
        before = None if launched else by_hand
        done = fork("04_lightning.py", 1, f"--strategy={strategy}", before=before)
        assert done.codes == [2] and text in done.err, done.err
        assert done.err.count("\n") == 1 and not done.out, done.err


@pytest.mark.parametrize(
    "option, line",
    [
        ("--num-nodes=0", "--num-nodes must be more than 0"),
        ("--precision=half", "no --precision half: use 32-true, 64-true, 16-mixed, bf16-mixed,"),
        ("--checkpoint=a.ckpt", "a.ckpt would be Lightning's own file: let --checkpoint end"),
    ],
)
def test_options_that_cannot_work(option, line):
    done = fork("04_lightning.py", 1, option, before=by_hand)
    assert done.codes == [2] and line in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize("topic", ["logging", "validation", "early_stopping", "debugging"])
def test_topics_that_need_the_process_of_rank_0(topic):
    words = ["--strategy=ddp_fork", "--devices=2", "--epochs=1"]
    done = fork(f"topics/lightning_{topic}.py", 1, *words, before=by_hand)
    assert done.codes == [2] and "ddp_fork" in done.err and "use ddp\n" in done.err, done.err
    assert done.err.count("\n") == 1 and not done.out


def interactive():
    """As in a notebook."""
    from lightning.pytorch.trainer.connectors import accelerator_connector

    by_hand()
    accelerator_connector._IS_INTERACTIVE = True


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "sync_once", "ddp_notebook"])
def test_in_a_notebook(strategy, reference):
    words = [f"--strategy={strategy}", "--devices=2", "--epochs=1"]
    done = fork("04_lightning.py", 1, *words, before=interactive)
    if strategy == "ddp_notebook":
        assert_epochs(done.epochs, reference[:1])
    else:
        assert "is not compatible with an interactive environment" in done.err and not done.epochs


UNPICKLABLE = ("common.build_model(args)\n", "common.build_model(args); self.f = lambda: 0\n")
NO_GUARD = ('if __name__ == "__main__":\n', "if True:\n")


@pytest.mark.parametrize(
    "change, strategy, error",
    [
        (UNPICKLABLE, "ddp_spawn", r"Can't (pickle|get) local object"),
        (UNPICKLABLE, "ddp", None),
        (NO_GUARD, "ddp_spawn", "bootstrapping phase|process . terminated with exit code"),
        (NO_GUARD, "ddp", None),
    ],
)
def test_pickling_and_main_guard(change, strategy, error, tmp_path):
    text = (ROOT / "04_lightning.py").read_text()
    assert change[0] in text
    (tmp_path / "mine.py").write_text(text.replace(*change))
    words = ["--devices=2", f"--strategy={strategy}", "--epochs=1", "--checkpoint="]
    command = [sys.executable, "mine.py", *words]
    done = launch(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode != 0) == bool(error), done.stderr
    assert done.stdout.count("epoch 1/1") == (0 if error else 1)
    assert not error or re.search(error, done.stderr), done.stderr


# ---- the two checkpoint files --------------------------------------------------------------------


def test_half_a_file_is_never_there(reference, tmp_path):
    """Not even where the disk is full, or the process killed, while Lightning writes."""

    def half_a_file():
        from lightning.pytorch.plugins import TorchCheckpointIO

        def save(self, checkpoint, path, storage_options=None):
            with open(path, "wb") as file:
                file.write(b"half")
            raise OSError("No space left on device")

        TorchCheckpointIO.save_checkpoint = save

    assert fork("04_lightning.py", 2, "--epochs=1", folder=tmp_path).codes == [0, 0]
    done = fork("04_lightning.py", 2, "--epochs=2", folder=tmp_path, before=half_a_file)
    assert 0 not in done.codes and "No space left" in done.err
    done = fork("04_lightning.py", 2, "--epochs=3", folder=tmp_path)
    assert done.codes == [0, 0], done.err
    # The plain file had two epochs, Lightning's one: the second is done again, and is the same.
    assert_epochs(done.epochs, [*reference[:2], *reference[1:]])


def test_lightnings_file_alone_is_of_no_run(reference, tmp_path):
    """Who deletes the plain file wants to start again."""
    assert fork("04_lightning.py", 1, "--epochs=1", "--seed=3", folder=tmp_path).codes == [0]
    for name in ("checkpoint.pt", "log.json"):
        (tmp_path / name).unlink()
    done = fork("04_lightning.py", 1, "--epochs=1", folder=tmp_path)
    assert_epochs(done.epochs, reference[:1])


def test_the_plain_file_alone_is_refused(tmp_path):
    fork("00_single_gpu.py", 1, "--epochs=1", folder=tmp_path)
    done = fork("04_lightning.py", 1, "--epochs=2", folder=tmp_path)
    assert done.codes == [2] and "checkpoint.ckpt to go on: is " in done.err, done.err


@pytest.mark.parametrize("file", FILES)
def test_nodes_that_share_no_disk(file, tmp_path):
    """One would go on and the other start again: with unlike weights, in silence."""

    def no_terminal():
        sys.breakpointhook = lambda: None  # of topics/lightning_debugging.py

    assert fork(file, 2, "--epochs=1", folder=tmp_path, before=no_terminal).codes == [0, 0]

    def another_disk():
        no_terminal()
        common.time.sleep = lambda seconds: None  # in common.fail, where rank 1 lets rank 0 speak
        if os.environ["RANK"] == "1":
            common.read_checkpoint = lambda args: None

    done = fork(file, 2, "--epochs=2", folder=tmp_path, before=another_disk)
    assert done.codes == [2, 2], done.err
    assert done.err.count("the nodes' checkpoints differ: put --checkpoint on a disk that") == 2


@pytest.mark.parametrize("rung", ["00_single_gpu.py", "04_lightning.py"])
def test_a_folder_that_is_read_only(rung):
    """Said at the start, not after the first epoch."""

    def read_only():
        os.access = lambda path, mode: mode != os.W_OK

    done = fork(rung, 1, "--epochs=1", before=read_only)
    assert done.codes == [2] and "checkpoint.pt: its folder is read-only" in done.err, done.err
    assert not done.out and not done.epochs


def test_deepspeed_is_looked_for_before_the_start():
    """On two GPUs; with it the next step is to read the checkpoint."""

    def two_gpus(there):
        by_hand()
        common.gpu_count = lambda: 2
        common.find_spec = lambda name: (name == "deepspeed") == there
        common.read_checkpoint = lambda args: sys.exit(7)

    for there, codes, err in (
        (False, [2], "04_lightning.py: --strategy deepspeed_stage_2 needs deepspeed: pip install"),
        (True, [7], ""),
    ):
        word = "--strategy=deepspeed_stage_2"
        done = fork("04_lightning.py", 1, word, before=partial(two_gpus, there))
        assert done.codes == codes and done.err.startswith(err), done.err
        assert done.err.count("\n") == (1 if err else 0) and not done.out


def test_no_question_before_each_batch():
    """Lightning's own one reads a flag back from the GPU."""

    def refuse_the_question():
        from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

        def asked(self):
            raise AssertionError("asked")

        assert _TrainingEpochLoop._broadcast_sigterm_tensor  # else there is nothing to spare
        _TrainingEpochLoop._broadcast_sigterm_tensor = asked

    done = fork("04_lightning.py", 2, "--epochs=1", before=refuse_the_question)
    assert done.codes == [0, 0] and len(done.epochs) == 1, done.err


# ---- topics/sync_once.py -------------------------------------------------------------------------

KEEP = """
    def on_train_batch_end(self, *_):
        now = {name: value.clone() for name, value in self.state_dict().items()}
        self.kept = [*getattr(self, "kept", []), now]
        torch.save(self.kept, f"kept.{self.global_rank}")

    def configure_optimizers(self):"""


def each_step(strategy, folder, *changes, trainer=""):
    """Return (rank 0's, rank 1's) weights after each of six batches."""

    def edit(source):
        six = f"limit_train_batches=6, {trainer}"
        for old, new in (
            ("\n    def configure_optimizers(self):", KEEP),
            ('**kind["init_params"]', f'{find_unused}**kind["init_params"]'),
            ("logger=False,", f"logger=False, {six}"),
            ("self.compiled[0](images)", "self.model(images)"),
            *changes,
        ):
            assert old in source, old
            source = source.replace(old, new)
        return source

    def show_all_reduces():
        """Those that the strategy calls, not the ones that it says it has called."""
        all_reduce = torch.distributed.all_reduce

        def shown(tensor, *args, **options):
            print("all-reduce of", tensor.numel())
            return all_reduce(tensor, *args, **options)

        torch.distributed.all_reduce = shown

    find_unused = "find_unused_parameters=True, " if any("rank" in c[1] for c in changes) else ""
    words = [f"--strategy={strategy}", "--epochs=1"]
    options = {"edit": edit, "before": show_all_reduces}
    done = fork("topics/sync_once.py", 2, *words, folder=folder / strategy, **options)
    assert not any(done.codes), done.err
    kept = [torch.load(folder / strategy / f"kept.{rank}") for rank in range(2)]
    assert len(kept[0]) == len(kept[1]) == 6
    return kept, done


# Another last layer on rank 1: the layer is there on both, and each uses its own
UNUSED = (
    "common.build_model(args)\n",
    "common.build_model(args); self.extra = torch.nn.Linear(10, 10); "
    "self.never = torch.nn.Linear(2, 2)\n",
)
USE = ("self.model(images)", "self.out(self.model(images), batch_index)")
OUT = (
    "    def on_train_start(self):",
    "    def out(self, logits, batch_index):\n"
    "        mine = self.global_rank == 1 and batch_index in (1, 2)\n"
    "        return self.extra(logits) if mine else logits\n\n"
    "    def on_train_start(self):",
)
ALL = ("torch.optim.SGD(self.model.parameters()", "torch.optim.SGD(self.parameters()")
FROZEN = (UNUSED[0], "common.build_model(args); self.model[0].requires_grad_(False)\n")
OTHER_START = ("torch.manual_seed(args.seed)", "torch.manual_seed(int(os.environ['RANK']))")
BUFFER = (UNUSED[0], "common.build_model(args); self.register_buffer('own', torch.rand(3))\n")
NORM = (UNUSED[0], "common.build_model(args); self.model.append(torch.nn.BatchNorm1d(10))\n")
# DDP would give all ranks the buffers of rank 0, before each forward pass.
NOT_SENT = ('strategy=kind["strategy"](', 'strategy=kind["strategy"](broadcast_buffers=False, ')
BUFFERS = ("own", "model.10.running", "model.10.num")
CASES = {
    "plain": ([], "", 6),
    "weights and buffers of rank 0": ([OTHER_START, BUFFER], "", 6),
    "buffers of each rank": ([NORM, NOT_SENT], "", 6),
    "accumulation": ([], "accumulate_grad_batches=2,", 3),
    "accumulation with a rest": ([], "accumulate_grad_batches=4,", 2),
    "frozen": ([FROZEN], "", 6),
    "unused on a rank": ([UNUSED, USE, OUT, ALL], "", 6),
    "clipping": ([], "gradient_clip_val=0.05,", 6),
    "clipping values": ([], "gradient_clip_val=0.001, gradient_clip_algorithm='value',", 6),
    "all": (
        [(UNUSED[0], UNUSED[1][:-1] + "; self.model[0].requires_grad_(False)\n"), USE, OUT, ALL],
        "accumulate_grad_batches=2, gradient_clip_val=0.05,",
        3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_sync_once_is_ddp(case, tmp_path):
    """The same weights as DDP's on both ranks after each batch, with one all-reduce a step.

    It takes the gradients, and of each weight whether it has one. Others are of 4 numbers or less.
    """
    changes, trainer, steps = CASES[case]
    ddp, _ = each_step("ddp", tmp_path, *changes, trainer=trainer)
    ours, done = each_step("sync_once", tmp_path, *changes, trainer=trainer)
    assert f"{steps} all-reduces of gradients in {steps} steps" in done.out
    rest = (*BUFFERS, "model.0.") if case in ("frozen", "all") else BUFFERS
    sizes = [value.numel() + 1 for name, value in ddp[0][0].items() if not name.startswith(rest)]
    sent = [int(size) for size in re.findall(r"^all-reduce of (\d+)$", done.out, re.M)]
    assert [size for size in sent if size > 4] == [sum(sizes)] * steps * 2
    for batch in range(6):
        for rank in range(2):
            for name, value in ddp[rank][batch].items():
                torch.testing.assert_close(ours[rank][batch][name], value, rtol=0, atol=1e-6)
    moved = ddp[0][-1]["model.9.weight"] - ddp[0][0]["model.9.weight"]
    assert moved.abs().max() > 1e-4
    if case == "buffers of each rank":
        names = [name for name in ours[0][-1] if name.startswith(BUFFERS)]
        assert any(not torch.equal(ours[0][-1][name], ours[1][-1][name]) for name in names)
    if "extra.weight" in ddp[0][0]:
        assert not torch.equal(ddp[0][0]["extra.weight"], ddp[0][-1]["extra.weight"])
        assert torch.equal(ddp[0][0]["never.weight"], ddp[0][-1]["never.weight"])


def test_sync_once_counts_the_steps_of_this_run(tmp_path):
    """A resumed run has made the all-reduces of its own steps only."""
    for epochs in (1, 2):
        done = fork(
            "topics/sync_once.py", 2, f"--epochs={epochs}", folder=tmp_path, edit=not_compiled
        )
        assert done.codes == [0, 0], done.err
    assert done.out.count("41 all-reduces of gradients in 41 steps") == 2, done.out


def not_compiled(text):
    return text.replace("self.compiled[0](images)", "self.model(images)")


def test_sync_once_trains_what_it_has_compiled(reference):
    done = fork("topics/sync_once.py", 2, "--epochs=2", "--checkpoint=")
    assert done.codes == [0, 0], done.err
    assert_epochs(done.epochs, reference[:2])
    assert " | 1 compiled pieces, 0 graph breaks" in done.out


# Weights for several buckets, and a single step
WIDE = ["--model=wide", "--dataset=fake:96", "--image-size=16", "--epochs=1", "--checkpoint="]


def test_sync_once_compiles_the_plain_model():
    """DDP cuts a model that fills more than a bucket. This strategy leaves it whole."""
    found = {}
    for strategy in ("ddp", "sync_once"):
        done = fork("topics/sync_once.py", 2, f"--strategy={strategy}", *WIDE)
        assert done.codes == [0, 0], done.err
        found[strategy] = re.search(r"(\d+) compiled pieces, (\d+) graph breaks", done.out).groups()
        losses = done.epochs[0]["train_loss"]
    assert found == {"ddp": ("2", "0"), "sync_once": ("1", "0")}
    assert losses > 0


def test_sync_once_counts_graph_breaks_and_takes_any_backend():
    def backend():
        def counted(graph, inputs):
            print("compiled by this backend")
            return graph

        torch._dynamo.register_backend(counted)

    cut = "; self.model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())"

    def edit(source):
        return source.replace(UNUSED[0], f"{UNUSED[0][:-1]}{cut}\n")

    done = fork("topics/sync_once.py", 1, "--backend=counted", *WIDE, before=backend, edit=edit)
    assert done.codes == [0], done.err
    pieces, breaks = re.search(r"(\d+) compiled pieces, (\d+) graph breaks", done.out).groups()
    assert int(pieces) == done.out.count("compiled by this backend") > 0 and int(breaks) > 0


# ---- topics/lightning_launch.py ------------------------------------------------------------------

NAMES = ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"]


def processes(reference, *command):
    """Return the lines (process, parent, variables, arguments), and the variables as dicts."""
    done = launch(*command, "--epochs=1", "--checkpoint=")
    assert done.returncode == 0 and done.stdout.count("epoch 1/1") == 1, done.stderr
    assert f"train loss {reference[0]['train_loss']:.4f}" in done.stdout
    lines = re.findall(r"^process (\d+), child of (\d+) \| (.*?) \| (.*)$", done.stdout, re.M)
    assert len(lines) == 2
    assert lines[0][3].split()[1:] == lines[1][3].split()[1:]
    variables = [dict(word.split("=") for word in line[2].split()) for line in lines]
    assert all(list(found) == NAMES for found in variables)
    return lines, variables


def test_lightning_starts_the_script_again(reference):
    """From the first process, which has no rank yet; the second has one, and the same words."""
    words = ["-m", "topics.lightning_launch", "--devices=2", "--timeout=90"]
    lines, variables = processes(reference, sys.executable, *words)
    (first, _, _, words), (_, parent, _, others) = lines
    assert parent == first
    assert words == others and "lightning_launch.py --devices=2 --timeout=90" in words
    assert set(variables[0].values()) == {"-"}
    port = variables[1].pop("MASTER_PORT")
    expected = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "LOCAL_RANK": "1", "RANK": "-"}
    assert port.isdigit() and variables[1] == expected | {"WORLD_SIZE": "2"}


def test_torchrun_has_started_all_before(reference):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "topics.lightning_launch"]
    lines, variables = processes(reference, *command)
    assert lines[0][1] == lines[1][1] not in (lines[0][0], lines[1][0]), "torchrun is the parent"
    assert {found["LOCAL_RANK"] for found in variables} == {"0", "1"}
    assert all(found["RANK"] == found["LOCAL_RANK"] for found in variables)
    assert all(found["WORLD_SIZE"] == "2" for found in variables)


# ---- topics/lightning_logging.py -----------------------------------------------------------------


def hits(done, reference, size=997):
    """Return, for each of the test samples, whether the weights in the checkpoint are right.

    They have been trained as those of 00.
    """
    assert done.epochs[0]["train_loss"] == pytest.approx(reference[0]["train_loss"], abs=5e-5)
    return right_ones(done.state["weights"], size)


def right_ones(weights, size):
    """Return, for each of the first test samples, whether a model with these weights is right."""
    args = SimpleNamespace(model="small", channels=1, image_size=28, dataset="digits")
    model = common.build_model(args).eval()
    model.load_state_dict(weights)
    images, labels = common.load_datasets(args)[1][:size]
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_logging(world_size, reference):
    """Only the sums are exact: sync_dist divides by a mean of the ranks' counts, cut to a whole."""
    done = fork("topics/lightning_logging.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    found = dict(re.findall(r"^(\w+) +(\d+\.\d{4})%", done.out, re.M))
    right = hits(done, reference)
    shares = [right[rank::world_size] for rank in range(world_size)]

    def synced(shares):
        mean = sum(map(sum, shares)) / len(shares)
        return mean / (sum(map(len, shares)) // len(shares))

    expected = {"rank_zero_only": sum(shares[0]) / len(shares[0]), "sync_dist": synced(shares)}
    expected |= {"sync_dist_group": synced(shares[::2]), "sums": sum(right) / 997}
    assert found == {name: f"{value:.4%}"[:-1] for name, value in expected.items()}
    assert len({found["rank_zero_only"], found["sync_dist"], found["sums"]}) == 3
    assert f", {sum(right)} of 997" in done.out
    assert done.epochs[0]["test_accuracy"] == pytest.approx(sum(right) / 997)
    plain, with_sync = re.search(
        r"^a step is (\S+) ms in self.log, with sync_dist (\S+) ms", done.out, re.M
    ).groups()
    assert float(plain) > 0 and float(with_sync) > 0


def test_the_time_in_a_log_in_a_resumed_run(tmp_path):
    """Were each log to take a second, it would be a second a step, not half of it."""

    def edit(text):
        return text.replace(
            "self.log_seconds += torch.tensor(times).diff()", "self.log_seconds += 1"
        )

    for epochs in (1, 2):
        options = {"folder": tmp_path, "edit": edit}
        done = fork("topics/lightning_logging.py", 1, f"--epochs={epochs}", **options)
        assert done.codes == [0], done.err
    assert done.out.count("a step is 1000.000 ms in self.log, with sync_dist 1000.000 ms") == 2, (
        done.out
    )


def test_what_sync_dist_costs_is_collectives():
    """A barrier and an all-reduce a step, for a log that asks for them. Its time has theirs."""

    def count():
        calls = []
        for name in ("all_reduce", "barrier"):
            function = getattr(torch.distributed, name)

            def counted(*args, name=name, function=function, **options):
                calls.append(name)
                common.time.sleep(0.01 if name == "barrier" else 0)
                return function(*args, **options)

            setattr(torch.distributed, name, counted)
        show = common.log_epoch

        def log_epoch(*args):
            print("collectives:", calls.count("all_reduce"), calls.count("barrier"))
            show(*args)

        common.log_epoch = log_epoch

    counts, times = [], []
    for edit in (None, lambda text: text.replace("loss, sync_dist=True", "loss")):
        done = fork("topics/lightning_logging.py", 2, "--epochs=1", before=count, edit=edit)
        counts.append([int(x) for x in re.search(r"collectives: (\d+) (\d+)", done.out).groups()])
        times.append(float(re.search(r"with sync_dist (\S+) ms", done.out)[1]))
    assert [a - b for a, b in zip(*counts, strict=True)] == [41, 41]
    assert times[0] >= 10


def test_the_wait_for_the_slowest_rank_is_in_it():
    """Rank 1 comes 20 ms late: rank 0 waits for it in the log with sync_dist, and says so."""

    def edit(text):
        late, start = "time.sleep(0.02 * self.global_rank)", "times = [time.perf_counter()]"
        return text.replace(start, f"{late}\n        {start}")

    done = fork("topics/lightning_logging.py", 2, "--epochs=1", edit=edit)
    words = r"with sync_dist (\S+) ms, the wait for the slowest rank included$"
    assert float(re.search(words, done.out, re.M)[1]) > 10


def test_the_deadlock_ends_and_says_why():
    words = ["--epochs=1", "--deadlock=1", "--timeout=5"]
    done = fork("topics/lightning_logging.py", 2, *words)
    assert done.codes[0] == 2 and done.codes[1] != 0 and not done.epochs
    assert "rank 0 waited in self.log, for ranks that do not call it" in done.err
    assert "Timed out waiting 5000ms" in done.err


# ---- topics/lightning_validation.py --------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation(world_size, reference):
    done = fork("topics/lightning_validation.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    lines = re.findall(r"^(padded|one device|exact) +(\d+) of (\d+) = (\S+)%$", done.out, re.M)
    found = {way: (int(correct), int(tested)) for way, correct, tested, _ in lines}
    assert all(f"{int(c) / int(t):.4%}" == f"{share}%" for _, c, t, share in lines)
    right = hits(done, reference)
    padded = -(-997 // world_size) * world_size  # the sampler begins again at the first samples
    expected = {"padded": (sum(right) + sum(right[: padded - 997]), padded)}
    assert found == expected | {"one device": (sum(right), 997), "exact": (sum(right), 997)}
    assert world_size == 1 or padded > 997


def test_validation_started_by_lightning():
    """The second Trainer must not start processes, nor ask for those of the first."""
    command = [sys.executable, "-m", "topics.lightning_validation", "--devices=2", "--epochs=1"]
    done = launch(*command, "--checkpoint=")
    assert done.returncode == 0, done.stderr
    ways = re.findall(r"^(padded|one device|exact) +\d+ of (\d+)", done.stdout, re.M)
    assert ways == [("padded", "998"), ("one device", "997"), ("exact", "997")]


# ---- topics/lightning_early_stopping.py ----------------------------------------------------------


def decisions(done):
    """Return what the ranks have decided: epochs trained, file, its accuracy in %, for each."""
    text = r"^rank (\d) stops after epoch (\d+), keeps (\S+) \((\S+)%\)$"
    found = {rank: tuple(rest) for rank, *rest in re.findall(text, done.out, re.M)}
    assert not any(done.codes) and len(found) == 2, done.err
    return found["0"], found["1"]


def test_early_stopping(tmp_path):
    """Its patience and the best epoch so far survive a stop and a start in between."""
    for epochs in (7, 20):  # the seventh is the best, so the first part ends with it
        options = {"folder": tmp_path}
        done = fork("topics/lightning_early_stopping.py", 2, f"--epochs={epochs}", **options)
        assert done.codes == [0, 0], done.err
    done.out = done.out[done.out.index("going on") :]
    accuracies = [entry["test_accuracy"] for entry in done.epochs]
    best = accuracies.index(max(accuracies))
    assert best == 6 and len(accuracies) == best + 1 + 2, accuracies
    [file] = tmp_path.glob("*best*")
    assert file.name == f"checkpoint-best-epoch={best}.ckpt"
    assert (
        decisions(done) == ((str(len(accuracies)), file.name, f"{max(accuracies):.1%}"[:-1]),) * 2
    )
    weights = torch.load(file, weights_only=True)["state_dict"]
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    assert sum(right_ones(weights, 1000)) == round(max(accuracies) * 1000)


def test_early_stopping_by_each_ranks_own_number(tmp_path):
    """All stop when one has lost patience; a file is written only when all have improved."""

    def show():
        evaluate = common.evaluate

        def shown(*args):
            correct, tested = evaluate(*args)
            print(f"own {common.rank()} {correct / tested:.9f}", flush=True)
            return torch.stack((correct, tested))

        common.evaluate = shown

    words = ["--epochs=20", "--log=own"]
    options = {"folder": tmp_path, "before": show}
    done = fork("topics/lightning_early_stopping.py", 2, *words, **options)
    own = [[float(x) for x in re.findall(rf"^own {rank} (\S+)$", done.out, re.M)] for rank in "01"]
    kept, lasts = 0, []
    for epoch, numbers in enumerate(zip(*own, strict=True)):
        if all(number > mine[kept] for number, mine in zip(numbers, own, strict=True)):
            kept = epoch
        lasts = [epoch - mine.index(max(mine[: epoch + 1])) for mine in own]
        assert max(lasts) < 2 or epoch + 1 == len(done.epochs)
    assert max(lasts) == 2 and min(lasts) < 2, "one has lost patience"
    same = (str(len(done.epochs)), f"checkpoint-best-epoch={kept}.ckpt")
    assert decisions(done) == tuple((*same, f"{mine[kept]:.1%}"[:-1]) for mine in own)
    assert own[0][kept] != own[1][kept]
    assert [file.name for file in tmp_path.glob("*best*")] == [same[1]]
    accuracies = [entry["test_accuracy"] for entry in done.epochs]
    assert accuracies[kept] < max(accuracies), "the best epoch was missed"


def test_a_number_that_only_rank_0_has():
    """EarlyStopping says what is missing, on rank 1; ModelCheckpoint alone does not."""
    words, missing = (
        ["--log=rank_0", "--timeout=5"],
        "Early stopping conditioned on metric `accuracy`",
    )
    done = fork("topics/lightning_early_stopping.py", 2, *words)
    assert all(done.codes) and len(done.epochs) == 1
    assert done.err.count(f"{missing} which is not available") == 1, done.err
    done = fork("topics/lightning_early_stopping.py", 2, *words, "--patience=0")
    assert all(done.codes) and len(done.epochs) == 1
    ends = "Timed out waiting 5000ms|by peer|collective mismatch"
    assert missing not in done.err and re.search(ends, done.err), done.err
    assert not list(done.checkpoint.parent.glob("*best*"))


@pytest.mark.parametrize("option", ["--log=loss", "--patience=-1", "--checkpoint="])
def test_options_of_early_stopping(option):
    done = fork("topics/lightning_early_stopping.py", 1, option)
    assert done.codes == [2] and done.err.count("\n") == 1 and "needs --log sync_dist" in done.err


# ---- topics/lightning_debugging.py ---------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_debugger_on_rank_0_in_lightning(launcher):
    """A line from each rank; then rank 0's prompt, in its own step, and at its end c goes on."""
    pexpect = pytest.importorskip("pexpect")
    command = [sys.executable, "-m", "topics.lightning_debugging"]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", command[-1]]
    environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    words = [*command[1:], "--epochs=1", "--checkpoint=", "--timeout=60", "--at=2"]
    options = {"cwd": ROOT, "env": environ, "timeout": 60, "encoding": "utf8"}
    child = pexpect.spawn(command[0], words, **options)
    child.logfile_read = screen = io.StringIO()
    try:
        child.expect(r"Pdb\)")  # rank 1's line may come between it and its first bracket
        child.sendline("print('here is', self.global_rank, 'of', self.trainer.world_size)")
        child.expect("here is 0 of 2")
        child.sendline("print('batch', batch_index, 'has', len(labels))")
        child.expect("batch 2 has 48")
        child.sendline("c")
        child.expect("epoch 1/1 .*train loss")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
    finally:
        child.close(force=True)
    for rank in range(2):
        assert re.search(rf"rank {rank} \| batch 2 \| loss \d\.\d+", screen.getvalue())
        assert f"rank {rank} | behind the barrier" in screen.getvalue()


def test_the_others_wait_for_the_debugger(reference):
    """Rank 1 is behind the barrier only after rank 0 has left its breakpoint."""

    def slow_breakpoint():
        def wait():
            common.time.sleep(2)
            print("leaves the breakpoint", common.time.monotonic(), flush=True)

        sys.breakpointhook = wait

    def edit(text):
        return text.replace('behind the barrier"', 'behind {time.monotonic()}"')

    done = fork("topics/lightning_debugging.py", 2, "--epochs=1", edit=edit, before=slow_breakpoint)
    assert done.codes == [0, 0], done.err
    left = float(re.search(r"leaves the breakpoint (\S+)", done.out)[1])
    behind = re.findall(r"rank \d \| behind (\S+)", done.out)
    assert len(behind) == 2 and all(float(moment) > left for moment in behind)
    assert_epochs(done.epochs, reference[:1])
