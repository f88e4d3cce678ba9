"""What the ranks of one run did: the events of their files, in order, as a Trace."""

import contextlib
import functools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HOLDS, BROKEN, NOT_SEEN = "holds", "broken", "not seen"


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
    resumed: "dict | str | None" = None  # the killed run and the next one, or why there is none
    goes_on: bool | None = None  # did a next run start from what the first one had written?

    @property
    def world(self):
        return len(self.ranks)

    @functools.cached_property
    def lines(self):
        """Return [(file:line, text)] of the script and of the modules that events come from."""
        events = [event for rank in self.ranks for event in rank.events]
        places = {event["where"].rpartition(":")[0] for event in events if event.get("where")}
        files = [self.script, *(Path(file) for file in sorted(places - {str(self.script)}))]
        texts = [(file, file.read_text(errors="replace")) for file in files if file.is_file()]
        return [(f"{f}:{n}", x) for f, text in texts for n, x in enumerate(text.splitlines(), 1)]

    @property
    def source(self):
        return "\n".join(text for _, text in self.lines)

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
    files = {file.stem: events_of(file) for file in sorted(Path(folder).glob("*.jsonl"))}
    for pid, events in files.items():
        number = rank_of(events)
        if number is not None:  # and its data loading workers
            others = [e for x in files.values() if x is not events for e in x if e["e"] == "drawn"]
            ranks[number] = Rank(events + [e for e in others if str(e["parent"]) == pid], number)
    trace.ranks = [ranks[number] for number in sorted(ranks)]
    return trace


def local_rank(trace, rank):
    return rank.number % max(1, trace.world // trace.nodes)
