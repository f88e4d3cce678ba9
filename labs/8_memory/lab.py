"""Lab 8: what a rank keeps, on paper; what it really takes, where there is a GPU."""

import csv
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import ROOT, Learner, Result, gpu_count, run, unanswered, why

TITLE, MINUTES, LIMIT = "Memory (a GPU room)", 45, 300
FAILS = "not answered yet"
QUESTIONS = {
    "ddp_gb": "GB (1e9 bytes) of weights, gradients and Adam's state on a rank, under DDP",
    "zero_gb": "the same, with the optimizer's state alone shared out evenly, as ZeRO does",
    "fsdp_gb": "the same, with all three shared out evenly, as FSDP does, between two layers",
    "peak_1": "with a GPU: MB at the peak with --accumulation-steps 1; without one leave it empty",
    "peak_4": "with a GPU: MB at the peak with --accumulation-steps 4",
}
HINTS = [
    "Write down for one parameter: which numbers does a rank keep of it, and how many bytes each?",
    "torchrun --standalone --nproc-per-node=2 -m topics.fsdp --epochs 1 prints what a rank keeps, "
    "without a GPU too. Its optimizer is SGD with momentum: one number a parameter, not Adam's.",
    "Adam keeps two numbers of a parameter, float32 has 4 bytes. 4 + 4 + 8.",
    "What is shared out by n ranks is divided by n: the 8, or all 16 bytes.",
]


def job(learner):
    """Return the learner's own model (millions of parameters) and number of ranks."""
    return learner.pick("model", (350, 760, 1300, 2700)), learner.pick("ranks", (2, 4, 8))


def files(learner):
    millions, ranks = job(learner)
    text = f"{millions} million parameters in float32, Adam, {ranks} ranks."
    text += "\nNot asked: activations, and the copies of the gradients in DDP's buckets."
    return {"job.txt": f"{text}\n"}


def right(learner):
    millions, ranks = job(learner)
    kept = {"ddp_gb": 16, "zero_gb": 8 + 8 / ranks, "fsdp_gb": 16 / ranks}
    return {name: millions * each / 1000 for name, each in kept.items()}


@cache
def peaks():
    """Return {question: MB at the peak on this machine's GPU}, or why not."""
    if not gpu_count():
        return "not tried here: this machine has no GPU"
    found = {}
    for steps in (1, 4):
        with TemporaryDirectory(prefix="lab-") as folder:
            file = Path(folder) / "rows.csv"
            command = [sys.executable, "benchmarks/scaling.py", "--models=resnet50", "--devices=1"]
            command += ["--scripts", "topics/gradient_accumulation.py", "--image-size=224"]
            command += ["--batch-size=128", "--windows=1", "--images=512", f"--csv={file}"]
            done = run([*command, f"--extra=--accumulation-steps={steps}"], ROOT, 120)
            if not file.exists():
                return f"not measured: {why(done, 'scaling.py')}"
            (row,) = csv.DictReader(file.read_text().splitlines())
            found[f"peak_{steps}"] = int(row["peak_memory_mb"])
    return found


def told(name, said, value, share, unit):
    """Compare an answer with a value, of which it may miss this share."""
    if said is None:
        return unanswered(name)
    if not isinstance(said, int | float):
        return Result(name, False, f"{said!r} is no number: write it without {unit}, as in 1.5")
    return Result(name, abs(said - value) < share * value, f"{said} {unit}")


def check(work, learner, answers):
    results, (millions, _) = [], job(learner)
    for name, value in right(learner).items():
        result = told(name, said := answers.get(name), value, 0.02, "GB")
        if not result.passed and isinstance(said, int | float):
            each = f"{1000 * said / millions:.3g} bytes a parameter"
            result = Result(name, False, f"{said} GB is not it: {each}. Which would these be?")
        results.append(result)
    if not all(result.passed for result in results):
        return results
    found = peaks()
    if isinstance(found, str):
        return [*results, Result("GPU", None, found)]
    for name, value in found.items():
        result = told(name, said := answers.get(name), value, 0.05, "MB")
        if not result.passed and isinstance(said, int | float):
            result = Result(name, False, f"{said} MB is not what this machine's GPU takes")
        results.append(result)
    return results


def SOLUTION(learner):
    found = peaks()
    return {}, right(learner) | (found if isinstance(found, dict) else {})


MODEL, RANKS = job(Learner("you"))
WRONG = [
    ("no optimizer", {}, {"ddp_gb": MODEL * 8 / 1000}, "ddp_gb"),
    ("all is shared out", {}, {"zero_gb": MODEL * 16 / 1000 / RANKS}, "zero_gb"),
    ("no answer", {}, {"ddp_gb": None}, "ddp_gb: not answered yet"),
    ("with its unit", {}, {"zero_gb": "7.6 GB"}, "zero_gb: '7.6 GB' is no number"),
    ("with DDP's buckets", {}, {"ddp_gb": MODEL * 20 / 1000}, "20 bytes a parameter"),
    ("as DDP", {}, {"fsdp_gb": MODEL * 16 / 1000}, "fsdp_gb"),
]
