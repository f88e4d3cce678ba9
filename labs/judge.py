"""What labs/check.py concludes from the events that observer/hooks/watch.py wrote down.

Each check is a function of the trace that returns (verdict, evidence, file:line). "not seen" means
that the evidence is missing, or that another check names the cause. CHECKS, at the end, lists them.
"""

import ast
import contextlib
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HOLDS, BROKEN, NOT_SEEN = "holds", "broken", "not seen"


# ---- the trace -----------------------------------------------------------------------------------


class Rank:
    """What one rank did, in its order: passes over data, optimizer steps, and all other events."""

    def __init__(self, events, number):
        self.events, self.number = events, number
        self.passes, self.steps, self.losses = {}, [], []
        open_, blind, counts = {}, set(), 0  # passes whose last batch may still be trained on
        since, buffered = defaultdict(list), None  # torch.save to memory, then a file
        for event in events:
            kind = event["e"]
            since[kind].append(event)
            if kind == "pass":
                self.passes[event["number"]] = event | {"batches": [], "ended": False, "hits": 0}
                open_.clear()
            elif kind in ("batch", "end") and event["number"] in self.passes:
                this = self.passes[event["number"]]
                open_.pop(event["number"], None)
                if kind == "end":
                    this["ended"] = True
                    continue
                for other in blind & set(open_):  # read, used without gradient: evaluation
                    open_.pop(other)
                blind.clear()
                open_[event["number"]] = this
                this["batches"].append(event)
                counts = event["count"]
            elif kind == "forward" and not event["grad"]:
                blind |= set(open_)
            elif kind == "write" and buffered:
                buffered["path"], buffered = event["path"], None
            elif kind == "save" and event["path"] is None:
                buffered = event
            elif kind == "backward":
                for this in open_.values():
                    this["hits"] += 1
                open_.clear()
                self.losses.append((event["loss"], counts or 1))
            elif kind == "step":
                for this in open_.values():  # autograd.grad is no backward()
                    this["hits"] += 1
                open_.clear()
                self.steps.append(event | {"before": dict(since)})
                since = defaultdict(list)
        for this in self.passes.values():
            known = this["batches"] and this["batches"][0]["indices"] is not None
            key = "indices" if known else "rows"
            parts = [b.get(key) for b in this["batches"]]
            this["known"], this["ids"] = known, None
            if parts and None not in parts:
                this["ids"] = [i for part in parts for i in part]
            this["trained"] = this["hits"] * 4 >= len(this["batches"]) and this["hits"] > 0
        for step in self.steps:  # without what was read for evaluation
            read = step["before"].get("batch", ())
            known = [e for e in read if e["number"] in self.passes]
            step["before"]["batch"] = [e for e in known if self.passes[e["number"]]["trained"]]

    def all(self, kind):
        return [event for event in self.events if event["e"] == kind]

    def last(self, kind):
        return next((event for event in reversed(self.events) if event["e"] == kind), None)

    @property
    def training(self):
        return [p for p in self.passes.values() if p["trained"]]

    def steps_of(self, optimizer):
        return [step for step in self.steps if step["optimizer"] == optimizer]


@dataclass
class Trace:
    """One run: its ranks, and what the checker knows of its end."""

    script: Path
    ranks: list = field(default_factory=list)
    nodes: int = 1
    codes: dict = field(default_factory=dict)  # rank or pid: exit code
    errors: dict = field(default_factory=dict)  # rank or pid: text on stderr
    hang: dict | None = None  # rank: answer
    left: list = field(default_factory=list)  # processes that outlived the script
    seconds: float = 0.0
    timed_out: bool = False
    alone: "Trace | None" = None  # the first steps on one rank
    resumed: "dict | None" = None

    @property
    def world(self):
        return len(self.ranks)

    @property
    def source(self):
        return self.script.read_text(errors="replace")

    @property
    def optimizers(self):
        return sorted({step["optimizer"] for rank in self.ranks for step in rank.steps})

    def together(self, optimizer):
        """Yield the steps of this optimizer, of all ranks at once."""
        return list(zip(*(rank.steps_of(optimizer) for rank in self.ranks), strict=False))

    @property
    def error(self):
        return "\n".join(self.errors.values())


def events_of(file):
    """Return the events that one process wrote; the last line may be cut off."""
    events = []
    for line in file.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def rank_of(events):
    """Return the rank in the group, or the launcher's where the group is still being made."""
    numbers = [e["rank"] for e in events if e["e"] == "rank"]
    numbers += [e["rank"] for e in events if e["e"] == "init"]
    return next((int(number) for number in numbers if number is not None), None)


def read(folder, script, **known):
    """Return the trace of the run whose events are in the folder."""
    ranks, trace = {}, Trace(script, **known)
    for file in sorted(Path(folder).glob("*.jsonl")):
        events = events_of(file)
        number = rank_of(events)
        if number is not None:
            ranks[number] = Rank(events, number)
    trace.ranks = [ranks[number] for number in sorted(ranks)]
    return trace


def local_rank(trace, rank):
    return rank.number % max(1, trace.world // trace.nodes)


# ---- data ----------------------------------------------------------------------------------------


def rows_of(this):
    """Return {index: (row, label)} of a pass."""
    rows = {}
    for batch in this["batches"]:
        for i, index in enumerate(batch["indices"] or ()):
            row, label = (batch.get(k) or [] for k in ("rows", "labels"))
            if i < len(row):
                rows[index] = (row[i], label[i] if i < len(label) else None)
    return rows


def same_data(parts):
    """Say whether equal indices mean equal samples: a rank may have cut its own data set."""
    first, second = rows_of(parts[0]), rows_of(parts[1])
    common = first.keys() & second.keys()
    if not common:
        return True
    if sum(first[i][0] == second[i][0] for i in common) * 2 > len(common):
        return True
    labels = {first[i][1] for i in common}
    equal = all(first[i][1] == second[i][1] for i in common)
    return equal and len(labels) > 1 and len(common) >= 8  # another augmentation of the same


def identities(parts):
    """Return for each rank the samples of its pass, comparable between ranks; None if unknown."""
    if any(p["ids"] is None for p in parts):
        return None
    if len(parts) > 1 and parts[0]["known"] and not same_data(parts):
        lists = [[row for b in p["batches"] for row in b.get("rows") or ()] for p in parts]
        whole = all(len(x) == len(p["ids"]) for x, p in zip(lists, parts, strict=True))
        return lists if whole else None
    return [p["ids"] for p in parts]


def shared(lists):
    """Return how many samples more than one of these lists has."""
    sets = [set(x) for x in lists]
    return sum(map(len, sets)) - len(set().union(*sets))


def by_local_rank(trace, lists):
    """Say whether exactly the ranks of the same local rank read the same."""
    groups = defaultdict(list)
    for rank, ids in zip(trace.ranks, lists, strict=True):
        groups[local_rank(trace, rank)].append(set(ids))
    if trace.nodes < 2 or any(s != g[0] for g in groups.values() for s in g):
        return False
    return shared([g[0] for g in groups.values()]) < trace.world


def epochs(trace):
    """Yield for each epoch the ranks' passes over the training set."""
    return list(zip(*(rank.training for rank in trace.ranks), strict=False))


def samples(trace):
    if not any(rank.training for rank in trace.ranks):
        return samples_by_hand(trace)
    if len(trace.ranks) < 2 or not epochs(trace):
        return NOT_SEEN, "not all ranks trained from a DataLoader", None
    total = 0
    for number, parts in enumerate(epochs(trace), 1):
        lists, place = identities(parts), parts[0]["where"]
        if lists is None:
            return NOT_SEEN, "the samples have neither an index nor a tensor", place
        if by_local_rank(trace, lists) and shared(lists) >= trace.world:
            return NOT_SEEN, "see sharding: ranks of the same local rank read the same", place
        read, double = sum(map(len, lists)), shared(lists)
        repeated = sum(len(x) - len(set(x)) for x in lists)
        times = {n for x in lists for n in Counter(x).values()}
        if not parts[0]["known"] and len(times) == 1 and times != {1} and parts[0]["ended"]:
            text = f"epoch {number}: each rank reads each sample {times.pop()} times (workers?)"
            return BROKEN, text, place
        drawn = any(p["replacement"] for p in parts) or repeated > 0.02 * read + trace.world
        total += read
        if drawn and not all(x == lists[0] for x in lists):
            return NOT_SEEN, f"drawn with replacement: {repeated} of {read} twice by design", place
        if double >= trace.world and not all(len(set(x)) < 2 for x in lists):
            text = f"epoch {number}: {double} of {read} reads are of samples that another rank read"
            same = all(set(x) == set(lists[0]) for x in lists)
            return BROKEN, text + ("; every rank reads all of them" if same else ""), place
        sizes = [p["size"] for p in parts]
        if parts[0]["known"] and lists[0] is parts[0]["ids"] and all(p["ended"] for p in parts):
            split = parts[0]["subset"] and not parts[0]["replicas"]
            expected = sum(sizes) if split else sizes[0]
            batch = max((b["count"] for p in parts for b in p["batches"]), default=1)
            missing = expected - len(set().union(*lists))
            if missing >= batch * trace.world:
                return BROKEN, f"epoch {number}: {missing} of {expected} are never read", place
    first = epochs(trace)[0]
    if not first[0]["known"] and not come_back(trace):
        text = "an iterable data set whose samples never come back: nothing to tell them by"
        return NOT_SEEN, text, first[0]["where"]
    text = f"{total} reads in {len(epochs(trace))} epochs, no sample by two ranks in one"
    return HOLDS, text, first[0]["where"]


def come_back(trace):
    """Say whether most fingerprints of epoch 1 are seen again in epoch 2."""
    rounds = [identities(parts) for parts in epochs(trace)[:2]]
    if len(rounds) < 2 or None in rounds:
        return False
    one, two = (set().union(*lists) for lists in rounds)
    return len(one & two) * 2 > len(one)


def samples_by_hand(trace):
    """Compare the rows that entered the model: the script cuts its batches by hand."""
    batches = [[f for f in r.all("forward") if f["grad"] and f.get("rows")] for r in trace.ranks]
    steps = list(zip(*batches, strict=False))
    if len(trace.ranks) < 2 or len(steps) < 2:
        return NOT_SEEN, "neither a DataLoader nor rows that enter a model", None
    rows = [[step["rows"] for step in parts] for parts in steps]
    if all(len(set(parts[0])) < 2 < len(parts[0]) for parts in rows):
        return NOT_SEEN, "all rows are alike", steps[0][0]["where"]
    seen = [list(itertools.chain(*(parts[r] for parts in rows))) for r in range(trace.world)]
    if by_local_rank(trace, seen) and shared(seen) >= trace.world:
        return NOT_SEEN, "see sharding", steps[0][0]["where"]
    bad = sum(shared(parts) >= max(1, len(parts[0]) // 2) for parts in rows)
    if bad * 2 > len(rows):
        text = f"in {bad} of {len(rows)} steps two ranks train on the same rows"
        return BROKEN, text, steps[0][0]["where"]
    text = f"in {len(rows)} steps no two ranks have the same rows (batches cut by hand)"
    return (NOT_SEEN if bad else HOLDS), text, steps[0][0]["where"]


def order(trace):
    groups = defaultdict(list)
    for rank in trace.ranks[:1]:
        for this in rank.training:
            groups[this["where"], this["size"]].append(this)
    if not groups:
        return order_by_hand(trace)
    compared = 0
    for (place, _), passes in groups.items():
        for one, two in itertools.pairwise(passes):
            length = min(len(one["ids"] or ()), len(two["ids"] or ()))
            if length < 4 or not (one["ended"] or length >= 16):
                continue
            compared += 1
            a, b = one["ids"][:length], two["ids"][:length]
            if a == b and one["known"] and a == sorted(a):
                return NOT_SEEN, "the data are read in their own order, without shuffling", place
            if a == b and not one["known"]:
                return NOT_SEEN, "an iterable data set gives the same order each time", place
            if a == b:
                where = f"epoch {one['epoch']} of the sampler twice"
                twice = one["epoch"] is not None and one["epoch"] == two["epoch"]
                text = f"two epochs read the same {length} samples in the same order"
                return BROKEN, text + (f": {where}; set_epoch?" if twice else ""), place
    if not compared:
        return NOT_SEEN, "fewer than two epochs whose samples are known", None
    return HOLDS, f"{compared + 1} epochs, each in another order", next(iter(groups))[0]


def order_by_hand(trace):
    for rank in trace.ranks[:1]:
        drawn = defaultdict(list)
        for event in rank.all("order"):
            drawn[event["where"], event["size"]].append(event["crc"])
        for (place, size), sums in drawn.items():
            if len(sums) > 1 and size > 3 and not any(rank.passes):
                if len(set(sums)) == 1:
                    return BROKEN, f"{len(sums)} permutations of {size} drawn, all equal", place
                return HOLDS, f"{len(set(sums))} different permutations of {size}", place
    return NOT_SEEN, "no DataLoader was read in two epochs", None


def sharding(trace):
    if trace.nodes < 2:
        return NOT_SEEN, "one node: local and global rank are equal (--nodes 2 tells)", None
    if not any(rank.training for rank in trace.ranks):
        forward = [[f for f in r.all("forward") if f.get("rows")] for r in trace.ranks]
        lists = [[row for f in fs if f["grad"] for row in f["rows"]] for fs in forward]
        place = forward and forward[0] and forward[0][0]["where"]
    elif epochs(trace):
        lists, place = identities(epochs(trace)[0]), epochs(trace)[0][0]["where"]
    else:
        lists, place = None, None
    if not lists or not all(lists):
        return NOT_SEEN, "which samples were read is unknown", None
    if by_local_rank(trace, lists) and shared(lists) >= trace.world:
        text = f"ranks of the same local rank on {trace.nodes} nodes read the same"
        return BROKEN, f"{text} {len(set(lists[0]))} samples: sharded by local rank", place
    if samples(trace)[0] != HOLDS:
        return NOT_SEEN, "see samples", place
    return HOLDS, f"{trace.world} ranks on {trace.nodes} nodes read different samples", place


def evaluation(trace):
    rounds = [[p for p in r.passes.values() if not p["trained"]] for r in trace.ranks]
    rounds = [[p for p in passes if p["batches"] and evaluates(p)] for passes in rounds]
    if not any(rounds):
        return NOT_SEEN, "no DataLoader was read without training", None
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
            if fault := miscounted(trace, parts, lists):
                return *fault, place
    return HOLDS, f"rank 0 reads {total} samples without training, none of them twice", first


def miscounted(trace, parts, lists):
    """Return (verdict, evidence) where the ranks count a sample twice, or report one shard."""
    read, union = sum(map(len, lists)), len(set().union(*lists))
    if len(lists) > 1 and all(set(x) == set(lists[0]) for x in lists) and union > 1:
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
            return None if LABEL.search(event["text"]) else event["where"]
    return None


# ---- weights and gradients -----------------------------------------------------------------------


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


NEAR = 0.02  # bfloat16 rounds a sketch by 3e-3; faults change it by 0.3 and more


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
    bad, bypassed = bad_steps(trace), [s for s in synchrony(trace) if past(s[2][0])]
    told = shares_of(trace, ("own", "partial"))
    if not bad and len(bypassed) == len(synchrony(trace)) > 0 and not told[1]:
        return BROKEN, "every forward pass goes past the wrapper", past(bypassed[0][2][0])
    if not bad:
        passes = sum(s["since"].get("synced", 0) for rank in trace.ranks for s in rank.steps)
        if not trace.ranks[0].steps:
            return NOT_SEEN, "no optimizer step was seen", made[0]["where"]
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


def batch_of(step):
    return sum(e["count"] for e in step["before"].get("batch", ()))


def replicas(trace):
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
        for name, check in (("wrapper", wrapper), ("gradients", gradients)):
            if check(trace)[0] == BROKEN:
                return NOT_SEEN, f"weights differ {when}: follows from {name}", place
        if precision(trace)[0] == BROKEN:
            return NOT_SEEN, f"weights differ {when}: follows from precision", place
        if learning_rates_differ(trace, number):
            return BROKEN, f"weights differ {when}: the ranks' learning rates differ", place
        return BROKEN, f"weights differ {when}, though gradients do not", place
    if not compared or trace.world < 2:
        return NOT_SEEN, "no optimizer step on two ranks was seen", None
    ended = all(r.last("final") for r in trace.ranks)
    return HOLDS, f"equal bits before {compared} steps" + (" and at the end" if ended else ""), None


def learning_rates_differ(trace, number):
    return any(len({tuple(s["lr"]) for s in parts}) > 1 for parts in trace.together(number))


def accumulation(trace):
    steps = [s for r in trace.ranks[:1] for s in r.steps if s["before"].get("backward")]
    groups = [s["before"]["backward"] for s in steps]
    groups = [g for g in groups if len({e["where"] for e in g}) == 1]
    if not groups:
        return NOT_SEEN, "no step with one loss was seen", None
    most = Counter(map(len, groups)).most_common(1)[0][0]
    place = groups[0][0]["where"]
    if most < 2:
        return NOT_SEEN, "one backward() a step", place
    first = next(g for g in groups if len(g) == most)
    if first[0]["factors"]:
        return HOLDS, f"{most} micro-batches a step, and the loss is divided", place
    factors = [d.get("factor", 1) for kind, d, _ in synchrony(trace) if kind == "scaled"]
    clips = any(s["since"].get("clips") for s in steps)
    if first[0]["reduction"] == 2 or any(factors) or clips and factors:
        return NOT_SEEN, f"{most} micro-batches a step, scaled in another way", place
    return BROKEN, f"{most} micro-batches a step are added up, and nothing is divided", place


def buffers(trace):
    made = [r.all("wrapper") for r in trace.ranks]
    evaluated = [[f for f in r.all("forward") if f.get("buffers") is not None] for r in trace.ranks]
    ends = [(r.last("final") or {}).get("buffers") for r in trace.ranks]
    if not all(made) or all(w[0]["buffers"] is None for w in made):
        return NOT_SEEN, "no wrapped model with buffers", None
    place = made[0][0]["where"]
    if len({w[0]["buffers"] for w in made}) > 1:
        return BROKEN, "buffers differ between ranks when the model has just been wrapped", place
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


# ---- output, files -------------------------------------------------------------------------------

LABEL = re.compile(r"\brank\b|\[\s*\d+(/\d+)?\]|\blocal\b|\bown\b|\bworker\b|\bgpu ?\d", re.I)
METRIC = re.compile(r"acc|val|test|eval|correct|metric|loss")
LOSS = re.compile(r"(?<![a-z])loss[^\d\n]{0,20}?(-?\d+\.\d+(?:e[-+]?\d+)?)", re.I)


def loss(trace):
    sites, labelled = defaultdict(lambda: defaultdict(list)), 0  # file:line: own or mean: numbers
    for rank in trace.ranks:
        done, begun, printed = 0, 0, {}
        for event in rank.events:
            if event["e"] == "backward":
                done += 1
            elif event["e"] == "pass" and rank.passes[event["number"]]["trained"]:
                begun = done
            elif event["e"] == "print" and (found := LOSS.search(event["text"])):
                before = event["text"][: found.start()].lower()[-20:]
                if re.search(r"val|test|eval", before):
                    continue
                if LABEL.search(event["text"]):
                    labelled += 1
                    continue
                place = event["where"]
                windows = {1, done - begun, done - printed.get(place, 0), done} - {0}
                sites[place][told(trace, rank.number, done, windows, found[1])].append(found[1])
                printed[place] = done
    for place, numbers in sites.items():
        own = numbers["own"]
        digits = len(own[0].partition(".")[2]) if own else 0
        if own and not numbers["mean"] and (len(own) > 1 or digits >= 4):
            text = f"{len(own)} printed losses (first {own[0]}) are one rank's"
            return BROKEN, f"{text}, and do not say so", place
    mean = {place: len(numbers["mean"]) for place, numbers in sites.items() if numbers["mean"]}
    if mean:
        return (
            HOLDS,
            f"{sum(mean.values())} printed losses are the mean over ranks",
            next(iter(mean)),
        )
    if labelled:
        return HOLDS, f"{labelled} printed losses are labelled as one rank's", None
    return NOT_SEEN, "no printed number could be told to be one rank's or all ranks'", None


def told(trace, number, done, windows, printed):
    """Say which the printed number is: this rank's own loss or the mean over ranks."""
    value, digits = float(printed), len(printed.partition("e")[0].partition(".")[2])
    near = 0.51 * 10**-digits * (10 ** int(printed.partition("e")[2] or 0)) + 1e-6 * abs(value)
    losses = [rank.losses[:done] for rank in trace.ranks]
    if any(len(x) < done for x in losses):
        return None
    kinds = set()
    backwards = [len(s["before"].get("backward", ())) for s in trace.ranks[0].steps[:1]]
    for window in (w for w in windows if 0 < w <= done):
        parts = [x[done - window : done] for x in losses]
        for weigh in (lambda loss, count: loss, lambda loss, count: loss * count):
            sums = [sum(weigh(*x) for x in part) for part in parts]
            counts = [
                (sum(c for _, c in part) if weigh(1, 2) == 2 else len(part)) for part in parts
            ]
            for times in {1, *backwards}:
                for total in (False, True):
                    mine = sums[number] / (1 if total else counts[number]) * times
                    all_ = sum(sums) / (len(sums) if total else sum(counts)) * times
                    if abs(mine - all_) > 4 * near:
                        kinds |= {"own"} if abs(mine - value) < near else set()
                        kinds |= {"mean"} if abs(all_ - value) < near else set()
    return "mean" if "mean" in kinds else "own" if kinds else None


def writers(trace):
    ranks, places = defaultdict(set), {}
    for rank in trace.ranks:
        for event in rank.all("write"):
            if event["mode"].startswith("r") and event["mode"] != "rename":
                continue  # a shared file, of which each may write its own part
            ranks[event["path"]].add(rank.number)
            places[event["path"]] = event["where"]
    for path, numbers in ranks.items():
        if len(numbers) > 1:
            text = f"{Path(path).name} is written by ranks {sorted(numbers)}"
            return BROKEN, text, places[path]
    if not ranks:
        return NOT_SEEN, "no file was written", None
    return HOLDS, f"{len(ranks)} files, each written by one rank", next(iter(places.values()))


def checkpoint(trace):
    saves = [e for rank in trace.ranks for e in rank.all("save")]
    saves = [e for e in saves if e["path"] and e["found"].get("weights")]
    if not saves:
        return NOT_SEEN, "no checkpoint was written with torch.save", None
    resumable = "torch.load(" in trace.source or any(r.all("load") for r in trace.ranks)
    for event in {e["where"]: e for e in saves}.values():
        found, name = event["found"], Path(event["path"]).name
        if found.get("whole") == "DistributedDataParallel":
            return BROKEN, f"{name} holds the wrapper itself", event["where"]
        if found.get("prefix"):
            return BROKEN, f"keys in {name} begin with {found['prefix']}", event["where"]
    whole = [e for e in saves if e["found"].get("optimizer") and e["found"].get("epoch")]
    if whole:
        name = Path(whole[-1]["path"]).name
        return HOLDS, f"{name} has weights, optimizer and epoch", whole[-1]["where"]
    last = saves[-1]
    missing = [x for x in ("optimizer", "epoch") if not last["found"].get(x)]
    text = f"{Path(last['path']).name} has no {' and no '.join(missing)}"
    if len(missing) == 1 or resumable:
        return BROKEN, text, last["where"]
    return HOLDS, f"{text}: weights only, and nothing reads it again", last["where"]


# ---- collectives ---------------------------------------------------------------------------------

ABORT = (
    r"op\.preamble|closed by peer|Connection reset|Broken pipe|Application timeout"
    r"|Timed out waiting|Detected mismatch between collectives"
)
SYMMETRIC = ("all_reduce", "barrier", "broadcast", "all_gather", "all_gather_into_tensor", "reduce")


def learner_line(frames):
    for name, line, _ in frames:
        others = re.search(r"-packages/|/lib/python|^<|/observer/hooks/", name)
        if not others and Path(name).exists():
            return f"{name}:{line}"
    return None


def waits(answer):
    """Return what a rank waits in: (op, sizes, number, file:line), or None where it does not."""
    for status in answer["status"].values():
        begun, done = (status.get(f"last_{x}_collective", -1) for x in ("enqueued", "completed"))
        if begun > done and answer["entries"]:
            entry = answer["entries"][-1]
            line = learner_line(answer["frames"]) or learner_line(entry["frames"])
            return entry["op"].partition(":")[2], entry["sizes"], entry["id"], line
    inside = any(
        "/torch/distributed/" in f[0] or "/autograd/graph.py" in f[0] for f in answer["frames"][:6]
    )
    return ("distributed call", None, None, learner_line(answer["frames"])) if inside else None


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
    aborted = re.search(ABORT, trace.error)
    failed = {n: c for n, c in trace.codes.items() if c}
    if failed and aborted:
        return abort(trace, aborted[0])
    if failed:
        return NOT_SEEN, "the script failed by itself: " + last_line(trace), None
    lists = [
        [e for e in r.all("collective") if e["op"] in SYMMETRIC and not e["group"]]
        for r in trace.ranks
    ]
    for number, parts in enumerate(zip(*lists, strict=False), 1):
        for key in ("op", "count", "reduce"):
            if key == "count" and not parts[0]["op"].startswith("all_reduce"):
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
    if counts := uneven(trace) or left_loop(trace):
        return f"uneven number of batches ({' and '.join(map(str, counts))})", None
    return divergence(trace) or ("", None)


def abort(trace, words):
    """Name a collective that ended in an error instead of a hang."""
    place = None
    for number, text in trace.errors.items():
        if trace.codes.get(number):
            lines = re.findall(r'File "([^"]+)", line (\d+)', text)
            place = learner_line([(f, n, "") for f, n in reversed(lines)]) or place
    own = [t for t in trace.errors.values() if re.search(r"^\w*(Error|Exception)\b", t, re.M)]
    own = [t for t in own if not re.search(ABORT, t)]
    if own:
        return NOT_SEEN, "the script failed by itself: " + last_line(trace), place
    kind, line = classify(trace)
    gone = [n for n, code in trace.codes.items() if code == 0]
    if not kind and gone:
        kind = "missing call"
    last = [r.last("collective") for r in trace.ranks]
    calls = [f"{e['op']} at {short(e['where'])}" if e else "none" for e in last]
    text = "; ".join(f"rank {number}'s last call is {call}" for number, call in enumerate(calls))
    return BROKEN, f"{kind or 'mismatch'}: {text}; error: {words}", line or place


def hang(trace):
    """Name a hang from what each rank waits in."""
    waiting = {n: a and waits(a) for n, a in trace.hang.items()}
    parts = []
    for number, answer in sorted(trace.hang.items()):
        if waiting[number]:
            op, _, _, line = waiting[number]
            parts.append(f"rank {number} waits in {op} at {short(line)}")
        elif answer:
            parts.append(f"rank {number} is at {short(learner_line(answer['frames']))}")
        else:
            parts.append(f"rank {number} has ended")
    stuck = [w for w in waiting.values() if w]
    alike = len({w[3] for w in stuck}) == 1 and len(stuck) == len(waiting) > 1
    kind, place = classify(trace)
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


# ---- numbers of one rank and of many; schedule; precision ----------------------------------------


def learning_rate(trace):
    alone = trace.alone
    if alone is None or not alone.ranks or not alone.ranks[0].steps or not trace.ranks[0].steps:
        return NOT_SEEN, "the first steps on one rank could not be seen", None
    one, many = alone.ranks[0].steps, [r.steps for r in trace.ranks]
    place = many[0][0]["where"]
    if not one[0]["lr"] or not many[0][0]["lr"] or not one[0]["lr"][0]:
        return NOT_SEEN, "the optimizer has no learning rate", place
    ratio = many[0][0]["lr"][0] / one[0]["lr"][0]
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
    rates = {tuple(s["lr"]) for s in many[0][:3]} | {tuple(s["lr"]) for s in one[:3]}
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


# ---- launch, end ---------------------------------------------------------------------------------


def devices(trace):
    if trace.nodes < 2:
        return NOT_SEEN, "one node: local and global rank are equal (--nodes 2 tells)", None
    pattern = r"set_device(?:_index)?\(.*?\)|device\(\s*f?[\"']cuda[^)]*?\)"
    pattern += r"|device_ids\s*=\s*\[.*?\]|\.cuda\(\w.*?\)"
    for line, text in enumerate(trace.source.splitlines(), 1):
        if text.lstrip().startswith("#") or not (found := re.search(pattern, text)):
            continue
        names = re.findall(r"[A-Za-z_]\w*", found[0])
        place = f"{trace.script}:{line}"
        for name in names:
            kinds = {of_rank(v) for v in re.findall(rf"\b{name}\b\s*=\s*([^=\n].*)", trace.source)}
            if name == "rank" and not kinds:
                kinds = {"global"}
            if "local" in kinds or "local" in name.lower():
                return HOLDS, f"the source takes the device by {name}, the local rank", place
            if "global" in kinds and "device_count" not in found[0]:
                return BROKEN, f"the source takes the device by {name}, the global rank", place
    return NOT_SEEN, "the source names no device by number", None


def of_rank(text):
    if "LOCAL_RANK" in text or "local_rank" in text.lower() or "device_count" in text:
        return "local"
    return "global" if re.search(r"get_rank\(|[\"']RANK[\"']", text) else None


def teardown(trace):
    if trace.left:
        return BROKEN, f"left behind: {'; '.join(trace.left)[:120]}", None
    if trace.hang or trace.timed_out or any(trace.codes.values()):
        return NOT_SEEN, "the run did not end by itself", None
    missing = [r.number for r in trace.ranks if not any(d["whole"] for d in r.all("destroy"))]
    place = trace.ranks[0].last("init")["where"] if trace.ranks else None
    if missing and trace.ranks[0].last("init")["library"]:
        return NOT_SEEN, "a library made the group, and leaves it to the end of the process", place
    if missing:
        return BROKEN, f"no destroy_process_group on ranks {missing}", place
    return HOLDS, "all ranks destroyed the group, no process was left", place


def port(trace):
    for rank in trace.ranks:
        init = rank.last("init")
        fixed = re.search(r"tcp://.*?:(\d+)", init["method"] or "")
        if fixed and fixed[1] in trace.source:
            return BROKEN, f"init_method has port {fixed[1]}", init["where"]
        changed = rank.last("port")
        if init["port"] and init["port"] != init["given"]:
            place = changed["where"] if changed else init["where"]
            lines = [
                (i, x) for i, x in enumerate(trace.source.splitlines(), 1) if init["port"] in x
            ]
            lines = [(i, x) for i, x in lines if not re.search("add_argument|setdefault|get", x)]
            if lines:
                at = f"{trace.script}:{lines[0][0]}"
                return BROKEN, f"the script sets MASTER_PORT to {init['port']}", at
            return HOLDS, f"the script chose port {init['port']}, which it does not name", place
    if not trace.ranks:
        return NOT_SEEN, "no process group", None
    return HOLDS, "the launcher's port is used", trace.ranks[0].last("init")["where"]


def resume(trace):
    runs = trace.resumed
    if not runs:
        return NOT_SEEN, "no run was killed and started again", None
    if isinstance(runs, str):
        return NOT_SEEN, runs, None
    whole, killed, again, saved = (runs[k] for k in ("whole", "killed", "again", "saved"))
    place = saved["where"]
    first, steps = whole.ranks[0].steps, again.ranks[0].steps if again.ranks else []
    if not steps:
        return NOT_SEEN, "the second run made no step: " + last_line(again), place
    total, done = len(first), saved["steps"]
    if len(steps) != total - done:
        word = "repeats" if len(steps) > total - done else "skips"
        text = f"{word} {abs(len(steps) - total + done)} steps: {done} were saved, "
        return BROKEN, text + f"then {len(steps)} made, of {total} in one go", place
    before = killed.ranks[0].steps
    for index, rank in enumerate(again.ranks):
        one, two = rank.steps, killed.ranks[index].steps[done:]
        if not two or not one:
            return NOT_SEEN, "the first run was killed too early", place
        if one[0]["weights"] != two[0]["weights"]:
            return BROKEN, f"rank {index} does not go on from the saved weights", place
        drawn = [[e["indices"] for e in s["before"].get("batch", ())] for s in (one[0], two[0])]
        if drawn[0] != drawn[1] and drawn[0] != [[None]]:
            begun = [e["indices"] for e in before[0]["before"].get("batch", ())]
            again_ = " (those of the first epoch)" if drawn[0] == begun else ""
            return BROKEN, f"the first step reads other samples than it would have{again_}", place
        if one[0]["lr"] != two[0]["lr"]:
            text = f"learning rate {one[0]['lr'][0]:.4g} instead of {two[0]['lr'][0]:.4g}"
            return BROKEN, text + ": the scheduler is forgotten", place
        if one[0].get("applied") != two[0].get("applied"):
            return NOT_SEEN, "same weights and samples, another gradient: random numbers", place
        if len(one) > 1 < len(two) and one[1]["weights"] != two[1]["weights"]:
            return BROKEN, "the same gradient makes another step: optimizer state forgotten", place
    return HOLDS, f"killed after step {len(before)}, goes on from step {done + 1} as before", place


@dataclass
class Check:
    """A check, what to read about it, and what --explain says."""

    name: str
    judge: object
    read: str
    text: str


# fmt: off
CHECKS = [
    Check("samples", samples, "topics/seeds_and_augmentation.py",
          "Each training sample is read once an epoch, over all ranks. Seen from the indices that "
          "each DataLoader draws, or from the rows themselves. The usual fault is a missing "
          "DistributedSampler: then every rank does all the work again."),
    Check("order", order, "02_torchrun.py",
          "A DistributedSampler gives the same order until set_epoch() tells it the epoch."),
    Check("replicas", replicas, "topics/debugging.py",
          "A checksum of the weights is compared between ranks before each step and at the end. "
          "Unequal replicas mean that each rank trains a model of its own."),
    Check("gradients", gradients, "topics/ddp_by_hand.py",
          "Each rank's own gradient is projected on fixed random vectors before any communication, "
          "and so is the gradient that the optimizer gets: it must be the mean of the first."),
    Check("wrapper", wrapper, "topics/sync_once.py",
          "DDP synchronises what it knew when it was made, and only where its own forward() was "
          "called: not model.module(x), not a layer added later, not under no_sync()."),
    Check("accumulation", accumulation, "topics/gradient_accumulation.py",
          "backward() adds gradients up; k micro-batches need a loss divided by k."),
    Check("buffers", buffers, "topics/sync_batchnorm.py",
          "Buffers, as BatchNorm's statistics, are not parameters: they differ between ranks where "
          "DDP is told not to send rank 0's."),
    Check("loss", loss, "topics/logging_metrics.py",
          "The printed number is compared with the losses of the backward passes: this rank's own, "
          "or the mean over ranks? One rank's may be printed, but must say so."),
    Check("evaluation", evaluation, "topics/evaluation.py",
          "A DistributedSampler pads, so that some samples are counted twice; and a metric of one "
          "rank's shard is no metric of the test set."),
    Check("writers", writers, "topics/logging_metrics.py",
          "Two ranks that write one file destroy each other's work."),
    Check("checkpoint", checkpoint, "common.py",
          "To go on after a stop needs weights, optimizer and epoch; keys that begin with module. "
          "or _orig_mod. fit only a wrapped model."),
    Check("resume", resume, "topics/preemption.py",
          "The script is killed after a checkpoint and started again: weights, samples, learning "
          "rate and number of steps must be those of a run that was not stopped."),
    Check("sharding", sharding, "03_multinode.py",
          "With --nodes 2 the ranks believe in two nodes: data cut by local rank are read twice."),
    Check("devices", devices, "03_multinode.py",
          "With --nodes 2: a GPU is chosen by local rank, for the global one counts all nodes. "
          "Read from the source, because no GPU is needed here."),
    Check("collectives", collectives, "docs/troubleshooting.md",
          "All ranks must make the same calls in the same order. A hang is ended and named: which "
          "rank waits where, and where the others are."),
    Check("learning-rate", learning_rate, "topics/lr_scaling.py",
          "The first steps are repeated on one rank. The learning rate may stay, or grow as the "
          "effective batch or its root; anything else was scaled twice."),
    Check("scheduler", scheduler, "topics/lr_scaling.py",
          "One scheduler step an epoch or an optimizer step, after the optimizer's."),
    Check("precision", precision, "topics/mixed_precision.py",
          "Clip after unscale_(), on all ranks, once a step, by the norm of the reduced gradient."),
    Check("teardown", teardown, "docs/troubleshooting.md",
          "destroy_process_group() at the end, and no process that goes on."),
    Check("port", port, "topics/manual_launch.sh",
          "A port in the source is taken as soon as two runs share a machine: the launcher's job."),
]
# fmt: on


def judge(trace):
    """Return one dictionary a check."""
    results = []
    for check in CHECKS:
        try:
            if not trace.ranks:
                verdict = NOT_SEEN, "no process made a process group that could be watched", None
            elif trace.world < 2 and check.name not in ("teardown", "port", "collectives"):
                verdict = NOT_SEEN, "one rank: there is nothing to compare", None
            else:
                verdict = check.judge(trace)
        except Exception as error:  # a bug of ours is no fault of the script
            verdict = NOT_SEEN, f"the checker failed: {type(error).__name__}: {error}", None
        entry = dict(zip(("verdict", "evidence", "where"), verdict, strict=True))
        results.append({"check": check.name} | entry | {"read": check.read})
    return results
