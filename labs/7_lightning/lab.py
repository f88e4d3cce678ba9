# ruff: noqa: E501  the edits of a rung are as long as its lines
"""Lab 7: rung 04 with one fault, and who does what in Lightning."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import (
    CPU,
    ROOT,
    Result,
    epochs_of,
    must_end,
    patched,
    run,
    sealed,
    unanswered,
    why,
)

TITLE, MINUTES, LIMIT = "Lightning: what it did for you", 45, 180
FAILS = "not the numbers of 02"
WHO = '"lightning" or "you"'
QUESTIONS = {
    "set_epoch": f"who calls sampler.set_epoch() in 04? {WHO}",
    "wrap": f"who wraps the model in DDP? {WHO}",
    "zero_grad": f"who calls zero_grad, backward and step? {WHO}",
    "test_shard": f"who gives each rank its share of the test set, each image once? {WHO}",
    "batch_split": f"who divides --batch-size by the number of ranks? {WHO}",
    "sums": f"who says that the metrics are sums over all ranks, not a mean of means? {WHO}",
    "launch": f"who starts the second process of python 04_lightning.py? {WHO}",
    "buffers": f"who sends batch norm's statistics of rank 0 before the evaluation? {WHO}",
}
SEALS = {
    "set_epoch": "07bd86c99700644b",
    "wrap": "15ccc51bfd1a5dbf",
    "zero_grad": "352cda1261c41b43",
    "test_shard": "e295936449d62bc7",
    "batch_split": "a14f429cf6a21ee1",
    "sums": "aa5a10de48021630",
    "launch": "cf93d040f181fc5b",
    "buffers": "0f8bcf375f6839f4",
}
HINTS = [
    "Lightning does not know what --batch-size means, how the test set is to be shared, nor which "
    "metrics are sums over the ranks. The fault is in one of the three.",
    "test_samples is the sum over both ranks. Twice as many: the share of the test set. Half: the "
    "sum.",
    "test_samples is right, and the loss is another one? Print len(labels) in training_step: how "
    "many samples does a rank take in a step?",
    "diff 04_lightning.py labs/mine/7_lightning/starter.py shows what is not the rung's.",
]
SMALL = ["--dataset=fake:500", "--image-size=16", "--batch-size=32", "--epochs=2"]
HEAD = [
    (
        "import time\nfrom pathlib import Path\n",
        "import sys\nimport time\nfrom pathlib import Path\n",
    ),
    (
        "import checks\n",
        'sys.path.insert(0, f"{Path(__file__).resolve().parent}/../../..")  # the repo\'s root\n'
        "import checks\n",
    ),
]
FAULTS = {
    "whole": (
        "        share = range(self.trainer.global_rank, len(self.test_set), self.trainer.world_size)\n",
        "        share = range(len(self.test_set))\n",
    ),
    "alone": ('"sync_dist": True', '"sync_dist": False'),
    "batch": ("self.args.per_rank_batch", "self.args.batch_size"),
}


def files(learner):
    fault = learner.pick("fault", FAULTS)
    text = patched("04_lightning.py", [*HEAD, FAULTS[fault]])
    head = '''"""Lab 7: rung 04 with one fault. It trains on two processes, and its numbers are not those of 02.

The task is in labs/7_lightning/README.md. torchrun --standalone --nproc-per-node=2 starter.py
"""
'''
    return {"starter.py": head + text.partition('"""\n')[2]}


runs = {}  # text: what train() has returned


def train(script):
    """Return what a script logs on two ranks: (run, epochs)."""
    if (key := script.read_text()) not in runs:
        with TemporaryDirectory(prefix="lab-") as folder:
            log = Path(folder) / "log.json"
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command = [sys.executable, *torchrun, script.name, *SMALL, f"--log-json={log}"]
            done = run(command, script.parent, 80, CPU)
            runs[key] = done, epochs_of(log)
    return runs[key]


def check(work, learner, answers):
    return numbers(work / "starter.py") + told(answers)


def numbers(script):
    """Compare what the script logs with rung 02."""
    done, epochs = train(script)
    reference, wanted = train(ROOT / "02_torchrun.py")
    must_end(reference, "02_torchrun.py")
    if done.code != 0 or len(epochs) != len(wanted):
        text = why(done) if done.code else f"{len(epochs)} lines in --log-json, not {len(wanted)}"
        return [Result("two ranks", False, text)]
    results = []
    for name in ("train_loss", "test_accuracy", "test_samples"):
        pairs = [(a[name], b[name]) for a, b in zip(epochs, wanted, strict=True)]
        same = all(abs(a - b) <= 1e-5 * max(1, abs(b)) for a, b in pairs)
        text = ", ".join(f"{a:.6g} (02: {b:.6g})" for a, b in pairs)
        results.append(Result(name, same, text if same else f"{text}: not the numbers of 02"))
    return results


def told(answers):
    results = []
    for name, seal in SEALS.items():
        said = str(answers.get(name, "")).strip().lower()
        if said not in ("lightning", "you"):
            results.append(unanswered(name, WHO))
            continue
        good = sealed(f"{name} {said}") == seal
        more = "" if good else " is not it: find the line of 03 in 04, if it is there"
        results.append(Result(name, good, f"{said}{more}"))
    return results


def SOLUTION(learner):
    answers = {
        name: who
        for name, seal in SEALS.items()
        for who in ("lightning", "you")
        if sealed(f"{name} {who}") == seal
    }
    text = patched("04_lightning.py", HEAD)
    return {"starter.py": text}, answers


def patched_04(edit):
    return {"starter.py": patched("04_lightning.py", [*HEAD, edit])}


WRONG = [
    *((name, patched_04(edit), {}, FAILS) for name, edit in FAULTS.items()),
    (
        "a mean instead of a sum",
        patched_04(('"correct": right.sum()', '"correct": right.mean()')),
        {},
        "test_accuracy",
    ),
    ("Lightning shards all", {}, {"test_shard": "lightning"}, "test_shard"),
    ("nobody calls set_epoch", {}, {"set_epoch": "you"}, "set_epoch"),
]
