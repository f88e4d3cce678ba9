"""Lightning's strategies, and the topics that are variants of rung 04."""

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import common
from ladder import ROOT, TORCHRUN, fork, launch, launcher_env, without_launcher

TWO = ["--epochs=2"]


@pytest.fixture(scope="module")
def reference():
    """Three epochs of rung 00."""
    done = fork("00_single_gpu.py", 1, "--epochs=3")
    assert len(done.epochs) == 3
    return done.epochs


def assert_epochs(epochs, reference):
    """The losses of 00 to four decimals, and its accuracy exactly."""
    assert [entry["epoch"] for entry in epochs] == [entry["epoch"] for entry in reference]
    for ours, theirs in zip(epochs, reference, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=5e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]


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
    words = [f"--checkpoint={tmp_path / 'checkpoint.pt'}", "--epochs=2"]
    done = launch(sys.executable, "04_lightning.py", "--devices=2", "--strategy=ddp_spawn", *words)
    assert done.returncode == 0, done.stderr
    for entry in reference[:2]:
        assert f"train loss {entry['train_loss']:.4f} | test accuracy" in done.stdout
    assert (tmp_path / "checkpoint.ckpt").exists()
    done = fork("00_single_gpu.py", 1, "--epochs=3", folder=tmp_path)
    assert_epochs(done.epochs, reference[2:])


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


def test_deepspeed_is_looked_for_before_the_start():
    def gpus_without_deepspeed():
        common.gpu_count, common.find_spec = lambda: 2, lambda name: None

    done = fork("04_lightning.py", 1, "--strategy=deepspeed_stage_2", before=gpus_without_deepspeed)
    assert done.codes == [2] and "needs deepspeed: pip install deepspeed" in done.err


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

    find_unused = "find_unused_parameters=True, " if any("rank" in c[1] for c in changes) else ""
    words = [f"--strategy={strategy}", "--epochs=1"]
    done = fork("topics/sync_once.py", 2, *words, folder=folder / strategy, edit=edit)
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
CASES = {
    "plain": ([], "", 6),
    "weights of rank 0": ([OTHER_START], "", 6),
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
    """The same weights as DDP's on both ranks after each batch, with one all-reduce a step."""
    changes, trainer, steps = CASES[case]
    ddp, _ = each_step("ddp", tmp_path, *changes, trainer=trainer)
    ours, done = each_step("sync_once", tmp_path, *changes, trainer=trainer)
    assert f"{steps} all-reduces of gradients in {steps} steps" in done.out
    for batch in range(6):
        for name, value in ddp[0][batch].items():
            for rank in range(2):
                torch.testing.assert_close(ours[rank][batch][name], value, rtol=0, atol=1e-6)
    moved = ddp[0][-1]["model.9.weight"] - ddp[0][0]["model.9.weight"]
    assert moved.abs().max() > 1e-4
    if "extra.weight" in ddp[0][0]:
        assert not torch.equal(ddp[0][0]["extra.weight"], ddp[0][-1]["extra.weight"])
        assert torch.equal(ddp[0][0]["never.weight"], ddp[0][-1]["never.weight"])


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


# ---- topics/lightning_launch.py ------------------------------------------------------------------

NAMES = ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"]


def processes(*command):
    """Return the lines (process, parent, variables, arguments), and the variables as dicts."""
    done = launch(*command, "--epochs=1", "--checkpoint=")
    assert done.returncode == 0 and done.stdout.count("epoch 1/1") == 1, done.stderr
    lines = re.findall(r"^process (\d+), child of (\d+) \| (.*?) \| (.*)$", done.stdout, re.M)
    assert len(lines) == 2
    assert lines[0][3].split()[1:] == lines[1][3].split()[1:]
    variables = [dict(word.split("=") for word in line[2].split()) for line in lines]
    assert all(list(found) == NAMES for found in variables)
    return lines, variables


def test_lightning_starts_the_script_again():
    """From the first process, which has no rank yet; the second has one, and the same words."""
    words = ["--devices=2", "--lr=0.04"]
    lines, variables = processes(sys.executable, "-m", "topics.lightning_launch", *words)
    (first, _, _, words), (_, parent, _, others) = lines
    assert parent == first
    assert words == others and "lightning_launch.py --devices=2 --lr=0.04" in words
    assert set(variables[0].values()) == {"-"}
    port = variables[1].pop("MASTER_PORT")
    expected = {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", "LOCAL_RANK": "1", "RANK": "-"}
    assert port.isdigit() and variables[1] == expected | {"WORLD_SIZE": "2"}


def test_torchrun_has_started_all_before():
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "topics.lightning_launch"]
    lines, variables = processes(*command)
    assert lines[0][1] == lines[1][1] not in (lines[0][0], lines[1][0]), "torchrun is the parent"
    assert {found["LOCAL_RANK"] for found in variables} == {"0", "1"}
    assert all(found["RANK"] == found["LOCAL_RANK"] for found in variables)
    assert all(found["WORLD_SIZE"] == "2" for found in variables)


# ---- topics/lightning_logging.py -----------------------------------------------------------------


def hits(done, size=997):
    """Return, for each of the test samples, whether the weights in the checkpoint are right."""
    args = SimpleNamespace(model="small", channels=1, image_size=28, dataset="digits")
    model = common.build_model(args).eval()
    model.load_state_dict(done.state["weights"])
    images, labels = common.load_datasets(args)[1][:size]
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_logging(world_size):
    """Only the sums are exact: sync_dist divides by a mean of the ranks' counts, cut to a whole."""
    done = fork("topics/lightning_logging.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    found = dict(re.findall(r"^(\w+) +(\d+\.\d{4})%", done.out, re.M))
    right = hits(done)
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
        r"takes (\S+) ms a step, with sync_dist (\S+) ms", done.out
    ).groups()
    assert float(plain) > 0 and float(with_sync) > 0


def test_what_sync_dist_costs_is_collectives():
    """A barrier and an all-reduce a step, for a log that asks for them."""

    def count():
        calls = []
        for name in ("all_reduce", "barrier"):
            function = getattr(torch.distributed, name)

            def counted(*args, name=name, function=function, **options):
                calls.append(name)
                return function(*args, **options)

            setattr(torch.distributed, name, counted)
        show = common.log_epoch

        def log_epoch(*args):
            print("collectives:", calls.count("all_reduce"), calls.count("barrier"))
            show(*args)

        common.log_epoch = log_epoch

    counts = []
    for edit in (None, lambda text: text.replace("loss, sync_dist=True", "loss")):
        done = fork("topics/lightning_logging.py", 2, "--epochs=1", before=count, edit=edit)
        counts.append([int(x) for x in re.search(r"collectives: (\d+) (\d+)", done.out).groups()])
    assert [a - b for a, b in zip(*counts, strict=True)] == [41, 41]


def test_the_deadlock_ends_and_says_why():
    words = ["--epochs=1", "--deadlock=1", "--timeout=5"]
    done = fork("topics/lightning_logging.py", 2, *words)
    assert done.codes[0] == 2 and done.codes[1] != 0 and not done.epochs
    assert "rank 0 waited in self.log, for ranks that do not call it" in done.err
    assert "Timed out waiting 5000ms" in done.err


# ---- topics/lightning_validation.py --------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation(world_size):
    done = fork("topics/lightning_validation.py", world_size, "--epochs=1")
    assert not any(done.codes), done.err
    lines = re.findall(r"^(padded|one device|exact) +(\d+) of (\d+) = (\S+)%$", done.out, re.M)
    found = {way: (int(correct), int(tested)) for way, correct, tested, _ in lines}
    assert all(f"{int(c) / int(t):.4%}" == f"{share}%" for _, c, t, share in lines)
    right = hits(done)
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


def test_the_others_wait_for_the_debugger():
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
