"""What was evaluated: which samples how often, and by whom it is reported."""

from collections import defaultdict

from judge.collectives import short
from judge.data import identities
from judge.output import METRIC, labelled
from judge.trace import BROKEN, HOLDS, NOT_SEEN


def evaluation(trace):
    rounds = [[p for p in r.passes.values() if not p["trained"]] for r in trace.ranks]
    rounds = [[p for p in passes if p["batches"] and evaluates(p)] for passes in rounds]
    if not any(rounds):
        return NOT_SEEN, "no DataLoader was read without training", None
    trained = {p["loader"] for r in trace.ranks for p in r.training}
    kinds, total, first = defaultdict(lambda: [[] for _ in rounds]), 0, None
    for number, passes in enumerate(rounds):  # ranks need not evaluate the same data sets
        for this in passes:
            key = (this["where"], this["sampler"], this["replicas"], this["subset"], this["base"])
            kinds[key][number].append(this)
    for same in kinds.values():
        if sum(bool(passes) for passes in same) == 1:
            same = [passes for passes in same if passes]
        for parts in zip(*same, strict=False):
            lists, place = identities(parts), parts[0]["where"]
            if lists is None:
                return NOT_SEEN, "which samples were evaluated is unknown", place
            first, total = first or place, total + len(lists[0])
            if parts[0]["drop_last"] and parts[0]["loader"] not in trained and parts[0]["ended"]:
                lost = sum(p["size"] or 0 for p in parts) - sum(map(len, lists))
                if lost > 0 and not parts[0]["replicas"]:
                    return BROKEN, f"{lost} samples are never tested: drop_last", place
            if fault := miscounted(trace, parts, lists):
                return *fault, place
    return HOLDS, f"rank 0 reads {total} samples without training, none of them twice", first


def miscounted(trace, parts, lists):
    """Return (verdict, evidence) where the ranks count a sample twice, or report one shard."""
    read, union = sum(map(len, lists)), len(set().union(*lists))
    several = union > 1 or not parts[0]["replicas"]  # a sampler pads one sample to one a rank
    if len(lists) > 1 and all(set(x) == set(lists[0]) for x in lists) and several:
        return None  # every rank evaluates everything
    if read > union and all(p["ended"] for p in parts):
        text = f"{union} samples are counted as {read}: the sampler pads"
        if any(e["op"].startswith(("all_gather", "gather")) for e in after(trace, parts)):
            return NOT_SEEN, f"{text}, but results are gathered and may be cut"
        return BROKEN, text
    if union > max(len(set(x)) for x in lists) and (spoken := reported(trace, parts)):
        text = f"{short(spoken)} prints rank 0's own {len(lists[0])} of {union} samples"
        return BROKEN, f"{text}: no reduction"
    return None


def evaluates(this):
    return len(this["batches"]) > 1 or this["ended"]


def after(trace, parts):
    """Return rank 0's collectives between this pass and its next training step."""
    found, started = [], False
    for event in trace.ranks[0].events:
        if event["e"] == "pass" and event["number"] == parts[0]["number"]:
            started = True
        elif started and event["e"] == "collective":
            found.append(event)
        elif started and event["e"] in ("backward", "destroy"):
            break
    return found


def reported(trace, parts):
    """Return where rank 0 prints a number after this pass, if no rank communicated before."""
    started = False
    for event in trace.ranks[0].events:
        if event["e"] == "pass" and event["number"] == parts[0]["number"]:
            started = True
        elif started and event["e"] in ("collective", "backward", "destroy"):
            return None
        elif started and event["e"] == "print" and METRIC.search(event["text"].lower()):
            return None if labelled(event["text"]) else event["where"]
    return None
