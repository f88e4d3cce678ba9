"""Which collectives the ranks called, and where each one is when the run hangs."""

import ast
import itertools
import re
from pathlib import Path

from judge.trace import BROKEN, HOLDS, NOT_SEEN

ABORT = (
    r"op\.preamble|closed by peer|Connection reset|Broken pipe|Application timeout"
    r"|Timed out waiting|Detected mismatch between collectives"
)
ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "recv")  # by rank: not in the record
SYMMETRIC = ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_into_tensor", "reduce")


def of_learner(name):
    others = re.search(r"-packages/|/lib/python|^<|/observer/hooks/", name)
    return not others and Path(name).exists()


def learner_line(frames):
    return next((f"{name}:{line}" for name, line, _ in frames if of_learner(name)), None)


def waits(answer):
    """Return what a rank waits in: (op, sizes, number, file:line), or None where it does not."""
    for status in answer["status"].values():
        begun, done = (status.get(f"last_{x}_collective", -1) for x in ("enqueued", "completed"))
        if begun > done and answer["entries"]:
            entry = answer["entries"][-1]
            line = learner_line(answer["frames"]) or learner_line(entry["frames"])
            return entry["op"].partition(":")[2], entry["sizes"], entry["id"], line
    files = itertools.takewhile(lambda name: not of_learner(name), [f[0] for f in answer["frames"]])
    inside = any(  # called by the script: @record, in the same folder, calls the script
        "/torch/distributed/" in f or "/autograd/graph.py" in f for f in itertools.islice(files, 6)
    )
    return ("distributed call", None, None, learner_line(answer["frames"])) if inside else None


def same_call(calls):
    """Say whether these ranks, two at least, wait in one and the same call: it may be slow."""
    return len(calls) > 1 and None not in calls and len({str(call) for call in calls}) == 1


def uneven(trace):
    """Return the ranks' batches in the last epoch, if one has come to its end and they differ."""
    counts = [len(r.training[-1]["batches"]) if r.training else 0 for r in trace.ranks]
    ended = any(r.training[-1]["ended"] for r in trace.ranks if r.training)
    if len({len(r.training) for r in trace.ranks}) == 1 and len(set(counts)) > 1 and ended:
        return counts
    return None


def collectives(trace):
    if trace.hang:
        return hang(trace)
    failed = {n: c for n, c in trace.codes.items() if c}
    if failed and re.search(ABORT, trace.error):
        return abort(trace)
    if failed:
        return NOT_SEEN, "the script failed by itself: " + last_line(trace), None
    lists = [
        [e for e in r.all("collective") if e["op"] in SYMMETRIC and not e["group"]]
        for r in trace.ranks
    ]
    for number, parts in enumerate(zip(*lists, strict=False), 1):
        for key in ("op", "count", "reduce"):
            if key == "count" and parts[0]["op"] not in ("all_reduce", "broadcast", "reduce"):
                continue
            values = [e.get(key) for e in parts]
            if len(set(values)) > 1:
                text = f"call {number}: ranks 0 and 1 pass {key} {values[0]} and {values[1]}"
                return BROKEN, f"argument mismatch: {text}", parts[0]["where"]
    total = len(trace.ranks and trace.ranks[0].all("collective"))
    if trace.world < 2:
        return NOT_SEEN, "fewer than two ranks", None
    if trace.timed_out:
        return NOT_SEEN, "the time-out ended the run while it still worked", None
    return HOLDS, f"{total} calls of the script on rank 0, no hang", None


def last_line(trace):
    lines = [x for x in trace.error.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit)\b", x)]
    lines = lines or [x for x in trace.error.splitlines() if x.strip()]
    return lines[-1][:160] if lines else f"exit codes {sorted(trace.codes.values())}"


def left_loop(trace):
    """Return the ranks' numbers of batches, if one of them called on after its loop."""
    counts = [sum(e["grad"] for e in rank.all("forward")) for rank in trace.ranks]
    if len(set(counts)) < 2 or len({len(rank.training) for rank in trace.ranks}) > 1:
        return None
    rank = trace.ranks[counts.index(min(counts))]
    for event in reversed(rank.events):
        if event["e"] == "backward":
            return None
        if event["e"] == "collective" and rank.last("backward") and event["where"]:
            loop = loop_around(rank.last("backward")["where"])
            file, _, line = event["where"].rpartition(":")
            if loop and not (loop[0] == file and loop[1] <= int(line) <= loop[2]):
                return counts
            return None
    return None


def loop_around(place):
    """Return (file, first line, last line) of the innermost loop around this line."""
    file, _, line = (place or "").rpartition(":")
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError):
        return None
    loops = [n for n in ast.walk(tree) if isinstance(n, (ast.For, ast.While))]
    around = [n for n in loops if n.lineno <= int(line) <= n.end_lineno]
    inner = max(around, key=lambda n: n.lineno, default=None)
    return inner and (file, inner.lineno, inner.end_lineno)


def divergence(trace):
    """Return (class, file:line) of the first call of the script in which the ranks differ."""
    lists = [[e for e in r.all("collective") if not e["group"]] for r in trace.ranks]
    for parts in itertools.zip_longest(*lists):
        there = [e for e in parts if e]
        if len(there) < len(parts):
            return "missing call", there[0]["where"]
        if len({(e["where"], e["op"]) for e in there}) == 1:
            if len({(e["op"], e.get("count"), e.get("type"), e.get("reduce")) for e in there}) > 1:
                return "argument mismatch", there[0]["where"]
        elif len({e["op"] for e in there}) > 1:
            swapped = misplaced([(e["op"], e["where"]) for e in there])
            places = [e["where"] for e in there]
            place = lonely(places) or places[0]
            return ("misplaced call", places[0]) if swapped else ("missing call", place)
    return None


def classify(trace):
    """Return the class of a mistake with collectives, a text and the line."""
    found = divergence(trace) or ("", None)
    counts = uneven(trace) or left_loop(trace)
    if counts and found[0] != "argument mismatch":
        return f"uneven number of batches ({' and '.join(map(str, counts))})", None
    return found


def abort(trace):
    """Name a collective that ended in an error instead of a hang."""
    place = None
    for number, text in trace.errors.items():
        if trace.codes.get(number):
            lines = re.findall(r'File "([^"]+)", line (\d+)', text)
            place = learner_line([(f, n, "") for f, n in reversed(lines)]) or place
    own = [t for n, t in trace.errors.items() if trace.codes.get(n, 0) > 0]
    own = [t.strip() for t in own if not re.search(ABORT, t)]
    kind, line = classify(trace)
    if own and kind != "argument mismatch":  # a rank's own error, after which the others lost it
        said = own[0].rpartition("\n")[2][:160] or last_line(trace)
        return NOT_SEEN, f"the script failed by itself: {said}", place
    gone = [n for n, code in trace.codes.items() if code == 0]
    if not kind and gone:
        kind = "missing call"
    killed = [(n, -code) for n, code in trace.codes.items() if code in (-9, -11, -15)]
    if killed and not kind:
        number, signal = killed[0]
        return NOT_SEEN, f"rank {number} ended by signal {signal}, and the others lost it", None
    last = [r.last("collective") for r in trace.ranks]
    calls = [f"{e['op']} at {short(e['where'])}" if e else "none" for e in last]
    text = "; ".join(f"rank {number}'s last call is {call}" for number, call in enumerate(calls))
    if not kind and len(set(calls)) == 1:
        text = "perhaps DDP's own call, in backward(): does each rank make as many steps?"
    return BROKEN, f"{kind or 'mismatch'}: {text}", line or place


def hang(trace):
    """Name a hang from what each rank waits in."""
    if any(trace.codes.values()) and not re.search(ABORT, trace.error):
        text = "a rank failed by itself, and the others wait for it: "
        return NOT_SEEN, text + last_line(trace), None
    waiting = {n: a and waits(a) for n, a in trace.hang.items()}
    parts = []
    for number, answer in sorted(trace.hang.items()):
        if waiting[number]:
            op, _, _, line = waiting[number]
            parts.append(f"rank {number} waits in {op} at {short(line)}")
        elif answer and not answer["frames"]:
            parts.append(f"rank {number} has not joined")
        elif answer:
            parts.append(f"rank {number} is at {short(learner_line(answer['frames']))}")
        else:
            parts.append(f"rank {number} has ended")
    stuck = [w for w in waiting.values() if w]
    same, there = same_call([*waiting.values()]), [a for a in trace.hang.values() if a]
    if trace.timed_out and (same or len(stuck) < len(there)):  # no sign of a hang but the time
        return NOT_SEEN, f"the time-out ended the run: {'; '.join(parts)}", None
    kind, place = classify(trace)
    if not kind and same:
        kind = "argument mismatch" if stuck[0][0] in ROOTED else "no progress"
    alike = len({(w[2], w[3]) for w in stuck}) == 1 and len(stuck) == len(waiting) > 1
    kind = kind or ("argument mismatch" if alike else "missing call")
    place = place or lonely([w[3] for w in stuck]) or stuck[0][3]
    return BROKEN, f"{kind}: {'; '.join(parts)}", place


def short(place):
    return place and f"{Path(place.rpartition(':')[0]).name}:{place.rpartition(':')[2]}"


def misplaced(calls):
    """Say whether the calls, (op, file:line), are in two branches that both make all of them."""
    ops, places = {op for op, _ in calls}, [place for _, place in calls if place]
    files = {place.rpartition(":")[0] for place in places}
    if len(files) != 1:
        return False
    for node in conditions(files.pop()):
        sides = [{called_name(n) for b in side for n in ast.walk(b)} for side in branches(node)]
        inside = all(node.lineno < int(p.rpartition(":")[2]) <= node.end_lineno for p in places)
        if inside and node.orelse and all(ops <= side for side in sides):
            return True
    return False


def conditions(file):
    try:
        return [n for n in ast.walk(ast.parse(Path(file).read_text())) if isinstance(n, ast.If)]
    except (OSError, SyntaxError):
        return []


def branches(node):
    return node.body, node.orelse


def called_name(node):
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", None))


def lonely(places):
    """Return the line that stands under a condition on the rank."""
    for place in filter(None, places):
        file, _, line = place.rpartition(":")
        for node in conditions(file):
            if "rank" in ast.unparse(node.test) and node.lineno < int(line) <= node.end_lineno:
                return place
    return None
