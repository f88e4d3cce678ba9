"""Replicas, gradients, the wrapper, accumulation and buffers, from checksums and projections."""

import itertools
import json
from collections import Counter

from judge.schedule import precision
from judge.steps import NEAR, against_one_rank, batch_of, synchrony
from judge.trace import BROKEN, HOLDS, NOT_SEEN


def averages_weights(trace):
    """Say whether weights that were unequal become equal again: local SGD, by design."""
    for number in trace.optimizers:
        equal = [len({s["weights"] for s in parts}) == 1 for parts in trace.together(number)]
        ends = {json.dumps((r.last("final") or {}).get("weights")) for r in trace.ranks}
        equal.append(len(ends) == 1)
        if any(not a and b for a, b in itertools.pairwise(equal)):
            return True
    return False


def bad_steps(trace):
    return [s for s in synchrony(trace) if s[0] in ("own", "partial")]


def shares_of(trace, kinds):
    told = [s for s in synchrony(trace) if s[0] not in ("blind", "same")]
    return sum(s[0] in kinds for s in told), len(told)


def called(trace, indices):
    first = next((s["names"] for s in trace.ranks[0].steps if s["names"]), [])
    names = [first[i] if i < len(first) and first[i] else f"parameter {i}" for i in indices]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def idle_optimizer(trace):
    """Return the first step of an optimizer that never gets a gradient."""
    for number in trace.optimizers:
        steps = [s for parts in trace.together(number) for s in parts]
        steps = [s for s in steps if s.get("applied")]
        if steps and not any(a is not None for s in steps for a in s["applied"]):
            return steps[0]
    return None


def skipped(trace):
    """Tell of a rank that leaves out optimizer steps which another rank makes, if one does."""
    for number in trace.optimizers:
        ends = [(r.last("final") or {}).get("weights") for r in trace.ranks]
        if len({e[number] for e in ends if e and number < len(e)}) < 2 or trace.hang:
            continue
        counts = [len(rank.steps_of(number)) for rank in trace.ranks]
        passes = [{s["since"].get("synced") for s in parts} for parts in trace.together(number)]
        if len(set(counts)) == 1 and all(len(p) == 1 for p in passes):
            continue
        few, many = counts.index(min(counts)), counts.index(max(counts))
        text = f"rank {few} makes {min(counts)} optimizer steps, rank {many} {max(counts)}"
        if len(set(counts)) == 1:
            text = "the ranks leave out different optimizer steps"
        return BROKEN, f"{text}: the weights part", trace.ranks[many].steps_of(number)[0]["where"]
    return None


def wrapper(trace):
    """Explain gradients that stay on their rank although DistributedDataParallel is there."""
    made = [w for rank in trace.ranks for w in rank.all("wrapper")]
    sharded = any(f.get("sharded") for rank in trace.ranks for f in rank.all("forward"))
    if (made or sharded) and (step := idle_optimizer(trace)):
        text = "the optimizer never gets a gradient: it holds none of the wrapper's parameters"
        return BROKEN, text, step["where"]
    if not made:
        return NOT_SEEN, "no DistributedDataParallel was made", None
    if "Expected to have finished reduction in the prior iteration" in trace.error:
        steps = trace.ranks[0].steps
        text = "DDP waits for a parameter that got no gradient: unused, or replaced after wrapping"
        if steps and steps[0].get("unknown"):
            names = called(trace, steps[0]["unknown"])
            text = f"{names} was not there when the model was wrapped; DDP waits for what was"
        return BROKEN, text, made[0]["where"]
    if averages_weights(trace):
        return NOT_SEEN, "weights are averaged, not gradients", made[0]["where"]
    if skipped(trace):
        return NOT_SEEN, "the ranks make different numbers of steps: see replicas", made[0]["where"]
    bad, bypassed = bad_steps(trace), [s for s in synchrony(trace) if past(s[2][0])]
    told = shares_of(trace, ("own", "partial"))
    if not bad and len(bypassed) == len(synchrony(trace)) > 0 and not told[1]:
        return BROKEN, "every forward pass goes past the wrapper", past(bypassed[0][2][0])
    if not bad:
        passes = sum(s["since"].get("synced", 0) for rank in trace.ranks for s in rank.steps)
        if not trace.ranks[0].steps:
            return NOT_SEEN, "no optimizer step was seen", made[0]["where"]
        if not passes:
            return NOT_SEEN, "no forward pass through it was seen (compiled?)", made[0]["where"]
        return HOLDS, f"{passes} forward passes through it before a step", made[0]["where"]
    kind, details, parts = bad[0]
    share = f"in {told[0]} of {told[1]} steps"
    step, seen = parts[0], parts[0]["since"]
    if not details.get("hooks"):
        return NOT_SEEN, "see gradients: they were not made by backward()", step["where"]
    unknown = set(step.get("unknown") or ())
    if kind == "partial" and set(details["parameters"]) <= unknown:
        text = f"{called(trace, details['parameters'])} is in the optimizer, but was not "
        text += f"there to be synchronised when the model was wrapped; unequal {share}"
        return BROKEN, text, made[0]["where"]
    if past(step):
        text = f"the forward pass goes past the wrapper {share}: its gradients stay on their rank"
        return BROKEN, text, past(step)
    if seen.get("no_sync") and not (seen.get("synced") and step["places"].get("last") == "synced"):
        text = f"no_sync covers the last forward pass before the optimizer {share}"
        return BROKEN, text, step["places"].get("no_sync")
    if unknown and set(step["trained"]) <= unknown:
        return BROKEN, "the optimizer holds none of the wrapper's parameters", step["where"]
    if not seen.get("synced"):
        last = step["before"].get("backward")
        text = f"the loss does not come from the wrapper's forward() {share}: own gradients"
        return BROKEN, text, last[-1]["where"] if last else step["where"]
    text = f"forward goes through the wrapper, but {kind} gradients {share}: its hooks are dead"
    return BROKEN, text + " (moved or cast after wrapping?)", made[0]["where"]


def past(step):
    """Return where the forward pass went past the wrapper before this step, if all of it did."""
    seen = step["since"]
    whole = seen.get("bypass") and not seen.get("synced") and not seen.get("no_sync")
    return step["places"].get("bypass") if whole else None


def gradients(trace):
    steps = synchrony(trace)
    if not steps:
        sharded = any(s["sharded"] for r in trace.ranks for s in r.steps)
        return NOT_SEEN, "parameters are sharded" if sharded else "no optimizer step", None
    if averages_weights(trace):
        return NOT_SEEN, "weights are averaged, not gradients (local SGD)", None
    place, kinds = steps[0][2][0]["where"], Counter(kind for kind, *_ in steps)
    if skipped(trace):
        return NOT_SEEN, "the ranks make different numbers of steps: see replicas", place
    told = len(steps) - kinds["blind"] - kinds["same"]
    if bad_steps(trace):
        if wrapper(trace)[0] == BROKEN:
            return NOT_SEEN, "each rank's own: follows from wrapper", place
        kind, details, parts = bad_steps(trace)[0]
        count = kinds["own"] + kinds["partial"]
        text = f"in {count} of {told} steps ranks apply different gradients: their own, no mean"
        if kind == "partial":
            text = f"{called(trace, details['parameters'])}: not synchronised in {count} of "
            text += f"{told} steps"
        return BROKEN, text, parts[0]["where"]
    if kinds["unequal"]:
        return NOT_SEEN, "the mean, but times another factor on each rank: see precision", place
    for kind in ("sum", "twice"):
        if kinds[kind] * 2 > told > 0:
            last = [p[0]["before"].get("backward", [{}]) for k, _, p in steps if k == kind]
            by_hand = [e for es in last for e in es if other_factors(e, len(es))]
            if by_hand:
                return NOT_SEEN, f"a {kind}, but the loss has factors of its own", place
            if kind == "sum":
                text = f"the sum over ranks, {trace.world} times the mean, in {kinds[kind]} steps"
                return BROKEN, text, place
            if not any(p[0]["since"].get("clips") for _, _, p in steps) and trace.world not in {
                len(es) for es in last
            }:
                return BROKEN, f"1/{trace.world} of the mean: divided twice", place
    uneven = [p for _, _, p in steps if len({batch_of(s) for s in p}) > 1]
    if told and len(uneven) * 2 > len(steps) and kinds["mean"] and not scaled_by_hand(steps):
        sizes = " and ".join(str(batch_of(s)) for s in uneven[0][:2])
        return BROKEN, f"a mean of means: {sizes} samples on two ranks count the same", place
    alone = against_one_rank(trace)
    if alone and alone["differs"] == "direction":
        text = f"{alone['apart']:.1%} off the gradient of one rank for the same samples: a mean of "
        return BROKEN, text + "means of unequal counts?", place
    if alone and alone["differs"] == "length" and abs(alone["own"] - 1) > NEAR:
        text = f"{alone['applied']:.3g} times the gradient of one rank for the same samples"
        return BROKEN, text, place
    if not told:
        same = kinds["same"] and "every rank computed the same gradient"
        return NOT_SEEN, same or "gradients of single ranks were not seen", place
    text = f"{kinds['mean']} of {told} steps apply the mean over ranks"
    if kinds["scaled"]:
        factors = [d["factor"] for kind, d, _ in steps if kind == "scaled"]
        text += f", {kinds['scaled']} the mean times {min(factors):.3g} ... {max(factors):.3g}"
    if kinds["equal"]:
        text += f", {kinds['equal']} the same on all ranks in another way"
    return HOLDS if kinds["equal"] * 2 < told else NOT_SEEN, text, place


def other_factors(event, backwards):
    """Say whether the loss is scaled by something else than the number of micro-batches."""
    factors = [f for f in event.get("factors") or () if f not in (1.0, backwards, 1 / backwards)]
    return bool(factors) or event.get("reduction") == 2


def scaled_by_hand(steps):
    return any(
        other_factors(e, len(p[0]["before"]["backward"]))
        for _, _, p in steps
        for e in p[0]["before"].get("backward", ())
    )


def replicas(trace):
    if (found := skipped(trace)) and not averages_weights(trace):
        return found
    compared = 0
    for number in trace.optimizers:
        together = trace.together(number)
        if any(s["sharded"] for parts in together for s in parts):
            return NOT_SEEN, "parameters are sharded over the ranks", None
        unequal = [i for i, p in enumerate(together) if len({s["weights"] for s in p}) > 1]
        compared += len(together)
        ends = [(r.last("final") or {}).get("weights") for r in trace.ranks]
        ends = [e[number] for e in ends if e and number < len(e)]
        same_number = len({len(r.steps_of(number)) for r in trace.ranks}) == 1
        if not unequal and (len(set(ends)) < 2 or not same_number or trace.hang):
            continue
        place = together[0][0]["where"] if together else None
        when = f"before step {unequal[0] + 1}" if unequal else "at the end"
        if unequal and unequal[0] == 0:
            return BROKEN, "weights differ between ranks from the start", place
        if averages_weights(trace):
            return NOT_SEEN, "unequal, then equal again: weights are averaged by design", place
        causes = {"wrapper": wrapper, "gradients": gradients, "precision": precision}
        for name, check in causes.items():
            if check(trace)[0] == BROKEN:
                return NOT_SEEN, f"weights differ {when}: follows from {name}", place
        if learning_rates_differ(trace, number):
            return BROKEN, f"weights differ {when}: the ranks' learning rates differ", place
        return BROKEN, f"weights differ {when}, though gradients do not", place
    again = trace.resumed["again"] if isinstance(trace.resumed, dict) else None
    first = [rank.steps[0] for rank in again.ranks if rank.steps] if again else []
    if len(first) > 1 and len({step["weights"] for step in first}) > 1:
        return BROKEN, "started again from a checkpoint, the ranks have other weights", None
    if not compared or trace.world < 2:
        return NOT_SEEN, "no optimizer step on two ranks was seen", None
    ended = all(r.last("final") for r in trace.ranks)
    return HOLDS, f"equal bits before {compared} steps" + (" and at the end" if ended else ""), None


def learning_rates_differ(trace, number):
    return any(len({tuple(s["lr"]) for s in parts}) > 1 for parts in trace.together(number))


def accumulation(trace):
    steps = [s for r in trace.ranks[:1] for s in r.steps if s["before"].get("backward")]
    groups = []
    for step in steps:
        losses, batches = step["before"]["backward"], step["before"].get("batch", ())
        # One line, or as many batches as losses: no_sync() has a branch of its own.
        if len({e["where"] for e in losses}) == 1 or len(batches) == len(losses):
            groups.append(losses)
    if skipped(trace):
        return NOT_SEEN, "a rank leaves out steps: see replicas", None
    if not groups:
        return NOT_SEEN, "no step with one loss was seen", None
    most = Counter(map(len, groups)).most_common(1)[0][0]
    place = groups[0][0]["where"]
    if most < 2:
        return NOT_SEEN, "one backward() a step", place
    first = next(g for g in groups if len(g) == most)
    if all(e["factors"] for e in first):
        return HOLDS, f"{most} micro-batches a step, and the loss is divided", place
    scaled = [(d["factor"], p[0]["since"]) for kind, d, p in synchrony(trace) if kind == "scaled"]
    by_hand = any(abs(factor * (since.get("scale") or 1) - 1) > NEAR for factor, since in scaled)
    if first[0]["reduction"] == 2 or by_hand:
        return NOT_SEEN, f"{most} micro-batches a step, scaled in another way", place
    return BROKEN, f"{most} micro-batches a step are added up, and nothing is divided", place


def buffers(trace):
    made = [r.all("wrapper") for r in trace.ranks]
    evaluated = [r.all("evaluate") for r in trace.ranks]
    ends = [(r.last("final") or {}).get("buffers") for r in trace.ranks]
    if not all(made) or all(w[0]["buffers"] is None for w in made):
        return NOT_SEEN, "no wrapped model with buffers", None
    place = made[0][0]["where"]
    if len({w[0]["buffers"] for w in made}) > 1:
        return BROKEN, "buffers differ between ranks when the model has just been wrapped", place
    for parts in zip(*evaluated, strict=False):
        if len({f["buffers"] for f in parts}) > 1 and len({f["steps"] for f in parts}) == 1:
            return BROKEN, "ranks evaluate with different buffers", parts[0]["where"]
    if made[0][0]["synced"]:
        return HOLDS, "equal after wrapping; DDP sends rank 0's before each forward pass", place
    same = len(set(ends)) == 1 and None not in ends
    for parts in zip(*evaluated, strict=False):
        same |= len({f["buffers"] for f in parts}) == 1 and len(parts) == trace.world
    if same:
        return HOLDS, "equal at evaluation or at the end", place
    if None in ends:
        return NOT_SEEN, "the end of the run was not seen", place
    return BROKEN, "DDP does not synchronise them, and they differ between ranks at the end", place
