"""Learning rate, scheduler and precision: numbers of one rank against those of many."""

import math
from collections import Counter

from judge.steps import NEAR, against_one_rank, batch_of, clipped_apart, synchrony
from judge.trace import BROKEN, HOLDS, NOT_SEEN


def learning_rate(trace):
    alone = trace.alone
    if alone is None or not alone.ranks or not alone.ranks[0].steps or not trace.ranks[0].steps:
        return NOT_SEEN, "the first steps on one rank could not be seen", None
    one, many = alone.ranks[0].steps, [r.steps for r in trace.ranks]
    place = many[0][0]["where"]
    if not one[0]["base"] or not many[0][0]["base"] or not one[0]["base"][0]:
        return NOT_SEEN, "the optimizer has no learning rate", place
    ratio = many[0][0]["base"][0] / one[0]["base"][0]  # before a schedule changes it
    sizes = [batch_of(one[0]), sum(batch_of(steps[0]) for steps in many if steps)]
    if not all(sizes):
        sizes = [rows_in(one[0]), sum(rows_in(steps[0]) for steps in many if steps)]
    if not all(sizes):
        return NOT_SEEN, f"learning rate x {ratio:.3g}, effective batch unknown", place
    batch = sizes[1] / sizes[0]
    text = f"effective batch {sizes[0]} on one rank, {sizes[1]} on {trace.world}"
    text += f"; learning rate x {ratio:.4g}"
    if any(math.isclose(ratio, good, rel_tol=0.02) for good in (1, batch, math.sqrt(batch))):
        return HOLDS, text, place
    rates = {tuple(s["base"]) for s in many[0][:3]} | {tuple(s["base"]) for s in one[:3]}
    if len(rates) > 2:
        return NOT_SEEN, f"{text}, but it changes from step to step", place
    return BROKEN, text, place


def rows_in(step):
    return sum(len(e.get("rows") or ()) for e in step["before"].get("forward", ()) if e["grad"])


def scheduler(trace):
    events = trace.ranks[0].events if trace.ranks else []
    calls, place, steps, gaps, early, scaled = 0, None, 0, [], 0, False
    first = next((e["number"] for e in events if e["e"] == "scheduler"), None)
    for event in events:
        if event["e"] == "step":
            steps += 1
            gaps.append(0)
        elif event["e"] == "scheduler" and event["number"] == first:
            calls, place = calls + 1, event["where"]
            scaled |= bool(event["scaled"])
            early += not steps
            if gaps:
                gaps[-1] += 1
    if not calls:
        return NOT_SEEN, "no scheduler of torch.optim.lr_scheduler steps", None
    if not steps:
        return NOT_SEEN, "no optimizer step", place
    if early and not scaled and not trace.ranks[0].all("load"):
        return BROKEN, "the scheduler steps before the optimizer has", place
    some = [gap for gap in gaps if gap]
    usual = Counter(some).most_common(1)[0][0] if some else 0
    if usual > 1:
        text = f"{usual} scheduler steps at once ({calls} for {steps} optimizer steps)"
        backwards = len(trace.ranks[0].steps[0]["before"].get("backward", ()))
        more = ", one a micro-batch" if usual == backwards else ""
        more = ", one for each rank" if usual == trace.world != backwards else more
        return BROKEN, text + more, place
    return HOLDS, f"{calls} scheduler steps for {steps} optimizer steps, one at a time", place


def precision(trace):
    clips = [[e for s in r.steps for e in s["before"].get("clip", ())] for r in trace.ranks]
    place = next((e["where"] for part in clips for e in part), None)
    scaled = any(s["since"].get("scale") for r in trace.ranks for s in r.steps)
    for kind, details, parts in synchrony(trace):
        if kind == "unequal":
            text = f"ranks scale the same gradient by {details['factors'][0]:.3g} and "
            text += f"{details['factors'][1]:.3g}: clipped on one rank only, or by its own norm"
            return BROKEN, text, place or parts[0]["where"]
        if kind != "blind" and clipped_apart(parts):
            return BROKEN, "each rank clips by its own norm, before the mean over ranks", place
    if len(set(map(len, clips))) > 1 and len({len(r.steps) for r in trace.ranks}) == 1:
        counts = " and ".join(str(len(part)) for part in clips)
        return BROKEN, f"not all ranks clip: {counts} times", place or trace.script
    for rank in trace.ranks:
        for step in rank.steps:
            events = step["before"].get("clip", ())
            for event in events:
                if event["scaled"]:
                    return BROKEN, "clipped before scaler.unscale_()", event["where"]
                backward = step["before"].get("backward", ())
                late = [b for b in backward if b["t"] > event["t"]]
                if backward and late and len(events) * 2 >= len(late):
                    return BROKEN, "clipped before backward() was complete", event["where"]
    if place_ := reduced_twice(trace):
        return BROKEN, "the norm of a gradient that all ranks share is summed over ranks", place_
    alone = against_one_rank(trace)
    if alone and alone["differs"] == "length" and abs(alone["own"] - 1) < NEAR:
        text = f"the same gradient is clipped or scaled to {alone['applied']:.3g} of what one rank "
        return BROKEN, text + "makes of it", place or trace.ranks[0].steps[0]["where"]
    if not any(clips) and not scaled:
        return NOT_SEEN, "neither clipping nor a GradScaler", None
    return (
        HOLDS,
        f"{len(clips[0])} clips on each rank" + (", a GradScaler" if scaled else ""),
        place,
    )


def reduced_twice(trace):
    """Return where ranks add up a norm that is the whole gradient's on each of them already."""
    found = []
    for kind, details, parts in synchrony(trace):
        if kind not in ("mean", "scaled") or not parts[0].get("norm"):
            continue
        norm = parts[0]["norm"] / abs(details["factor"])
        calls = [[e for e in s["before"].get("collective", ()) if e.get("value")] for s in parts]
        for events in zip(*calls, strict=False):
            values = [e["value"] for e in events]
            if events[0].get("reduce") != "SUM" or not all(
                math.isclose(v, values[0], rel_tol=1e-4) for v in values
            ):
                continue
            if any(math.isclose(values[0], x, rel_tol=1e-3) for x in (norm, norm**2)):
                found.append(events[0]["where"])
    return found[0] if len(found) > 1 else None
