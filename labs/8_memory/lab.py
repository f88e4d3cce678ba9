"""Lab 8: what a rank keeps, on paper; what it really takes, where there is a GPU."""

import csv
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import ROOT, Learner, Result, gpu_count, run, why

TITLE, MINUTES, LIMIT = "Memory (a GPU room)", 45, 300
FAILS = "GB"
QUESTIONS = {
    "ddp_gb": "GB (1e9 bytes) of weights, gradients and Adam's state on a rank, under DDP",
    "zero_gb": "the same, with the optimizer's state alone shared out (zero_optimizer.py)",
    "fsdp_gb": "the same, with all three shared out (fsdp.py), between two layers",
    "peak_1": "with a GPU: MB at the peak with --accumulation-steps 1; without one leave it empty",
    "peak_4": "with a GPU: MB at the peak with --accumulation-steps 4",
}
HINTS = [
    "Write down for one parameter: which numbers does a rank keep of it, and how many bytes each?",
    "topics/zero_optimizer.py and topics/fsdp.py print what a rank keeps.",
    "Adam keeps two numbers of a parameter, float32 has 4 bytes. 4 + 4 + 8.",
    "What is shared out by n ranks is divided by n: the 8, or all 16 bytes.",
]


def job(learner):
    """Return the learner's own model (millions of parameters) and number of ranks."""
    return learner.pick("model", (350, 760, 1300, 2700)), learner.pick("ranks", (2, 4, 8))


def files(learner):
    millions, ranks = job(learner)
    text = f"{millions} million parameters in float32, Adam, {ranks} ranks. Activations: not asked."
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


def check(work, learner, answers):
    results = []
    for name, value in right(learner).items():
        said = answers.get(name)
        good = isinstance(said, int | float) and abs(said - value) < 0.02 * value
        text = f"{said} GB" if good else f"{said} GB is not it: see job.txt"
        results.append(Result(name, good, text))
    if not all(result.passed for result in results):
        return results
    found = peaks()
    if isinstance(found, str):
        return [*results, Result("GPU", None, found)]
    for name, value in found.items():
        said = answers.get(name)
        good = isinstance(said, int | float) and abs(said - value) < 0.05 * value
        text = f"{said} MB" if good else f"{said} MB is not what this machine's GPU takes"
        results.append(Result(name, good, text))
    return results


def SOLUTION(learner):
    found = peaks()
    return {}, right(learner) | (found if isinstance(found, dict) else {})


MODEL, RANKS = job(Learner("you"))
WRONG = [
    ("no optimizer", {}, {"ddp_gb": MODEL * 8 / 1000}, "ddp_gb"),
    ("all is shared out", {}, {"zero_gb": MODEL * 16 / 1000 / RANKS}, "zero_gb"),
    ("as DDP", {}, {"fsdp_gb": MODEL * 16 / 1000}, "fsdp_gb"),
]
