"""What was printed and written: the loss, files, checkpoints."""

import re
from collections import defaultdict
from pathlib import Path

from judge.trace import BROKEN, HOLDS, NOT_SEEN

LABEL = re.compile(
    r"\brank(?![a-z])|\[\s*\d+(/\d+)?\]|\blocal\b|\bown\b|\bworker\b|\bgpu ?\d", re.I
)
COUNTER = re.compile(r"\b(epoch|step|iter\w*|batch)\b\W{0,2}(\[[^\]]*\]\s*)+", re.I)
METRIC = re.compile(r"acc|val|test|eval|correct|metric|loss")
LOAD = re.compile(r"\b(torch|dcp|checkpoint)\.load\(")
LOSS = re.compile(r"(?<![a-z])loss[^\d\n]{0,20}?(-?\d+\.\d+(?:e[-+]?\d+)?)", re.I)


def labelled(text):
    """Say whether a line tells of which rank its numbers are: "Epoch: [0][3/12]" does not."""
    return LABEL.search(COUNTER.sub("", text))


def loss(trace):
    sites, each = defaultdict(lambda: defaultdict(list)), 0  # file:line: own or mean: numbers
    printing = defaultdict(set)  # file:line: ranks
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
                place = event["where"]
                printing[place].add(rank.number)
                if labelled(event["text"]):
                    each += 1
                    continue
                windows = {1, done - begun, done - printed.get(place, 0), done} - {0}
                sites[place][told(trace, rank.number, done, windows, found[1])].append(found[1])
                printed[place] = done
    for place, numbers in sites.items():
        if len(numbers["part"]) > 1 and not numbers["own"] and not numbers["mean"]:
            text = (
                f"{len(numbers['part'])} printed losses (first {numbers['part'][0]}) are the mean "
            )
            return BROKEN, f"{text}over ranks divided by {trace.world} once more", place
        own = numbers["own"]
        digits = len(own[0].partition(".")[2]) if own else 0
        if own and len(printing[place]) == trace.world:
            each += len(own)
        elif own and not numbers["mean"] and (len(own) > 1 or digits >= 4):
            text = f"{len(own)} printed losses (first {own[0]}) are one rank's"
            return BROKEN, f"{text}, and do not say so", place
    mean = {place: len(numbers["mean"]) for place, numbers in sites.items() if numbers["mean"]}
    if mean:
        text = f"{sum(mean.values())} printed losses are the mean over ranks"
        return HOLDS, text, next(iter(mean))
    if each:
        return HOLDS, f"{each} printed losses are labelled, or printed by each rank", None
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
                        kinds |= {"part"} if abs(all_ / len(sums) - value) < near else set()
    return next((kind for kind in ("mean", "own", "part") if kind in kinds), None)


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


def goes_on(trace, second):
    """Say whether the second run starts from what the first one wrote: not reads it at its end."""
    written = [e["path"] for rank in trace.ranks for e in rank.all("write")]
    loads = [e["path"] for rank in second.ranks for e in rank.all("load") if not e["steps"]]
    return any(f"{path}/".startswith(f"{load}/") for path in written for load in loads)


def checkpoint(trace):
    saves = [e for rank in trace.ranks for e in rank.all("save")]
    saves = [e for e in saves if e["path"] and e["found"].get("weights")]
    if not saves:
        return NOT_SEEN, "no checkpoint was seen: torch.save and torch's folders are", None
    resumable = trace.goes_on
    if resumable is None:  # no second run: by what the source could read, but the first run did not
        late = {e["where"] for rank in trace.ranks for e in rank.all("load") if e["steps"]}
        resumable = any(LOAD.search(text) and at not in late for at, text in trace.lines)
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
