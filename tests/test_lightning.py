"""Rung 04, Lightning's strategies, and the topics that import rung 04."""

import importlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import checks
import common
from ladder import ROOT, TORCHRUN, fork, launch, launcher_env, of_the_day, without_launcher

whole = partial(fork, whole=True)  # with all digits
RUNG = "04_lightning.py"
TINY = ["--dataset=fake:96", "--image-size=8", "--epochs=1"]  # where starting is the point


@pytest.fixture(scope="module")
def reference():
    """Three epochs of rung 00."""
    done = fork("00_single_gpu.py", 1, "--epochs=3")
    assert len(done.epochs) == 3
    return done.epochs


@pytest.fixture(scope="module")
def whole_reference():
    return whole("00_single_gpu.py", 1, "--epochs=2").epochs


def assert_epochs(epochs, reference):
    """The losses of 00 to four decimals, and its accuracy exactly, each sample tested once."""
    assert [entry["epoch"] for entry in epochs] == [entry["epoch"] for entry in reference]
    for local, expected in zip(epochs, reference, strict=True):
        assert local["train_loss"] == pytest.approx(expected["train_loss"], abs=5e-5)
        for name in ("test_accuracy", "test_samples"):
            assert local[name] == expected[name]


def by_hand():
    """No launcher: Lightning makes the processes."""
    for name in launcher_env(0, 1, "0"):
        os.environ.pop(name, None)


@pytest.mark.parametrize(
    "name", ["04_lightning", "topics.lightning_early_stopping", "topics.lightning_logging"]
)
def test_what_a_step_logs_is_made_on_its_device(name):
    """Lightning makes a tensor of a number, by a copy that the GPU is stopped for."""
    options = {"model": "small", "channels": 1, "image_size": 28, "log": "own", "deadlock": 0}
    args = SimpleNamespace(**dict.fromkeys(checks.RESUME_KEYS) | options)
    module = importlib.import_module(name).Classifier(args)
    logged, module.group, module.log_seconds = [], None, torch.zeros(2)
    module.log = lambda name, value, **_: logged.append(value)
    module.log_dict = lambda found, **_: logged.extend(found.values())
    batch = torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1, 2])
    module.training_step(batch, 0)
    module.validation_step(batch, 0)
    assert len(logged) >= 4
    assert [value.dtype for value in logged] == [torch.float32] * len(logged)


# ---- strategies of rung 04 -----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_losses_of_00(world_size, reference):
    done = fork(RUNG, world_size, "--epochs=3")
    assert not any(done.codes), done.err
    assert_epochs(done.epochs, reference)


def test_a_notebook_that_has_used_threads():
    """OpenMP's threads are not forked: the ranks would wait for them."""
    cell = "import runpy, sys, torch; torch.ones(10**6).add_(1); sys.argv = sys.argv[1:]; "
    cell += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [RUNG, "--strategy=ddp_notebook", "--devices=2", "--dataset=fake:128", "--epochs=1"]
    env = {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = launch(sys.executable, "-c", cell, *words, env=env)
    assert done.returncode == 0 and "epoch 1/1" in done.stdout, done.stderr


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_strategies_that_fork(strategy, reference, tmp_path):
    """One epoch, resumed for a second."""
    for epochs in (1, 2):
        words = [f"--strategy={strategy}", "--devices=2", f"--epochs={epochs}"]
        done = fork(RUNG, 1, *words, folder=tmp_path, before=by_hand)
        assert not any(done.codes), done.err
    assert done.out.count("world size 2 | batch 48 x 2 = 96") == 2
    assert_epochs(done.epochs, reference[:2])


def by_spawn(whole, *command):
    """Return its output. Processes that import the file again: for this one, nothing is forked."""
    done = launch(sys.executable, *command, "--devices=2", "--strategy=ddp_spawn", "--epochs=1")
    assert done.returncode == 0, done.stderr
    loss = f"epoch 1/1 | train loss {whole.epochs[0]['train_loss']:.4f}"
    assert done.stdout.count(loss) == 1, done.stdout
    for noise in ("GLOBAL_RANK", "max_epochs", "treespec", "srun", "not empty", "distributed_back"):
        assert noise not in done.stdout + done.stderr
    return done.stdout


def test_ddp_spawn(tmp_path):
    """A topic's Classifier is pickled by reference, its base by that to the module 04_lightning."""
    whole = fork("00_single_gpu.py", 1, "--epochs=1", whole=True)
    assert "world size 2 | batch 48 x 2 = 96" in by_spawn(whole, RUNG)
    files = [f"--checkpoint={tmp_path}/run.ckpt", f"--plain={tmp_path}/run.pt"]
    by_spawn(whole, "-m", "topics.lightning_checkpoint", *files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt", "run.pt"]
    # Its Classifier is its own, its data module that of 04.
    assert "compiled pieces" in by_spawn(whole, "-m", "topics.sync_once")


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

    done = fork(RUNG, 1, f"--strategy={strategy}", before=show_and_end)
    assert done.codes == [7] and done.out == f"makes them by {method}\n", done.err


def test_strategies_that_cannot_work():
    """One line that says why and what to use, before anything is started."""
    for strategy, launched, text in (
        ("zero", False, "invalid choice: 'zero'"),
        ("fsdp", False, "fsdp is for GPUs only in Lightning: use torchrun "),
        ("fsdp", False, "-m topics.fsdp, or ddp"),
        ("deepspeed", False, "-m topics.deepspeed_zero, or ddp"),
        ("deepspeed_stage_2", False, "-m topics.deepspeed_zero, or ddp"),
        ("ddp_spawn", True, "ddp_spawn makes its own processes: start it with python, or use ddp"),
        ("ddp_notebook", True, "ddp_notebook makes its own processes"),
    ):
        before = None if launched else by_hand
        done = fork(RUNG, 1, f"--strategy={strategy}", before=before)
        assert done.codes == [2] and text in done.err, done.err
        assert done.err.count("\n") == 1 and not done.out, done.err


@pytest.mark.parametrize(
    "why, line",
    [
        ("windows", "needs os.fork, which Windows has not: use ddp_spawn"),
        ("cuda", "forks, but this process has used a GPU: start it in a new one"),
    ],
)
def test_a_process_that_cannot_fork(why, line):
    def before():
        by_hand()
        if why == "windows":
            del os.fork
        else:
            torch.cuda.is_initialized = lambda: True

    done = fork(RUNG, 1, "--strategy=ddp_fork", before=before)
    assert done.codes == [2] and line in done.err
    assert done.err.count("\n") == 1 and not done.out, done.err


@pytest.mark.parametrize(
    "options, line",
    [
        (["--num-nodes=0"], "--num-nodes must be more than 0"),
        (["--precision=half"], "invalid choice: 'half'"),
        # Lightning's evaluation loop skips a rank without a batch, and the others wait for it.
        (["--dataset=fake:8", "--batch-size=8", "--devices=4"], "tests 2 images: too few for 4 "),
    ],
)
def test_options_that_cannot_work(options, line):
    done = fork(RUNG, 1, *options, before=by_hand)
    assert done.codes == [2] and line in done.err and done.err.count("\n") == 1, done.err


def test_as_many_ranks_as_test_samples():
    done = fork(RUNG, 2, "--dataset=fake:8", "--batch-size=8", "--epochs=1")
    assert done.codes == [0, 0] and done.epochs[0]["test_samples"] == 2, done.err


@pytest.mark.parametrize("topic", ["logging", "validation", "early_stopping", "debugging"])
def test_topics_that_need_the_process_of_rank_0(topic):
    words = ["--strategy=ddp_fork", "--devices=2", "--epochs=1"]
    done = fork(f"topics/lightning_{topic}.py", 1, *words, before=by_hand)
    assert done.codes == [2] and "invalid choice: 'ddp_fork'" in done.err, done.err
    assert done.err.count("\n") == 1 and not done.out


def interactive():
    """As in a notebook."""
    from lightning.pytorch.trainer.connectors import accelerator_connector

    by_hand()
    accelerator_connector._IS_INTERACTIVE = True


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_notebook"])
def test_in_a_notebook(strategy, reference):
    words = [f"--strategy={strategy}", "--devices=2", "--epochs=1"]
    done = fork(RUNG, 1, *words, before=interactive)
    if strategy == "ddp_notebook":
        assert_epochs(done.epochs, reference[:1])
    else:
        assert "is not compatible with an interactive environment" in done.err and not done.epochs


@pytest.mark.parametrize(
    "file, strategy, error",
    [
        ("unpicklable", "ddp_spawn", r"Can't (pickle|get) local object"),
        ("unpicklable", "ddp", None),
        ("no_guard", "ddp_spawn", "guards the main|terminated with exit code"),
        ("no_guard", "ddp", None),
    ],
)
def test_pickling_and_main_guard(file, strategy, error, tmp_path):
    old, new = {
        "unpicklable": (
            "common.build_model(args)\n",
            "common.build_model(args); self.f = lambda: 0\n",
        ),
        "no_guard": ('if __name__ == "__main__":', "if True:"),
    }[file]
    text = (ROOT / RUNG).read_text()
    assert old in text
    (tmp_path / "mine.py").write_text(text.replace(old, new))
    command = [sys.executable, "mine.py", "--devices=2", f"--strategy={strategy}", *TINY]
    done = launch(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode != 0) == bool(error), done.stderr
    assert done.stdout.count("epoch 1/1") == (0 if error else 1)
    assert not error or re.search(error, done.stderr), done.stderr


SIGNALS = [(s, n) for s in ("ddp", "ddp_spawn") for n in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.cold
@pytest.mark.parametrize(("strategy", "number"), of_the_day(SIGNALS, 2))
def test_a_signal_leaves_no_process(strategy, number):
    """SIGTERM reaches rank 0's process or its parent only, Ctrl-C all that the terminal has."""
    command = [sys.executable, RUNG, "--devices=2", f"--strategy={strategy}", *TINY]
    command += ["--epochs=10000"]
    environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environ, "start_new_session": True}
    # `make test &` of a script ignores Ctrl-C, and so would its children.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, text=True, **options, **pipes)
    try:
        for line in process.stdout:
            if line.startswith("epoch 1/"):
                break
        kill = os.killpg if number == signal.SIGINT else os.kill
        kill(process.pid, number)
        assert process.wait(60) != 0
        for _ in range(300):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        pytest.fail("a rank is left behind")
    except ProcessLookupError:
        pass  # nobody is left in the group
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


# ---- its checkpoint ------------------------------------------------------------------------------


def lightnings(path):
    return torch.load(path, weights_only=True)


def test_three_and_three_epochs_are_six(tmp_path):
    whole = fork(RUNG, 2, "--epochs=6")
    for epochs in (3, 6):
        parts = fork(RUNG, 2, f"--epochs={epochs}", folder=tmp_path)
        assert parts.codes == [0, 0], parts.err
    losses = [[entry["train_loss"] for entry in done.epochs] for done in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    for name, value in lightnings(whole.checkpoint)["state_dict"].items():
        assert torch.equal(value, lightnings(parts.checkpoint)["state_dict"][name])
    assert parts.out.count(": resumes after epoch 3\n") == 1
    again = fork(RUNG, 2, "--epochs=6", folder=tmp_path)
    assert again.codes == [0, 0] and "nothing left to do: it has 6 epochs" in again.out
    assert len(again.epochs) == 6 and again.out.count("world size 2") == 2


def test_the_lr_of_the_resumed_run(tmp_path):
    for name, rung in (("0", "00_single_gpu.py"), ("4", RUNG)):
        folder = tmp_path / name
        assert fork(rung, 1, "--epochs=1", folder=folder).codes == [0]
        done = fork(rung, 1, "--epochs=2", "--lr=0.01", folder=folder)
        assert done.codes == [0], done.err
        (tmp_path / f"loss.{name}").write_text(f"{done.epochs[-1]['train_loss']:.4f}")
    assert (tmp_path / "loss.0").read_text() == (tmp_path / "loss.4").read_text()


def test_a_name_that_begins_like_another(tmp_path):
    """run.ckpt stands beside run2.ckpt: neither is taken, written or deleted for the other."""
    run, run2 = tmp_path / "run.ckpt", tmp_path / "run2.ckpt"
    assert fork(RUNG, 1, "--epochs=2", f"--checkpoint={run2}").codes == [0]
    before = run2.read_bytes()
    for epochs in (1, 2):
        done = fork(RUNG, 1, f"--epochs={epochs}", f"--checkpoint={run}")
        assert done.codes == [0], done.err
        assert ("resumes after epoch 1" in done.out) == (epochs == 2)
    assert run2.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt", "run2.ckpt"]


@pytest.mark.parametrize("case", ["corrupt", "plain", "other seed"])
def test_files_that_cannot_be_used(case, tmp_path):
    path = tmp_path / "checkpoint.pt"
    fork("00_single_gpu.py" if case == "plain" else RUNG, 1, "--epochs=1", folder=tmp_path)
    for name in ("stdout.0", "stderr.0"):
        (tmp_path / name).unlink()
    words, line = {
        "corrupt": ([], f"cannot read {path}: "),
        "plain": ([], f"{path} is not a checkpoint of Lightning"),
        "other seed": (["--seed=1"], f"{path} was made with --seed 0"),
    }[case]
    if case == "corrupt":
        path.write_bytes(path.read_bytes()[:5000])
    before = path.read_bytes()
    done = fork(RUNG, 1, "--epochs=2", *words, folder=tmp_path)
    assert done.codes == [2] and line in done.err and done.err.count("\n") == 1, done.err
    assert path.read_bytes() == before and not done.out


@pytest.mark.parametrize("file", [RUNG, "topics/lightning_dataset.py"])
def test_nodes_that_share_no_disk(file, tmp_path):
    """One would resume and the other start again: with unlike weights, in silence."""
    assert fork(file, 2, "--epochs=1", folder=tmp_path).codes == [0, 0]

    def another_disk():
        checks.time.sleep = lambda seconds: None  # in checks.fail, where rank 1 lets rank 0 speak
        if os.environ["RANK"] == "1":
            sys.argv.append(f"--checkpoint={tmp_path}/of_rank_1/run.ckpt")

    done = fork(file, 2, "--epochs=2", folder=tmp_path, before=another_disk)
    assert done.codes == [2, 2], done.err
    line = "rank 0 has epochs behind it 1, rank 1 has 0: make them equal"
    assert done.err.count(line) == 2, done.err


@pytest.mark.parametrize("rung", ["00_single_gpu.py", RUNG])
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
        checks.find_spec = lambda name: (name == "deepspeed") == there
        checks.lightning_epochs = lambda args: sys.exit(7)

    for there, codes, err in (
        (False, [2], "04_lightning.py: --strategy deepspeed_stage_2 needs deepspeed: pip install"),
        (True, [7], ""),
    ):
        word = "--strategy=deepspeed_stage_2"
        done = fork(RUNG, 1, word, before=partial(two_gpus, there))
        assert done.codes == codes and done.err.startswith(err), done.err
        assert done.err.count("\n") == (1 if err else 0) and not done.out


# ---- topics/lightning_checkpoint.py --------------------------------------------------------------

FILES = "topics/lightning_checkpoint.py"


def test_the_plain_file_is_that_of_00(reference, tmp_path):
    """One epoch in Lightning on two ranks, then one in 00, then one in 03."""
    plain = f"--checkpoint={tmp_path}/run.pt"
    done = fork(FILES, 2, "--epochs=1", f"--plain={tmp_path}/run.pt", folder=tmp_path)
    assert done.codes == [0, 0], done.err
    assert fork("00_single_gpu.py", 1, "--epochs=2", plain, folder=tmp_path).codes == [0]
    done = fork("03_multinode.py", 2, "--epochs=3", plain, folder=tmp_path)
    assert_epochs(done.epochs, reference)


def test_the_crash_safe_file(reference, tmp_path):
    """It is Lightning's own. A full disk while it is written leaves the last one as it was."""
    path = tmp_path / "checkpoint.pt"

    def full_disk():
        def save(state, file, **options):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        torch.save = save

    assert fork(FILES, 2, "--epochs=1", folder=tmp_path).codes == [0, 0]
    before = path.read_bytes()
    done = fork(FILES, 2, "--epochs=2", folder=tmp_path, before=full_disk)
    assert done.codes[0] == 2 and done.codes[1] != 0
    assert f"cannot write {path}.tmp: No space left on device. Make room" in done.err, done.err
    assert path.read_bytes() == before and not list(tmp_path.glob("*.tmp"))
    (tmp_path / "log.json").unlink()
    done = fork(RUNG, 2, "--epochs=2", folder=tmp_path)
    assert done.codes == [0, 0], done.err
    assert_epochs(done.epochs, reference[1:2])


def test_its_plugin_stands_beside_that_of_slurm():
    """auto_requeue=False comes from checks; it must not get lost for the CheckpointIO."""

    def show_and_end():
        import lightning as L
        from lightning.pytorch.plugins.environments import SLURMEnvironment

        def trainer(plugins, **options):
            print([(type(plugin).__name__) for plugin in plugins], plugins[0].auto_requeue)
            sys.exit(7)

        by_hand()
        SLURMEnvironment.detect = staticmethod(lambda: True)
        L.Trainer = trainer

    done = fork(FILES, 1, before=show_and_end)
    assert done.out == "['SLURMEnvironment', 'AtomicCheckpointIO'] False\n", done.err


def test_one_name_for_both_files():
    done = fork(FILES, 1, "--checkpoint=a.pt", "--plain=./a.pt")
    assert done.codes == [2] and "./a.pt cannot be both files" in done.err, done.err


# ---- topics/sync_once.py -------------------------------------------------------------------------

ONCE = "topics/sync_once.py"
KEEP = """    pieces = breaks = 0

    def __init__(self, args):
        super().__init__(args)
        INIT

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.args.lr, momentum=0.9)

    def on_train_batch_start(self, batch, batch_index):
        self.batch_index = batch_index

    def on_train_batch_end(self, *_):
        now = {name: value.clone() for name, value in self.state_dict().items()}
        self.kept = [*getattr(self, "kept", []), now]
        torch.save(self.kept, f"kept.{self.global_rank}")
"""
NOT_COMPILED = (
    "torch.compile(self.model.forward, backend=self.count_and_compile)",
    "self.model.forward",
)


def each_step(strategy, folder, init, trainer, **strategy_options):
    """Return (rank 0's, rank 1's) weights after each of six batches."""

    def edit(source):
        for old, new in (
            ("    pieces = breaks = 0\n", KEEP.replace("INIT", init or "pass")),
            ("module=Classifier)", f"module=Classifier, limit_train_batches=6, {trainer})"),
            NOT_COMPILED,
        ):
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        return source

    def before():
        """Show the all-reduces that the strategy calls, not the ones that it says it has called."""
        from lightning.pytorch.strategies import StrategyRegistry

        StrategyRegistry["ddp"]["init_params"] = strategy_options
        all_reduce, manual_seed = torch.distributed.all_reduce, torch.manual_seed

        def shown(tensor, *args, **options):
            print("all-reduce of", tensor.numel())
            return all_reduce(tensor, *args, **options)

        torch.distributed.all_reduce = shown
        if init and "own" in init:  # the ranks start with other weights
            torch.manual_seed = lambda seed: manual_seed(int(os.environ["RANK"]))

    words = [f"--strategy={strategy}", "--epochs=1"]
    done = whole(ONCE, 2, *words, folder=folder / strategy, edit=edit, before=before)
    assert not any(done.codes), done.err
    kept = [torch.load(folder / strategy / f"kept.{rank}") for rank in range(2)]
    assert len(kept[0]) == len(kept[1]) == 6
    return kept, done


# Another last layer on rank 1: the layer is there on both, and each uses its own
UNUSED = (
    "self.extra, self.never = torch.nn.Linear(10, 10), torch.nn.Linear(2, 2); "
    "self.model.register_forward_hook(lambda model, inputs, out: self.extra(out) "
    "if self.training and self.global_rank == 1 and self.batch_index in (1, 2) else out)"
)
FROZEN = "self.model[1].requires_grad_(False)"
BUFFER = "self.register_buffer('own', torch.rand(3))"
NORM = "self.model.append(torch.nn.BatchNorm1d(10))"
BUFFERS = ("own", "model.11.running", "model.11.num")
CASES = {  # what is added to the model, options of the Trainer, steps of six batches
    "plain": ("", "", 6),
    "weights and buffers of rank 0": (BUFFER, "", 6),
    "buffers of each rank": (NORM, "", 6),
    "accumulation": ("", "accumulate_grad_batches=2,", 3),
    "accumulation with a rest": ("", "accumulate_grad_batches=4,", 2),
    "frozen": (FROZEN, "", 6),
    "unused on a rank": (UNUSED, "", 6),
    "clipping": ("", "gradient_clip_val=0.05,", 6),
    "clipping values": ("", "gradient_clip_val=0.001, gradient_clip_algorithm='value',", 6),
    "all": (f"{UNUSED}; {FROZEN}", "accumulate_grad_batches=2, gradient_clip_val=0.05,", 3),
}


@pytest.mark.parametrize("case", CASES)
def test_sync_once_is_ddp(case, tmp_path):
    """The same weights as DDP's on both ranks after each batch, with one all-reduce a step.

    It takes the gradients, and of each weight whether it has one. Others are of 4 numbers or less.
    """
    init, trainer, steps = CASES[case]
    options = {"find_unused_parameters": True} if UNUSED in init else {}
    # DDP would give all ranks the buffers of rank 0, before each forward pass.
    options |= {"broadcast_buffers": False} if init == NORM else {}
    ddp, _ = each_step("ddp", tmp_path, init, trainer, **options)
    once, done = each_step("sync_once", tmp_path, init, trainer)
    assert f"{steps} all-reduces of gradients in {steps} steps" in done.out
    rest = (*BUFFERS, "model.1.") if FROZEN in init else BUFFERS
    sizes = [value.numel() + 1 for name, value in ddp[0][0].items() if not name.startswith(rest)]
    sent = [int(size) for size in re.findall(r"^all-reduce of (\d+)$", done.out, re.M)]
    assert [size for size in sent if size > 4] == [sum(sizes)] * steps * 2
    for batch in range(6):
        for rank in range(2):
            for name, value in ddp[rank][batch].items():
                torch.testing.assert_close(once[rank][batch][name], value, rtol=0, atol=1e-6)
    moved = ddp[0][-1]["model.10.weight"] - ddp[0][0]["model.10.weight"]
    assert moved.abs().max() > 1e-4
    if case == "buffers of each rank":
        names = [name for name in once[0][-1] if name.startswith(BUFFERS)]
        assert any(not torch.equal(once[0][-1][name], once[1][-1][name]) for name in names)
    if "extra.weight" in ddp[0][0]:
        assert not torch.equal(ddp[0][0]["extra.weight"], ddp[0][-1]["extra.weight"])
        assert torch.equal(ddp[0][0]["never.weight"], ddp[0][-1]["never.weight"])


def test_sync_once_counts_the_steps_of_this_run(tmp_path):
    """A resumed run has made the all-reduces of its own steps only."""
    for epochs in (1, 2):
        options = {"folder": tmp_path, "edit": lambda text: text.replace(*NOT_COMPILED)}
        done = whole(ONCE, 2, f"--epochs={epochs}", **options)
        assert done.codes == [0, 0], done.err
    assert done.out.count("41 all-reduces of gradients in 41 steps") == 2, done.out


def test_sync_once_trains_what_it_has_compiled(whole_reference):
    done = whole(ONCE, 2, "--epochs=2")
    assert done.codes == [0, 0], done.err
    assert_epochs(done.epochs, whole_reference[:2])
    assert " | compiled pieces: 1, graph breaks: 0" in done.out


# Weights for several buckets, and a single step
WIDE = ["--model=wide", "--dataset=fake:96", "--image-size=16", "--epochs=1"]


def test_sync_once_compiles_the_plain_model():
    """DDP cuts a model that fills more than a bucket. This strategy leaves it whole."""
    found = {}
    said = {
        "ddp": "measured compiled pieces: 2, expected a cut at each of DDP's buckets, therefore",
        "sync_once": "measured 1 all-reduces of gradients, compiled pieces: 1, expected 1 and 1,",
    }
    for strategy in ("ddp", "sync_once"):
        done = whole(ONCE, 2, f"--strategy={strategy}", *WIDE)
        assert done.codes == [0, 0], done.err
        found[strategy] = re.search(r"pieces: (\d+), graph breaks: (\d+)", done.out).groups()
        losses = done.epochs[0]["train_loss"]
        assert said[strategy] in done.out and "uncounted" not in done.out
    assert found == {"ddp": ("2", "0"), "sync_once": ("1", "0")}
    assert losses > 0


def test_sync_once_counts_graph_breaks_and_takes_any_backend():
    def backend():
        def counted(graph, inputs):
            print("compiled by this backend")
            return graph

        torch._dynamo.register_backend(counted)

    cut = "self.model[1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())"

    def edit(source):
        line = "        self.model.forward = "
        return source.replace(line, f"        {cut}\n{line}")

    done = whole(ONCE, 1, "--backend=counted", *WIDE, before=backend, edit=edit)
    assert done.codes == [0], done.err
    pieces, breaks = re.search(r"pieces: (\d+), graph breaks: (\d+)", done.out).groups()
    compiled = done.out.count("compiled by this backend")
    assert 0 < int(pieces) <= compiled and int(breaks) > 0


# ---- topics/lightning_launch.py ------------------------------------------------------------------

NAMES = ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"]


def processes(*command):
    """Return lines (process, parent, variables, arguments), the variables as dicts, the end."""
    done = launch(*command, *TINY)
    assert done.returncode == 0 and done.stdout.count("epoch 1/1") == 1, done.stderr
    [entry] = fork("00_single_gpu.py", 1, *TINY).epochs
    assert f"train loss {entry['train_loss']:.4f}" in done.stdout
    lines = re.findall(r"^process (\d+), child of (\d+) \| (.*?) \| (.*)$", done.stdout, re.M)
    assert len(lines) == 2
    assert lines[0][3].split()[1:] == lines[1][3].split()[1:]
    variables = [dict(word.split("=") for word in line[2].split()) for line in lines]
    assert all(list(found) == NAMES for found in variables)
    [last] = re.findall("^measured .*$", done.stdout, re.M)
    return lines, variables, last


@pytest.mark.cold  # who is whose parent
def test_lightning_starts_the_script_again():
    """From the first process, which has no rank yet; the second has one, and the same words."""
    words = ["-m", "topics.lightning_launch", "--devices=2", "--timeout=90"]
    lines, variables, last = processes(sys.executable, *words)
    assert last.startswith("measured children of rank 0: 1, ranks: 2, expected all others")
    (first, _, _, words), (_, parent, _, others) = lines
    assert parent == first
    assert words == others and "lightning_launch.py --devices=2 --timeout=90" in words
    assert set(variables[0].values()) == {"-"}
    port = variables[1].pop("MASTER_PORT")
    expected = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "LOCAL_RANK": "1", "RANK": "-"}
    assert port.isdigit() and variables[1] == expected | {"WORLD_SIZE": "2"}


@pytest.mark.cold
def test_torchrun_has_started_all_before():
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "topics.lightning_launch"]
    lines, variables, last = processes(*command)
    assert "rank 0: 0, ranks: 2" in last and last.endswith("therefore it has started none")
    assert lines[0][1] == lines[1][1] not in (lines[0][0], lines[1][0]), "torchrun is the parent"
    assert {found["LOCAL_RANK"] for found in variables} == {"0", "1"}
    assert all(found["RANK"] == found["LOCAL_RANK"] for found in variables)
    assert all(found["WORLD_SIZE"] == "2" for found in variables)


# ---- topics/lightning_logging.py -----------------------------------------------------------------


def hits(done, whole_reference, size=997):
    """Return, for each of the test samples, whether the weights in the checkpoint are right.

    They have been trained as those of 00.
    """
    assert done.epochs[0]["train_loss"] == pytest.approx(whole_reference[0]["train_loss"], abs=5e-5)
    return right_ones(lightnings(done.checkpoint)["state_dict"], size)


def right_ones(weights, size):
    """Return, for each of the first test samples, whether a model with these weights is right."""
    args = SimpleNamespace(model="small", channels=1, image_size=28, dataset="digits")
    model = common.build_model(args).eval()
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
    images, labels = common.load_datasets(args)[1][:size]
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_logging(world_size, whole_reference):
    """Only the sums are exact: sync_dist divides by a mean of the ranks' counts, cut to a whole."""
    done = whole("topics/lightning_logging.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    found = dict(re.findall(r"^(\w+) +(\d+\.\d{4})%", done.out, re.M))
    right = hits(done, whole_reference)
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
        done = whole("topics/lightning_logging.py", 1, f"--epochs={epochs}", **options)
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
                time.sleep(0.01 if name == "barrier" else 0)
                return function(*args, **options)

            setattr(torch.distributed, name, counted)
        show = common.log_epoch

        def log_epoch(*args):
            print("collectives:", calls.count("all_reduce"), calls.count("barrier"))
            show(*args)

        common.log_epoch = log_epoch

    counts, times = [], []
    for edit in (None, lambda text: text.replace("loss, sync_dist=True", "loss")):
        done = whole("topics/lightning_logging.py", 2, "--epochs=1", before=count, edit=edit)
        counts.append([int(x) for x in re.search(r"collectives: (\d+) (\d+)", done.out).groups()])
        times.append(float(re.search(r"with sync_dist (\S+) ms", done.out)[1]))
    assert [a - b for a, b in zip(*counts, strict=True)] == [41, 41]
    assert times[0] >= 10


def test_the_wait_for_the_slowest_rank_is_in_it():
    """Rank 1 comes 20 ms late: rank 0 waits for it in the log with sync_dist, and says so."""

    def edit(text):
        late, start = "time.sleep(0.02 * self.global_rank)", "times = [time.perf_counter()]"
        return text.replace(start, f"{late}\n        {start}")

    done = whole("topics/lightning_logging.py", 2, "--epochs=1", edit=edit)
    words = r"with sync_dist (\S+) ms, the wait for the slowest rank included$"
    assert float(re.search(words, done.out, re.M)[1]) > 10


def test_the_deadlock_ends_and_says_why():
    words = ["--epochs=1", "--deadlock=1", "--timeout=5"]
    done = whole("topics/lightning_logging.py", 2, *words)
    assert done.codes[0] == 2 and done.codes[1] != 0 and not done.epochs
    assert "rank 0 waited in self.log, for ranks that do not call it" in done.err
    assert "Timed out waiting 5000ms" in done.err


# ---- topics/lightning_validation.py --------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation(world_size, whole_reference):
    done = whole("topics/lightning_validation.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    lines = re.findall(r"^(padded|one device|exact) +(\d+) of (\d+) = (\S+)%$", done.out, re.M)
    found = {way: (int(correct), int(tested)) for way, correct, tested, _ in lines}
    assert all(f"{int(c) / int(t):.4%}" == f"{share}%" for _, c, t, share in lines)
    right = hits(done, whole_reference)
    padded = -(-997 // world_size) * world_size  # the sampler begins again at the first samples
    expected = {"padded": (sum(right) + sum(right[: padded - 997]), padded)}
    assert found == expected | {"one device": (sum(right), 997), "exact": (sum(right), 997)}
    assert world_size == 1 or padded > 997


def test_validation_started_by_lightning():
    """The second Trainer must not start processes, nor ask for those of the first."""
    command = [sys.executable, "-m", "topics.lightning_validation", "--devices=2", "--epochs=1"]
    done = launch(*command)
    assert done.returncode == 0, done.stderr
    ways = re.findall(r"^(padded|one device|exact) +\d+ of (\d+)", done.stdout, re.M)
    assert ways == [("exact", "997"), ("padded", "998"), ("one device", "997")]


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
        done = whole("topics/lightning_early_stopping.py", 2, f"--epochs={epochs}", **options)
        assert done.codes == [0, 0], done.err
    done.out = done.out[done.out.index("resumes after epoch 7") :]
    accuracies = [entry["test_accuracy"] for entry in done.epochs]
    best = accuracies.index(max(accuracies))
    assert best == 6 and len(accuracies) == best + 1 + 2, accuracies
    assert "measured last epochs: 1, best scores: 1, ranks: 2, expected 1 and 1" in done.out
    [file] = tmp_path.glob("*best*")
    assert file.name == f"checkpoint-best-epoch={best}.ckpt"
    assert (
        decisions(done) == ((str(len(accuracies)), file.name, f"{max(accuracies):.1%}"[:-1]),) * 2
    )
    assert sum(right_ones(lightnings(file)["state_dict"], 1000)) == round(max(accuracies) * 1000)


def test_early_stopping_by_each_ranks_own_number(tmp_path):
    """All stop when one has lost patience; a file is written only when all have improved."""

    def edit(text):
        counts = "{self.global_rank} {int(right.sum())} {len(right)}"
        shown = f'print(f"own {counts}\\n", end="", flush=True)'
        line = "        if self.args.log"
        assert line in text
        return text.replace(line, f"        {shown}\n{line}")

    words = ["--epochs=20", "--log=own"]
    options = {"folder": tmp_path, "edit": edit}
    done = whole("topics/lightning_early_stopping.py", 2, *words, **options)
    own = []
    for rank in "01":
        found = re.findall(rf"^own {rank} (\d+) (\d+)$", done.out, re.M)
        batches = len(found) // len(done.epochs)
        parts = [found[i : i + batches] for i in range(0, len(found), batches)]
        own.append([sum(int(a) for a, _ in part) / sum(int(b) for _, b in part) for part in parts])
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
    assert "measured last epochs: 1, best scores: 2, ranks: 2, expected 1 and 1" in done.out
    assert [file.name for file in tmp_path.glob("*best*")] == [same[1]]
    accuracies = [entry["test_accuracy"] for entry in done.epochs]
    assert accuracies[kept] < max(accuracies), "the best epoch was missed"


def test_a_number_that_only_rank_0_has(tmp_path):
    """The first callback that looks for it says so, on rank 1, and nobody waits for long."""
    words = ["--log=rank_0", "--timeout=20"]
    done = whole("topics/lightning_early_stopping.py", 2, *words, folder=tmp_path)
    assert all(done.codes) and len(done.epochs) == 1
    missing = "Early stopping conditioned on metric `accuracy` which is not available"
    assert done.err.count(missing) == 1, done.err
    assert not list(tmp_path.glob("*best*"))


@pytest.mark.parametrize("option", ["--log=loss", "--checkpoint="])
def test_options_of_early_stopping(option):
    done = whole("topics/lightning_early_stopping.py", 1, option)
    assert done.codes == [2] and done.err.count("\n") == 1, done.err
    assert "invalid choice: 'loss'" in done.err or "needs a --checkpoint" in done.err


# ---- topics/lightning_debugging.py ---------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_debugger_on_rank_0_in_lightning(launcher):
    """A line from each rank; then rank 0's prompt, in its own step, and at its end c goes on."""
    pexpect = pytest.importorskip("pexpect")
    command = [sys.executable, "-m", "topics.lightning_debugging"]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", command[-1]]
    environ = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"}
    words = [*command[1:], "--epochs=1", "--timeout=60", "--at=2"]
    options = {"cwd": ROOT, "env": environ, "timeout": 60, "encoding": "utf8"}
    child = pexpect.spawn(command[0], words, **options)
    child.logfile_read = screen = io.StringIO()
    try:
        child.expect(r"Pdb\)")  # rank 1's line may come between it and its first bracket
        child.sendline("print('here is', self.global_rank, 'of', self.trainer.world_size)")
        child.expect("here is 0 of 2")
        child.sendline("print('batch', batch_index, 'has', len(batch[1]))")
        child.expect("batch 2 has 48")
        child.sendline("c")
        child.expect("epoch 1/1 .*train loss")
        child.expect(pexpect.EOF)
        child.wait()  # close() would send SIGHUP to one that is still about to end
        assert child.exitstatus == 0
    finally:
        child.close(force=True)
    for rank in range(2):
        assert re.search(rf"rank {rank} \| batch 2 \| loss \d\.\d+", screen.getvalue())
        assert f"rank {rank} | behind the barrier" in screen.getvalue()


def test_the_others_wait_for_the_debugger(whole_reference):
    """Rank 1 is behind the barrier only after rank 0 has left its breakpoint."""

    def slow_breakpoint():
        def wait():
            time.sleep(2)
            print("leaves the breakpoint", time.monotonic(), flush=True)

        sys.breakpointhook = wait

    def edit(text):
        text = text.replace("import sys\n", "import sys\nimport time\n")
        return text.replace("behind the barrier", "behind {time.monotonic()}")

    done = whole(
        "topics/lightning_debugging.py", 2, "--epochs=1", edit=edit, before=slow_breakpoint
    )
    assert done.codes == [0, 0], done.err
    left = float(re.search(r"leaves the breakpoint (\S+)", done.out)[1])
    behind = re.findall(r"rank \d \| behind (\S+)", done.out)
    assert len(behind) == 2 and all(float(moment) > left for moment in behind)
    assert_epochs(done.epochs, whole_reference[:1])


# ---- topics/lightning_options.py -----------------------------------------------------------------

OPTIONS = "topics/lightning_options.py"


@pytest.mark.parametrize(
    ("variant", "rounded", "measured"),
    [
        ("none", 0, "41 backward passes, 41 with an all-reduce, 41 steps, precision 32-true"),
        ("static", 0, "41 backward passes, 41 with an all-reduce, 41 steps, precision 32-true"),
        ("bf16_hook", 0.01, "41 backward passes, 41 with an all-reduce, 41 steps, precision 32"),
        ("unused", 0, "41 backward passes, 41 with an all-reduce, 41 steps, precision 32-true"),
        ("accumulate", 0, "164 backward passes, 41 with an all-reduce, 41 steps, precision 32"),
        (
            "16-mixed",
            0.01,
            "41 backward passes, 41 with an all-reduce, 41 steps, precision bf16-mi",
        ),
    ],
)
def test_ddp_options_in_lightning(variant, rounded, measured, whole_reference):
    done = whole(OPTIONS, 2, "--epochs=1", f"--variant={variant}")
    assert done.codes == [0, 0], done.err
    assert done.out.count("| prepare_data\n") == 1 and "rank 0 | prepare_data" in done.out
    assert sorted(re.findall(r"rank (\d) \| setup\n", done.out)) == ["0", "1"]
    assert f"measured {measured}" in done.out, done.out
    assert "therefore each step has one all-reduce\n" in done.out
    if rounded:
        difference = done.epochs[0]["train_loss"] - whole_reference[0]["train_loss"]
        assert 0 < abs(difference) < rounded
    else:
        assert_epochs(done.epochs, whole_reference[:1])


def test_the_options_topic_counts_this_run_only(tmp_path):
    """A resumed run: steps and passes of its own two epochs, not those of the checkpoint."""
    for epochs in (1, 3):
        done = fork(OPTIONS, 2, f"--epochs={epochs}", "--variant=accumulate", folder=tmp_path)
        assert done.codes == [0, 0], done.err
    numbers = r"measured (\d+) .* (\d+) with an .* (\d+) steps.* expected (\d+)"
    counts = re.findall(numbers, done.out)
    assert counts == [("20", "5", "5", "20"), ("40", "10", "10", "40")]


def test_what_the_options_topic_says_of_lightning():
    """A step of what is left at the end of an epoch, and an error where a layer is not used."""
    drop = {"edit": lambda text: text.replace(', "limit_train_batches": whole', "")}
    done = whole(OPTIONS, 2, "--epochs=1", "--variant=accumulate", **drop)
    assert "measured 166 backward passes, 42 with an all-reduce, 42 steps" in done.out, done.err
    each = {"edit": lambda text: text.replace("self.sent += self", "self.sent += 1 or self")}
    done = fork(OPTIONS, 2, "--epochs=1", "--variant=accumulate", **each)
    assert "20 with an all-reduce, 5 steps" in done.out and "therefore not each step" in done.out
    found = {"edit": lambda text: text.replace('{"find_unused_parameters": True}', "{}")}
    done = fork(OPTIONS, 2, "--epochs=1", "--variant=unused", **found)
    assert all(done.codes) and "parameters that were not used" in done.err
    done = fork(OPTIONS, 2, "--variant=accumulate", "--batch-size=100")
    assert set(done.codes) == {2} and "a rank's batch of 50 does not split into 4" in done.err
