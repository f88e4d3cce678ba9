"""What each optimizer step applied on each rank, against the gradients that the ranks had made."""

import itertools
import math

NEAR = 0.02  # bfloat16 rounds a sketch by 3e-3; faults change it by 0.3 and more
CLOSE = 0.005  # in float32, after two steps whose rounding Adam may have made larger


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def apart(a, b):
    """Return |a - b| / |a|."""
    size = math.sqrt(dot(a, a))
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True))) / size if size else 0.0


def fit(result, source):
    """Return the factor and the error of: result = factor x source."""
    norm = dot(source, source)
    factor = dot(result, source) / norm if norm else 0.0
    return factor, apart(result, [factor * x for x in source])


def unclipped(step):
    """Return the factor by which clip_grad_norm_ made this step's gradient smaller."""
    events = step["before"].get("clip", ())
    factors = [min(1.0, e["limit"] / (e["norm"] + 1e-6)) for e in events if e["norm"] is not None]
    return math.prod(factors) or 1.0


def clipped_apart(parts):
    """Say whether each rank clipped a gradient of its own, and then all got the same one."""
    norms = [[e["norm"] for e in s["before"].get("clip", ())] for s in parts]
    if len(set(map(len, norms))) > 1 or any(None in part for part in norms):
        return False
    same = all(
        near(a, b)
        for s in parts
        for a, b in zip(parts[0]["applied"], s["applied"], strict=True)
        if a and b
    )
    return same and any(max(column) > 1.01 * min(column) for column in zip(*norms, strict=True))


def compare(parts):
    """Name what the ranks applied in one step: mean, sum, scaled, own, partial, equal, blind."""
    if any(step.get("applied") is None for step in parts):
        return "blind", {}
    columns = enumerate(zip(*(s["applied"] for s in parts), strict=False))
    usable = [i for i, column in columns if None not in column]
    if not usable or not any(x for i in usable for x in parts[0]["applied"][i]):
        return "blind", {}
    result = "equal", {}
    for undo in (True, False):  # clipping may be of some parameters only: then as they are
        if undo and clipped_apart(parts):
            continue
        if result[0] in ("equal", "unequal"):
            factors = [unclipped(s) if undo else 1.0 for s in parts]
            result = compare_usable(parts, usable, factors)
    return result


def compare_usable(parts, usable, clips):
    world = len(parts)
    pairs = zip(parts, clips, strict=True)
    applied = [[[x / clip for x in a or ()] for a in step["applied"]] for step, clip in pairs]
    got = [[x for i in usable for x in one[i]] for one in applied]
    alike = [i for i in usable if all(near(applied[0][i], one[i]) for one in applied)]
    if not any(s["own"][i] for s in parts for i in usable):  # autograd.grad: no hook ran
        return ("blind" if len(alike) == len(usable) else "own"), {"hooks": False}
    zero = {i: [0.0] * len(parts[0]["applied"][i]) for i in usable}
    own = [[x for i in usable for x in s["own"][i] or zero[i]] for s in parts]
    mean = [sum(column) / world for column in zip(*own, strict=True)]
    if all(apart(mean, x) < 0.05 for x in own if any(mean)):
        return "same", {}  # every rank computed the same: nothing can be told
    fits = [fit(x, mean) for x in got]
    factors = [factor for factor, _ in fits]
    if all(error < NEAR for _, error in fits):
        if max(factors) - min(factors) > NEAR * max(map(abs, factors)):
            return "unequal", {"factors": factors}
        for name, value in (("mean", 1), ("sum", world), ("twice", 1 / world)):
            if abs(factors[0] - value) < NEAR * value:
                return name, {"factor": factors[0]}
        return "scaled", {"factor": factors[0]}
    mine = [i for i in usable if i not in alike and any(s["own"][i] for s in parts)]
    if not mine:
        return "equal", {}
    whole = not any(any(applied[0][i]) for i in alike)
    return ("own" if whole else "partial"), {"hooks": True, "parameters": mine}


def near(a, b):
    return apart(a, b) < 1e-3 if any(a) else not any(b)


def synchrony(trace):
    """Return [(kind, details, steps of all ranks)] over all optimizers and steps."""
    if not hasattr(trace, "_synchrony"):
        trace._synchrony = [
            (*compare(parts), parts)
            for number in trace.optimizers
            for parts in trace.together(number)
            if not any(step["sharded"] for step in parts)
        ]
    return trace._synchrony


def batch_of(step):
    return sum(e["count"] for e in step["before"].get("batch", ()))


def samples_of(step):
    """Return fingerprints of the rows that this step was made from, sorted; None if unknown."""
    read = step["before"].get("batch") or ()
    read = read or [e for e in step["before"].get("forward", ()) if e["grad"]]
    rows = [e.get("rows") for e in read]
    return sorted(row for part in rows for row in part) if rows and None not in rows else None


def against_one_rank(trace):
    """Compare the first steps with those of one rank, made from the same weights and samples.

    Returns {"own": factor, "applied": factor, "apart": |difference|, "differs": in direction, in
    length or not} of the mean of the ranks' own gradients and of what the optimizer gets, in the
    first step that differs; None where the runs cannot be compared: other samples, random numbers
    in the forward pass, BatchNorm.
    """
    if not trace.alone or not trace.alone.ranks or not trace.optimizers:
        return None
    number, found = trace.optimizers[0], None
    pairs = zip(trace.alone.ranks[0].steps_of(number), trace.together(number), strict=False)
    for one, parts in itertools.islice(pairs, 3):
        if not found and len({s["weights"] for s in (one, *parts)}) > 1:
            return None
        compared = compare_with(one, parts)
        found = compared or found
        if not compared or compared["differs"] or one["lr"] != parts[0]["lr"]:
            break
    return found


def coupled(own):
    """Say whether one rank's gradient is no weighted sum of the ranks': the loss mixes samples."""
    rest, *directions = own
    basis = []
    for vector in directions:
        for one in basis:
            vector = [x - dot(vector, one) * y for x, y in zip(vector, one, strict=True)]
        size = math.sqrt(dot(vector, vector))
        basis += [[x / size for x in vector]] if size else []
    sum_ = [sum(dot(rest, one) * one[i] for one in basis) for i in range(len(rest))]
    return apart(rest, sum_) > NEAR


def compare_with(one, parts):
    steps = [one, *parts]
    rows = [samples_of(s) for s in steps]
    if None in rows or sorted(r for part in rows[1:] for r in part) != rows[0]:
        return None
    if any(s["random"] or s["norms"] for s in steps):
        return None
    columns = enumerate(zip(*(s[k] or () for s in steps for k in ("own", "applied")), strict=False))
    usable = [i for i, column in columns if None not in column]
    own, applied = (
        [[x for i in usable for x in s[k][i]] for s in steps] for k in ("own", "applied")
    )
    if not any(own[0]) or not any(applied[0]):
        return None
    mean = [sum(column) / len(parts) for column in zip(*own[1:], strict=True)]
    factor, error = fit(applied[1], applied[0])
    result = {"own": fit(mean, own[0])[0], "applied": factor, "apart": error, "differs": None}
    if error > (NEAR if any(s["rounded"] for s in steps) else CLOSE):
        if coupled(own) or any(e["weighted"] for s in steps for e in s["before"]["backward"]):
            return None  # a loss of pairs, or with weights of classes: a mean over ranks by design
        result["differs"] = "direction"
    elif abs(factor - 1) > NEAR:
        result["differs"] = "length"
    return result
