"""Lab 9: what of the all-reduce is hidden, read from a picture of the learner's own run."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import ROOT, Result, gpu_count, run, sealed

TITLE, MINUTES, LIMIT = "Overlap (best in a GPU room)", 45, 60
FAILS = "timeline.html"
QUESTIONS = {
    "buckets": "how many all-reduces are there in a step of your picture?",
    "exposed": "which part of the step is exposed, as in 0.25?",
    "last_bucket": 'can the last all-reduce hide behind the backward pass? "yes" or "no"',
    "mostly": 'what is most of the red of rank 0: "travel", or "wait" for a slower rank?',
}
SEALS = {"last_bucket": "f8154bd9792f98da"}
HINTS = [
    "The picture has a line a rank. When does the first bucket leave, when the last, and what does "
    "the rank compute at that time?",
    "python labs/timeline.py 02_torchrun.py --output labs/mine/9_overlap/timeline.html -- "
    "--model wide. Point at a bar to read it; the table below has milliseconds a step.",
    "The last bucket holds the first layers' gradients. Which computation is left by then?",
    "The table's column 'waits for' is the part of the red in which another rank had not come.",
]


def files(learner):
    return {}


def numbers(page):
    """Return the numbers that timeline.py left in a page."""
    return json.loads(re.search(r'id="numbers">(.*?)</script>', page.read_text(), re.S)[1])


def right(result):
    """Return what the picture says: (answers, whether travel and wait are about the same)."""
    lane = result["lanes"][0]
    calls = [call for call in lane["calls"] if call["op"] == "bucket"]
    wait, red = sum(lane["waits_ms"].values()), lane["exposed_ms"]
    answers = {"buckets": round(len(calls) / result["steps"]), "exposed": result["exposed_share"]}
    tie = abs(2 * wait - red) < 0.2 * red
    return answers | {"mostly": "wait" if 2 * wait > red else "travel"}, tie


def check(work, learner, answers):
    try:
        wanted, tie = right(numbers(work / "timeline.html"))
    except (OSError, ValueError, TypeError, KeyError, IndexError, ZeroDivisionError):
        text = "no picture: draw your run with labs/timeline.py --output timeline.html, here"
        return [Result("timeline.html", False, text)]
    results = []
    for name, value in wanted.items():
        said = answers.get(name)
        if isinstance(value, str):
            good = said in ("wait", "travel") and (said == value or tie)
        else:
            good = isinstance(said, int | float) and abs(said - value) < 0.011
        results.append(Result(name, good, f"{said}" if good else f"{said!r} is not what it shows"))
    said = answers.get("last_bucket")
    good = sealed(f"last_bucket {said}") == SEALS["last_bucket"]
    text = f"{said}" if good else "which gradients are in it, and what is left to compute then?"
    results.append(Result("last_bucket", good, text))
    if gpu_count() < 2:
        results.append(
            Result("GPUs", None, "not tried here: the picture is of processes on the CPU")
        )
    return results


@cache
def drawn():
    with TemporaryDirectory(prefix="lab-") as folder:
        page = Path(folder) / "timeline.html"
        command = [sys.executable, ROOT / "labs" / "timeline.py", ROOT / "02_torchrun.py"]
        run([*command, "--steps=2", f"--output={page}", "--", "--epochs=1"], Path(folder), 120)
        return page.read_text(), right(numbers(page))[0]


def SOLUTION(learner):
    page, answers = drawn()
    no = [w for w in ("yes", "no") if sealed(f"last_bucket {w}") == SEALS["last_bucket"]]
    return {"timeline.html": page}, answers | {"last_bucket": no[0]}


WRONG = [
    ("no picture", {"timeline.html": "<svg></svg>"}, {}, "no picture"),
    ("the last one hides", {}, {"last_bucket": "yes"}, "last_bucket"),
    ("all is exposed", {}, {"exposed": 1.0}, "exposed"),
    ("a bucket a layer", {}, {"buckets": 10}, "buckets"),
]
