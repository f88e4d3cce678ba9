"""Lab 4: predict a speedup from two measurements, measure it, explain the gap."""

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import Result, patched, run, why

TITLE, MINUTES, LIMIT = "Scale it", 60, 120
FAILS = "TODO 1"
QUESTIONS = {
    "speedup_guess": "before you measure anything: how many times as fast are two processes?",
    "speedup_predicted": "what starter.py predicts for 2 ranks",
    "speedup_measured": "what measure.py measured for 2 ranks: whole / together",
    "gap": "what explains most of the difference: 'compute' (a rank of two needs longer for its "
    "half) or 'communication' (the exchange needs longer or shorter than the ring's formula)",
}
HINTS = [
    "Write each formula on paper first. Two measurements, two unknowns: seconds = serial + "
    "batch * per_sample, twice.",
    "Check your functions with numbers that you can do in your head: whole 10, half 6.",
    "whole 10 and half 6: what shrinks is 8 at the whole batch, so 2 do not. A ring of 2 ranks has "
    "2 rounds of half of the bytes; one of 4 ranks has 6 rounds of a quarter.",
    "apart, in measured.json, is a step of two ranks that exchange nothing. together - apart is "
    "what the exchange costs; apart - half is what two processes on one "
    "machine take from each other: caches, memory, clock.",
]
HERE = Path(__file__).parent
CASES = [(10.0, 6.0), (0.25, 0.15), (3.0, 1.5)]  # whole, half
NET = [(1024, 1e-4, 4_000_000, 5e-3, 2), (4096, 3e-4, 8_000_000, 2e-2, 4)]
ASK = """if True:
    import json, sys
    sys.path.insert(0, ".")
    import starter
    cases, net = json.loads(sys.argv[1])
    print(json.dumps({
        "serial_part": [starter.serial_part(*case) for case in cases],
        "alpha_and_beta": [starter.alpha_and_beta(*case) for case in net],
        "ring": [starter.ring(1e6, n, 1e-4, 1e-9) for n in (2, 3, 8)],
        "step": [starter.step(n, *cases[0], 1e6, 1e-4, 1e-7) for n in (1, 2, 4)],
    }))
"""


def ring(size, ranks, alpha, beta):
    return 2 * (ranks - 1) * (alpha + beta * size / ranks)


def alpha_and_beta(small_bytes, small, large_bytes, large, ranks):
    rounds = 2 * (ranks - 1)
    beta = (large - small) / (large_bytes - small_bytes) * ranks / rounds
    return small / rounds - beta * small_bytes / ranks, beta


def step(ranks, whole, half, size, alpha, beta):
    serial = 2 * half - whole
    return serial + (whole - serial) / ranks + ring(size, ranks, alpha, beta)


WANTED = {
    "serial_part": [2 * half - whole for whole, half in CASES],
    "alpha_and_beta": [alpha_and_beta(*case) for case in NET],
    "ring": [ring(1e6, n, 1e-4, 1e-9) for n in (2, 3, 8)],
    "step": [step(n, *CASES[0], 1e6, 1e-4, 1e-7) for n in (1, 2, 4)],
}


def flat(values):
    """Return the numbers of lists in lists."""
    if not isinstance(values, list | tuple):
        return [values]
    return [x for value in values for x in flat(value)]


def near(one, other, part=0.02):
    return isinstance(one, int | float) and abs(one - other) <= part * abs(other) + 1e-9


def files(learner):
    return {
        name: (HERE / name).read_text() for name in ("starter.py", "measure.py", "data_parallel.py")
    }


def predicted(rows):
    """Return the predicted seconds of a step of two ranks."""
    one, two = rows["1"], rows["2"]
    names = ("small_bytes", "small", "large_bytes", "large")
    alpha, beta = alpha_and_beta(*(two[name] for name in names), 2)
    return step(2, one["whole"], one["half"], one["bytes"], alpha, beta)


def gaps(rows):
    """Return how much longer than predicted two ranks compute, and exchange."""
    two = rows["2"]
    return two["apart"] - rows["1"]["half"], two["together"] - two["apart"] - two["large"]


def functions(work):
    """Return a Result for each function of the learner's."""
    done = run([sys.executable, "-c", ASK, json.dumps([CASES, NET])], work, 20)
    if done.code:
        return [Result("starter.py", False, why(done))]
    got, results = json.loads(done.out.splitlines()[-1]), []
    for name, wanted in WANTED.items():
        pairs = list(zip(flat(got[name]), flat(wanted), strict=False))
        good = len(flat(got[name])) == len(flat(wanted)) and all(near(a, b, 1e-3) for a, b in pairs)
        text = "right for three machines" if good else f"{name}() gives {got[name]}"
        text += "" if good else f" for {NET if 'beta' in name else CASES}"
        if name in ("ring", "step") and not good:
            text = f"{name}() gives {got[name]} for "
            text += "1 MB, 2, 3 and 8 ranks" if name == "ring" else "1, 2 and 4 ranks, whole 10 s"
        results.append(Result(name, good, text))
    return results


def check(work, learner, answers):
    results = functions(work)
    if not all(result.passed for result in results):
        return results
    try:
        rows = json.loads((work / "measured.json").read_text())["small"]
        one, two = rows["1"], rows["2"]
        whole, (compute, exchange) = predicted(rows), gaps(rows)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        text = "measured.json lacks the small model on 1 or on 2 processes: run measure.py on both"
        return [*results, Result("measured.json", False, text)]
    now = fresh()
    if not isinstance(now, dict):
        return [*results, Result("measure.py", False, now)]
    for name in ("whole", "half"):
        good = 1 / 4 < one[name] / now[name] < 4
        text = f"{name}: {one[name] * 1e3:.1f} ms there, {now[name] * 1e3:.1f} ms now"
        if not good:
            return [*results, Result("this machine", False, f"{text}: measure again, at rest")]
        if name == "half" and 2 * one["half"] <= one["whole"]:
            text += ". Half a batch took less than half of the time: something else ran meanwhile"
        results.append(Result("this machine", True, text))
    guess = answers.get("speedup_guess")
    good = isinstance(guess, int | float) and guess > 0
    text = f"you said {guess}" if good else "write down a number before you measure"
    results.append(Result("speedup_guess", good, text))
    for name, value in (("predicted", whole), ("measured", two["together"])):
        wanted, said = one["whole"] / value, answers.get(f"speedup_{name}")
        good = near(said, wanted)
        text = f"{said}" if good else f"{said} is not what measured.json and starter.py give"
        results.append(Result(f"speedup_{name}", good, text))
    larger = "compute" if abs(compute) > abs(exchange) else "communication"
    tie = abs(abs(compute) - abs(exchange)) < 0.2 * max(abs(compute), abs(exchange))
    said = answers.get("gap")
    good = said in ("compute", "communication") and (tie or said == larger)
    text = f"{said}: {compute * 1e3:+.1f} ms of computation, {exchange * 1e3:+.1f} of exchange"
    if not good:
        text = f"{said!r} is not it: 'compute' or 'communication'? Compare apart with half, "
        text += "and together - apart with large"
    return [*results, Result("gap", good, text)]


@cache
def fresh():
    """Return what one process measures now, or why it does not."""
    with TemporaryDirectory(prefix="lab-") as folder:
        done = run([sys.executable, HERE / "measure.py"], Path(folder), 60)
        if done.code:
            return why(done, "measure.py")
        return json.loads(Path(folder, "measured.json").read_text())["small"]["1"]


DONE = [
    ('    raise NotImplementedError("TODO 1")', "    return 2 * half - whole"),
    (
        '    raise NotImplementedError("TODO 2")',
        """    rounds = 2 * (ranks - 1)
    beta = (large - small) / (large_bytes - small_bytes) * ranks / rounds
    return small / rounds - beta * small_bytes / ranks, beta""",
    ),
    (
        '    raise NotImplementedError("TODO 3")',
        "    return 2 * (ranks - 1) * (alpha + beta * size / ranks)",
    ),
    (
        '    raise NotImplementedError("TODO 4")',
        """    serial = serial_part(whole, half)
    return serial + (whole - serial) / ranks + ring(size, ranks, alpha, beta)""",
    ),
]


@cache
def measured():
    """Return what measure.py measures here, on one process and on two."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with TemporaryDirectory(prefix="lab-") as folder:
        for words in ([], torchrun):
            run([sys.executable, *words, HERE / "measure.py"], Path(folder), 60)
        return Path(folder, "measured.json").read_text()


def solved(*edits):
    text = patched("labs/4_scale_it/starter.py", DONE)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return {"starter.py": text}


def SOLUTION(learner):
    rows = json.loads(measured())["small"]
    whole, (compute, exchange) = rows["1"]["whole"], gaps(rows)
    answers = {"speedup_guess": 2.0, "speedup_predicted": round(whole / predicted(rows), 3)}
    answers |= {"speedup_measured": round(whole / rows["2"]["together"], 3)}
    answers["gap"] = "compute" if abs(compute) > abs(exchange) else "communication"
    return solved() | {"measured.json": measured()}, answers


ELSEWHERE = {"1": {"bytes": 4e5, "whole": 9.0, "half": 5.0}}
ELSEWHERE["2"] = {"small_bytes": 1024, "small": 1e-4, "large_bytes": 4e5, "large": 1e-3}
ELSEWHERE["2"] |= {"apart": 5.0, "together": 6.0}

WRONG = [
    ("a round a rank", solved(("2 * (ranks - 1) * (alpha", "ranks * (alpha")), {}, "ring()"),
    ("a free exchange", solved((" + ring(size, ranks, alpha, beta)", "")), {}, "step()"),
    ("all of it shrinks", solved(("return 2 * half - whole", "return 0.0")), {}, "serial_part()"),
    ("nothing measured", {"measured.json": "{}"}, {}, "run measure.py on both"),
    ("another machine", {"measured.json": json.dumps({"small": ELSEWHERE})}, {}, "measure again"),
    ("that of four ranks", {}, {"speedup_predicted": 3.5}, "3.5 is not what"),
    ("nothing to explain", {}, {"gap": "none"}, "Compare apart with"),
]
