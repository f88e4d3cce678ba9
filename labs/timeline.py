"""Draw your own run: what each rank computed, what it sent, and who waited for whom.

    python labs/timeline.py 02_torchrun.py -- --model wide
    python labs/timeline.py my_script.py --nproc 4 --steps 3 --output mine.svg -- --epochs 1

The script is not edited; labs/observer/ watches it, as for labs/check.py. The first steps are left
out (memory is allocated, DDP makes its buckets anew), --steps are drawn, and then the run is ended.
The result is one HTML file, or an SVG by its name, that needs no network.

hidden:  a bucket's all-reduce is under way while the rank computes.
exposed: it is under way, and the rank has nothing else to do. It may travel, or wait for a rank
         that has not come yet: hatched. On the CPU that is the time until the sum has arrived.
"""

import argparse
import html
import json
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import check

SKIPPED = 5  # steps before the first one that is drawn, where there are so many
WORK = ("data", "forward", "backward", "optimizer")


@dataclass
class Rank:
    number: int
    world: int = 1
    spans: dict = field(default_factory=lambda: {kind: [] for kind in WORK})  # (start, end)
    calls: list = field(default_factory=list)  # collectives, in order
    steps: list = field(default_factory=list)  # when the optimizer had done its step


# ---- run -----------------------------------------------------------------------------------------


def read(folder):
    """Return the ranks of which something was written down, in order."""
    ranks = []
    for file in folder.glob("*.jsonl"):
        rank, calls = Rank(0), {}
        for line in file.read_text().splitlines():
            if not line.endswith("}"):  # it is being written
                continue
            event = json.loads(line)
            kind = event.pop("e")
            if kind == "rank":
                rank.number, rank.world = event["rank"], event["world"]
            elif kind == "span":
                rank.spans[event["kind"]].append((event["start"], event["end"]))
            elif kind == "call":
                calls[event["id"]] = event
            elif kind == "async":
                calls[event["id"]]["sync"] = False
            elif kind == "done":
                calls[event["id"]]["end"] = event["end"]
            else:
                rank.steps.append(event["end"])
        rank.calls = list(calls.values())
        if rank.steps or rank.world > 1:
            ranks.append(rank)
    return sorted(ranks, key=lambda rank: rank.number)


def record(script, words, nproc=2, steps=5, timeout=120, starter=check.start):
    """Run the script until all ranks have made the steps; return (ranks, what ended it, errors)."""
    source, wanted = Path(script).read_text(errors="replace"), SKIPPED + steps
    started = not check.starts_ranks(script)
    if nproc == 1 and not re.search("init_process_group|RANK", source):
        started = False  # as 00, which is for one process alone
    with tempfile.TemporaryDirectory(prefix="timeline-", ignore_cleanup_errors=True) as folder:
        folder, port, pids, codes = Path(folder), check.free_port(), {}, {}
        deadline, ended = time.monotonic() + timeout, "steps"
        try:
            for rank in range(nproc if started else 1):
                env = check.environment(folder, rank, nproc, 1, port, started)
                env |= {"CHECK_HOOKS": "spans.py", "TIMELINE_STEPS": str(wanted)}
                out, err = folder / f"out.{rank}", folder / f"err.{rank}"
                pids[rank] = starter(script, words, env, out, err)
            while len(codes) < len(pids) and time.monotonic() < deadline:
                time.sleep(0.1)
                for rank, pid in pids.items():
                    if rank not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                        codes[rank] = os.waitstatus_to_exitcode(done[1])
                        if codes[rank]:  # the others get a moment to say why, too
                            deadline = min(deadline, time.monotonic() + check.GRACE)
                counts = [file.read_text().count('{"e": "step"') for file in folder.glob("*.jsonl")]
                ranks = read(folder) if sum(count >= wanted for count in counts) else []
                if ranks and sum(len(r.steps) >= wanted for r in ranks) == ranks[0].world:
                    break
            else:
                failed = any(codes.values())
                ended = "failed" if failed else "timeout" if len(codes) < len(pids) else "end"
        finally:
            check.end_all(folder, [pid for rank, pid in pids.items() if rank not in codes])
        errors = "".join((folder / f"err.{rank}").read_text(errors="replace") for rank in pids)
        return read(folder), ended, errors


# ---- measure -------------------------------------------------------------------------------------


def union(spans):
    """Return the spans sorted, with those that touch made one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def minus(spans, others):
    """Return what of the spans is in none of the others."""
    left = []
    for start, end in union(spans):
        for a, b in union(others):
            if a < end and b > start:
                if a > start:
                    left.append((start, a))
                start = max(start, b)
        if start < end:
            left.append((start, end))
    return left


def length(spans):
    return sum(end - start for start, end in union(spans))


def within(spans, start, end):
    return [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]


def analyse(ranks, steps, hung=False):
    """Return what is drawn: the window, and for each rank its spans there and its times a step.

    hung: a call that has not returned is drawn up to the picture's end.
    """
    for rank in ranks if not hung else ():  # where the run was ended in the midst of calls
        rank.calls = [call for call in rank.calls if "end" in call]
    count = min(len(rank.steps) for rank in ranks)
    first = max(0, count - 1 - steps)
    window = [(rank.steps[first], rank.steps[count - 1]) for rank in ranks]
    opened = [c["start"] for r in ranks for c in r.calls if "end" not in c]
    last = max(end for _, end in window)
    zero, close = min(start for start, _ in window), last
    if opened:
        close = max(last, *opened) + (last - zero) / 2
    lanes = []
    for rank, (start, end) in zip(ranks, window, strict=True):
        end = close if opened else end
        lane = {"rank": rank.number, "start": start - zero, "end": end - zero, "calls": []}
        for number, call in enumerate(rank.calls):
            same = [r.calls[number] for r in ranks if number < len(r.calls)]
            whole = len(same) == rank.world and len({c["op"] for c in same}) == 1 and call["world"]
            joined, by = max((c["start"], r.number) for c, r in zip(same, ranks, strict=False))
            done = call.get("end", close)
            if call["start"] < end and done > start:
                part = {"op": call["op"], "start": call["start"] - zero, "end": done - zero}
                part |= {"waits": min(done, joined) - zero if whole else call["start"] - zero}
                part |= {"for": by if whole and by != rank.number else None}
                part |= {"bytes": call.get("bytes"), "where": call.get("where")}
                lane["calls"].append(part | {"sync": call["sync"], "open": "end" not in call})
        work = {kind: within(rank.spans[kind], start, end) for kind in WORK}
        lane |= {kind: [(a - zero, b - zero) for a, b in work[kind]] for kind in WORK}
        # DDP's backward pass ends with a wait: all is computed once the last bucket is full.
        buckets = [c["start"] for c in lane["calls"] if c["op"] == "bucket"]
        computed = []
        for a, b in lane["backward"]:
            computed.append((a, max((s for s in buckets if a <= s <= b), default=b)))
        blocking = [(c["start"], c["end"]) for c in lane["calls"] if c["sync"]]
        lane["backward"] = minus(computed, blocking)
        busy = minus([span for kind in WORK for span in lane[kind]], blocking)
        edges = start - zero, end - zero
        network = within([(c["start"], c["end"]) for c in lane["calls"]], *edges)
        lane["exposed"] = minus(network, busy)
        steps_drawn = count - 1 - first
        times = {f"{kind}_ms": length(lane[kind]) for kind in WORK}
        times |= {"step_ms": edges[1] - edges[0], "communication_ms": length(network)}
        times["exposed_ms"] = length(lane["exposed"])
        times["hidden_ms"] = times["communication_ms"] - times["exposed_ms"]
        waits = {}
        for call in lane["calls"]:
            if call["for"] is not None:
                idle = within(lane["exposed"], call["start"], call["waits"])
                waits.setdefault(call["for"], []).extend(idle)
        lane["waits_ms"] = {str(k): length(v) * 1e3 / steps_drawn for k, v in waits.items()}
        lane |= {key: value * 1e3 / steps_drawn for key, value in times.items()}
        lanes.append(lane)
    total = {}
    for lane in lanes:
        for number, wait in lane["waits_ms"].items():
            total[int(number)] = total.get(int(number), 0) + wait / (len(lanes) - 1)
    step = max(lane["step_ms"] for lane in lanes)
    slowest = max(total, key=total.get) if total else None
    share = sum(lane["exposed_ms"] for lane in lanes) / sum(lane["step_ms"] for lane in lanes)
    result = {"steps": count - 1 - first, "first": first + 2, "step_ms": step}
    result |= {"exposed_share": share, "hang": bool(opened), "seconds": close - zero}
    # Ranks that are equally fast wait for each other by turns: that makes none the slowest.
    rest = max((wait for number, wait in total.items() if number != slowest), default=0)
    clear = total and total[slowest] > max(0.05 * step, 2 * rest)
    return result | {"slowest": slowest if clear else None, "waited_ms": total, "lanes": lanes}


def sentences(result):
    """Return what the picture says, in words."""
    lanes = result["lanes"]
    last = result["first"] + result["steps"] - 1
    found = [
        f"Steps {result['first']} to {last}: {result['step_ms']:.1f} ms a step, of which"
        f" {result['exposed_share']:.0%} is communication that nothing hides."
    ]
    if result["hang"]:
        found = [f"After step {last} it hangs; the times are not those of steps."]
    elif result["slowest"] is not None:
        number = result["slowest"]
        waits = result["waited_ms"][number]
        others = "each other rank waits" if len(lanes) > 2 else "the other waits"
        found.append(f"Rank {number} is the slowest: {others} {waits:.1f} ms a step for it.")
    elif len(lanes) > 1:
        found.append("No rank is clearly the slowest.")
    for lane in lanes:
        for call in lane["calls"]:
            if call["open"]:
                at = f" ({call['where']})" if call["where"] else ""
                found.append(
                    f"Rank {lane['rank']} waits in {call['op']}{at}, which never returned."
                )
    return found


# ---- draw ----------------------------------------------------------------------------------------

COLOURS = {"data": "#bdbdbd", "forward": "#4c78a8", "backward": "#e3a93c", "optimizer": "#8e6bbf"}
HIDDEN, EXPOSED = "#7fb8a8", "#d62728"
LEFT, WIDTH, BAR, GAP = 70, 1180, 26, 4


def rows_of(calls):
    """Give each call a row, so that those that are under way at the same time are not one."""
    ends, rows = [], []
    for call in calls:
        free = [n for n, end in enumerate(ends) if end <= call["start"]]
        rows.append(free[0] if free else len(ends))
        ends[rows[-1] : rows[-1] + 1] = [call["end"]]
    return rows, max(1, len(ends))


def svg(result):
    """Return the picture: for each rank a line of what it computed, and below what it sent."""
    lanes, scale, parts = result["lanes"], WIDTH / (result["seconds"] or 1), []

    def bar(kind, start, end, y, colour, text, height=BAR):
        start, end = max(start, 0), min(end, result["seconds"])
        if end > start:
            box = f'x="{LEFT + start * scale:.2f}" y="{y}" width="{(end - start) * scale:.2f}"'
            text = f"{text}: {(end - start) * 1e3:.2f} ms"
            parts.append(
                f'<rect class="{kind}" {box} height="{height}" fill="{colour}">'
                f"<title>{html.escape(text)}</title></rect>"
            )

    def label(x, y, text, more=""):
        parts.append(f'<text x="{x:.1f}" y="{y}" {more}>{html.escape(text)}</text>')

    legend = [(kind, COLOURS[kind]) for kind in WORK]
    legend += [("all-reduce, hidden", HIDDEN), ("exposed", EXPOSED)]
    legend += [("hatched: another rank has not come yet", "url(#wait)")]
    x = LEFT
    for text, colour in legend:
        parts.append(f'<rect x="{x}" y="8" width="14" height="14" fill="{colour}"/>')
        label(x + 19, 20, text)
        x += 42 + 7.2 * len(text)
    y = 44
    for lane in lanes:
        rows, count = rows_of(lane["calls"])
        label(6, y + 17, f"rank {lane['rank']}", 'font-weight="bold"')
        for kind in WORK:
            for start, end in lane[kind]:
                bar(kind, start, end, y, COLOURS[kind], f"rank {lane['rank']} {kind}")
        for start, end in lane["exposed"]:
            bar("idle", start, end, y, EXPOSED, f"rank {lane['rank']} only waits")
        for call, row in zip(lane["calls"], rows, strict=True):
            top = y + BAR + GAP + row * (BAR // 2 + 2)
            size = f" of {call['bytes'] / 2**20:.2f} MiB" if call["bytes"] else ""
            text = f"rank {lane['rank']} {call['op']}{size} {call['where'] or ''}".strip()
            span = [(call["start"], call["end"])]
            exposed = [p for s in lane["exposed"] for p in within(span, *s)]
            for start, end in minus(span, exposed):
                bar("hidden", start, end, top, HIDDEN, f"{text}, hidden", BAR // 2)
            for start, end in exposed:
                bar("exposed", start, end, top, EXPOSED, f"{text}, exposed", BAR // 2)
            if call["for"] is not None:
                words = f"rank {lane['rank']} waits for rank {call['for']}"
                bar("wait", call["start"], call["waits"], top, "url(#wait)", words, BAR // 2)
                if (call["waits"] - call["start"]) * scale > 130:
                    label(LEFT + call["start"] * scale + 5, top + 11, f"waits for {call['for']}")
        y += BAR + GAP + count * (BAR // 2 + 2) + 18
    unit = 10 ** len(str(int(result["seconds"] * 1e3 / 8 or 1))) / 10  # ms between two marks
    while result["seconds"] * 1e3 / unit > 12:
        unit *= 2
    for mark in range(int(result["seconds"] * 1e3 / unit) + 1):
        x = LEFT + mark * unit / 1e3 * scale
        parts.append(f'<path d="M{x:.1f} 34V{y - 8}" stroke="#999" stroke-width=".5"/>')
        label(x + 3, y, f"{mark * unit:g} ms", 'fill="#666"')
    for text in sentences(result):
        y += 22
        label(LEFT, y, text, 'font-size="14"')
    hatch = (
        '<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse"'
        ' patternTransform="rotate(45)"><path d="M0 0V6" stroke="#222" stroke-width="2.5"/>'
        "</pattern></defs>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 50} {y + 12}"'
        f' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{hatch}{''.join(parts)}</svg>\n"
    )


COLUMNS = ["step", *WORK, "communication", "hidden", "exposed"]


def page(result, title):
    """Return the picture and its numbers as one page; a program finds them in #numbers."""
    head = "".join(f"<th>{name}" for name in ["rank", *COLUMNS, "waits for"])
    body = ""
    for lane in result["lanes"]:
        waits = ", ".join(f"rank {k}: {v:.2f}" for k, v in lane["waits_ms"].items()) or "nobody"
        cells = [str(lane["rank"]), *(f"{lane[f'{c}_ms']:.2f}" for c in COLUMNS), waits]
        body += "<tr>" + "".join(f"<td>{cell}" for cell in cells)
    style = "body{font:15px sans-serif;margin:20px}svg{width:100%}td,th{padding:3px 12px;"
    style += "text-align:right}"
    numbers = json.dumps(result).replace("<", "\\u003c")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{svg(result)}"
        f"<p>Milliseconds a step. Point at a bar to read it.</p><table>{head}{body}</table>"
        f'<script type="application/json" id="numbers">{numbers}</script>\n'
    )


def parse_args(words=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="the training script")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start; default 2")
    parser.add_argument("--steps", type=int, default=5, help="that are drawn; default 5")
    parser.add_argument("--output", default="timeline.html", help="default timeline.html")
    parser.add_argument("--timeout", type=float, default=120, help="seconds; default 120")
    parser.add_argument("arguments", nargs="*", help="after --: those of the script")
    words = list(sys.argv[1:] if words is None else words)
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.arguments += words[at + 1 :]
    if not Path(args.script).is_file():
        fail(f"{args.script} is not a file")
    if min(args.nproc, args.steps, args.timeout) <= 0:
        fail("--nproc, --steps and --timeout must be more than 0")
    if not Path(args.output).resolve().parent.is_dir():
        fail(f"the folder of --output {args.output} does not exist")
    return args


def fail(message, code=2):
    print(f"timeline.py: {message}", file=sys.stderr)
    raise SystemExit(code)


def main():
    args = parse_args()
    check.adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # record() ends what it has started
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    ranks, ended, errors = record(args.script, args.arguments, args.nproc, args.steps, args.timeout)
    if not ranks or min(len(rank.steps) for rank in ranks) < 2:
        last = errors.strip().splitlines()[-1:] or [f"it was ended after {args.timeout:g} s"]
        why = last[0] if ended in ("failed", "timeout") else "it ended after too few"
        fail(f"two steps of an optimizer are needed on each rank: {why}", 1)
    result = analyse(ranks, args.steps, hung=ended == "timeout")
    title = " ".join(["A run of", Path(args.script).name, *args.arguments])
    picture = svg(result) if args.output.endswith(".svg") else page(result, title)
    Path(args.output).write_text(picture, encoding="utf-8")
    print(*sentences(result), f"The picture is in {args.output}", sep="\n")
    return int(ended in ("failed", "timeout"))


if __name__ == "__main__":
    sys.exit(main())
