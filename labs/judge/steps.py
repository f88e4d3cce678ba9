"""What each optimizer step applied on each rank, against the gradients that the ranks had made."""

import math

NEAR = 0.02  # bfloat16 rounds a sketch by 3e-3; faults change it by 0.3 and more


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
