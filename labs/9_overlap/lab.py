"""Lab 9: what of the all-reduce is hidden, read from a picture of the learner's own run."""

import json
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import ROOT, Result, gpu_count, run, sealed, unanswered

TITLE, MINUTES, LIMIT = "Overlap (best in a GPU room)", 45, 60
FAILS = "timeline.html"
QUESTIONS = {
    "buckets": "how many all-reduces are there in a step of your picture?",
    "exposed": "which part of a step is exposed, over all ranks, as in 0.25? See below the picture",
    "last_bucket": 'can the last all-reduce hide behind the backward pass? "yes" or "no"',
    "mostly": 'what is most of the red of rank 0: "travel", or "wait" for a slower rank?',
}
SEALS = {"last_bucket": "f8154bd9792f98da"}
DRAW = "python labs/timeline.py 02_torchrun.py --output labs/mine/9_overlap/timeline.html -- "
DRAW += "--model wide"
LOOK = {
    "buckets": "count those of one rank, in one step",
    "exposed": "the sentence below the picture has it, as a percentage: 25 % is 0.25",
    "mostly": "compare 'exposed' and 'waits for' of rank 0 in the table",
    "last_bucket": "which gradients are in it, and what is left to compute then?",
}
WORDS = {"mostly": ("travel", "wait"), "last_bucket": ("yes", "no")}
HINTS = [
    "The picture has a line a rank. When does the first bucket leave, when the last, and what does "
    "the rank compute at that time?",
    f"{DRAW}. Point at a bar to read it; the table below has milliseconds a step.",
    "The last bucket holds the first layers' gradients. Which computation is left by then?",
    "The table's column 'waits for' is the part of the red in which another rank had not come.",
]


def unsealed(name):
    """Return the one word that is right."""
    [word] = [word for word in WORDS[name] if sealed(f"{name} {word}") == SEALS[name]]
    return word


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
        page = numbers(work / "timeline.html")
        (wanted, tie), ranks = right(page), len(page["lanes"])
    except (OSError, ValueError, TypeError, KeyError, IndexError, ZeroDivisionError):
        return [Result("timeline.html", False, f"no picture: {DRAW}")]
    if ranks < 2 or wanted["buckets"] < 2:
        text = f"{ranks} rank(s) with {wanted['buckets']} all-reduce(s) a step: too few to see it"
        return [Result("timeline.html", False, f"{text}. {DRAW}")]
    results, wanted["last_bucket"] = [], unsealed("last_bucket")
    for name in QUESTIONS:
        said, value, words = answers.get(name), wanted[name], WORDS.get(name, ())
        said = said.strip().lower() if isinstance(said, str) else said
        if said is None or (words and said not in words):
            choice = " or ".join(f'"{word}"' for word in words) or "it"
            results.append(unanswered(name, choice))
            continue
        if words:
            good = said == value or (name == "mostly" and tie)
        else:
            good = isinstance(said, int | float) and abs(said - value) < 0.011
        results.append(Result(name, good, f"{said}" if good else f"{said} is not it: {LOOK[name]}"))
    if gpu_count() < 2:
        text = "not tried here: the picture is of processes on the CPU"
        results.append(Result("GPUs", None, text))
    return results


WIDE = ["--model=wide", "--epochs=1", "--batch-size=16"]


@cache
def drawn():
    with TemporaryDirectory(prefix="lab-") as folder:
        page = Path(folder) / "timeline.html"
        command = [sys.executable, ROOT / "labs" / "timeline.py", ROOT / "02_torchrun.py"]
        run([*command, "--steps=2", f"--output={page}", "--", *WIDE], Path(folder), 120)
        return page.read_text(), right(numbers(page))[0]


def SOLUTION(learner):
    page, answers = drawn()
    return {"timeline.html": page}, answers | {"last_bucket": unsealed("last_bucket")}


WRONG = [
    ("no picture", {"timeline.html": "<svg></svg>"}, {}, "no picture"),
    ("no answer", {}, {"exposed": None}, "exposed: not answered yet"),
    ("the last one hides", {}, {"last_bucket": "yes"}, "last_bucket"),
    ("all is exposed", {}, {"exposed": 1.0}, "exposed"),
    ("a bucket a layer", {}, {"buckets": 10}, "buckets"),
    ("those of both ranks", {}, {"buckets": 4}, "buckets: 4 is not it: count those of one rank"),
]
