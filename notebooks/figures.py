"""The figures of the notebooks and of the README, drawn from the measurements in results/.

    python notebooks/figures.py              writes the README's figures to results/figures/
    python notebooks/figures.py --help       what else

Each function that draws prints the numbers that it draws, and returns the figure. Where the data
for it are missing it says so in a sentence and returns None.
"""

import argparse
import csv
import json
import random
import re
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
# What a course teaches to expect (lowest, highest) at so many GPUs. Source:
# skaftenicki.github.io/dtu_mlops/s9_scalable_applications/distributed_training
COURSE = {1: (1, 1), 2: (1.8, 1.8), 4: (3.5, 3.5), 8: (6, 7)}
DDP = ("02_torchrun.py", "03_multinode.py", "01_single_node_multi_gpu.py", "topics/fast.py")
MODELS = ("resnet50", "vit_b_16", "small", "wide")  # the first of them that was measured is shown
# To be told apart in grey: lines by marker and dashes, areas by hatch and shade.
LINES = [("#000000", "-", "o"), ("#0072b2", "--", "s"), ("#d55e00", "-.", "^")]
LINES += [("#009e73", ":", "D"), ("#666666", (0, (5, 1, 1, 1, 1, 1)), "v")]
AREAS = [("#444444", ""), ("#c9dff0", "//"), ("#f0b27a", ".."), ("#ffffff", "xx")]
AREAS += [("#8fc7b0", "\\\\"), ("#dddddd", "--")]

plt.rcParams.update({"figure.dpi": 80, "figure.facecolor": "white", "axes.grid": True})
plt.rcParams.update({"grid.color": "#dddddd", "axes.axisbelow": True, "hatch.linewidth": 0.6})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
plt.rcParams.update(
    {"svg.hashsalt": "ddp", "axes.titlesize": 9, "figure.constrained_layout.use": True}
)

# ---- rows ----------------------------------------------------------------------------------------


def number(text):
    """Return the number that a cell of a CSV holds, or the cell."""
    try:
        return float(text) if re.search(r"[.e]", text) else int(text)
    except ValueError:
        return text


def read(path: Path) -> list[dict]:
    """Return the rows of a .csv or .jsonl file."""
    path = Path(path)
    if not path.is_file():
        print(f"There is no file {path.name}, so there is nothing to draw.")
        return []
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
        rows = list(csv.DictReader(file))
    keep = {"torch", "cuda", "nccl", "python", "commit"}  # versions: 2.10 is not 2.1
    return latest([{k: v if k in keep else number(v) for k, v in row.items()} for row in rows])


ROW = ("script", "mode", "devices", "model", "image_size", "per_rank_batch", "precision")
ROW += ("threads", "num_workers", "options", "gpu", "cpu", "torch")


def latest(rows: list[dict]) -> list[dict]:
    """Return the rows without those of work that was measured again at a later commit."""
    if not rows or "script" not in rows[0]:
        return rows
    last = {tuple(row[name] for name in ROW): row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[tuple(row[name] for name in ROW)]]


def hardware(row: dict) -> str:
    """Return what a row was measured on. Only rows of the same hardware and day are compared."""
    name = row["gpu"] if row["device"] == "cuda" else f"{row['cores']} cores of {row['cpu']}"
    return f"{name}, torch {row['torch'].partition('+')[0]}, {row['date']}"


def by(rows: list[dict], key) -> dict:
    """Return the rows in groups, {key: rows}, in the order in which the keys appear."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row) if callable(key) else tuple(row[name] for name in key)].append(row)
    return dict(groups)


def best(rows: list[dict]) -> list[dict]:
    """Return the rows of one hardware: GPUs before CPUs, the most devices, the last day."""
    groups = by(rows, hardware).values()

    def rank(group):
        return group[0]["device"] == "cuda", max(r["devices"] for r in group), group[0]["date"]

    return max(groups, key=rank, default=[])


def speed(rows: list[dict]) -> tuple[float, float, float]:
    """Return samples/s of rows of equal work: (median, slowest window, quickest window)."""
    median = statistics.median(row["samples_per_second"] for row in rows)
    return median, min(row["min"] for row in rows), max(row["max"] for row in rows)


def without(options: str) -> set[str]:
    """Return what topics/fast.py was told to leave out."""
    found = re.search(r"--without[= ](\S+)", str(options))
    return set(found[1].split(",")) if found else set()


def series(rows: list[dict]) -> list[dict]:
    """Return one dictionary for each kind of work: what it is, and its speed at each device count.

    points: {devices: (median, slowest, quickest)} in samples/s
    alone:  the same of the model without DDP on one device (rung 00); None if not measured
    """
    same = ("hardware", "model", "image_size", "precision", "threads", "num_workers")
    for row in rows:
        row["hardware"] = hardware(row)
        row["batch"] = row["per_rank_batch" if row["mode"] == "weak" else "effective_batch"]
    found = []
    for key, group in by(rows, (*same, "batch", "mode", "script", "options")).items():
        one = dict(zip((*same, "batch", "mode", "script", "options"), key, strict=True))
        one["device"] = group[0]["device"]
        counts = by(group, lambda row: row["devices"])
        first = [
            row for row in rows if row["devices"] == 1 and row["per_rank_batch"] == one["batch"]
        ]
        first = [row for row in first if all(row[name] == one[name] for name in same)]
        # On one device weak and strong scaling are the same work.
        mine = [row for row in first if all(row[n] == one[n] for n in ("script", "options"))]
        counts |= {1: mine} if mine else {}
        one["points"] = {n: speed(counts[n]) for n in sorted(counts)}
        if one["script"].startswith("topics"):
            left_out = without(one["options"]) | {"ddp"}
            plain = [row for row in first if row["script"] == one["script"]]
            plain = [row for row in plain if without(row["options"]) == left_out]
        else:
            plain = [row for row in first if row["script"].startswith("00_")]
        one["alone"] = speed(plain) if plain else None
        found.append(one)
    return found


def base(one: dict) -> float:
    """Return samples/s on one device: of the model without DDP, or else of this script."""
    return (one["alone"] or one["points"].get(1) or [None])[0]


def ratios(one: dict) -> dict:
    """Return {devices: speedup (median, slowest, quickest) against one device}."""
    return {n: tuple(v / base(one) for v in values) for n, values in one["points"].items()}


def scaled(rows: list[dict], mode: str = "weak") -> list[dict]:
    """Return the series of DDP that have a speed on one device and on several.

    Of scripts that do the same work only the first in DDP is kept.
    """
    found = [one for one in series(rows) if one["mode"] == mode and one["script"] in DDP]
    found = [one for one in found if base(one) and max(one["points"]) > 1]
    found = [one for one in found if "ddp" not in without(one["options"])]
    return [min(g, key=lambda one: DDP.index(one["script"])) for g in by(found, WORK).values()]


def main_model(found: list[dict]) -> list[dict]:
    """Return the series of the model that is shown where there is room for one."""
    known = [model for model in MODELS if any(one["model"] == model for one in found)]
    model = known[0] if known else found[0]["model"]
    found = [one for one in found if one["model"] == model]
    size = max(one["image_size"] for one in found)
    return [one for one in found if one["image_size"] == size]


def quickest(found: list[dict]) -> list[dict]:
    """Return of the series that differ in precision alone the quickest one."""
    same = [name for name in (*WORK, "mode", "script") if name != "precision"]
    return [max(group, key=base) for group in by(found, same).values()]


WORK = (
    "hardware",
    "model",
    "image_size",
    "batch",
    "precision",
    "threads",
    "num_workers",
    "options",
)
WORDS = {
    "script": lambda v: v.partition("_")[0] if v[0] == "0" else v,
    "image_size": "{} px".format,
    "batch": "batch {}".format,
    "threads": lambda v: f"{v} thread{'s' * (v > 1)}",
    "num_workers": "{} loaders".format,
    "devices": "on {}".format,
    "options": lambda v: f"without {','.join(sorted(without(v)))}" if without(v) else str(v),
}


def labels(found: list[dict], always=("model",)) -> list[str]:
    """Return for each dictionary the fewest words that tell it from the others."""
    names = ["model", "script", "mode", "precision", "devices", "options", "image_size", "batch"]
    names = [n for n in [*names, "threads", "num_workers", "hardware"] if n in found[0]]

    def made(chosen):
        words = [[WORDS.get(n, str)(one[n]) for n in names if n in chosen] for one in found]
        return [", ".join(filter(None, some)) for some in words]

    chosen = set(always)
    for name in names:
        if len(set(made(chosen | {name}))) > len(set(made(chosen))):
            chosen.add(name)
    return made(chosen)


# ---- drawing -------------------------------------------------------------------------------------


def missing(sentence: str) -> None:
    print(f"Nothing to draw here: {sentence}")


def canvas(rows: int, columns: int = 1, height: float = 3, heights: list[float] | None = None):
    """Return a figure and its axes, in rows and columns; heights are those of single rows."""
    size = (9, sum(heights) if heights else height * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, height_ratios=heights)


def line(ax, index: int, points: dict, label: str) -> None:
    """Draw {x: (y, lowest, highest)} with its range."""
    color, dashes, marker = LINES[index % len(LINES)]
    x, (y, low, high) = list(points), zip(*points.values(), strict=True)
    error = [np.subtract(y, low).clip(0), np.subtract(high, y).clip(0)]
    style = {"color": color, "ls": dashes, "marker": marker, "ms": 5, "capsize": 3}
    ax.errorbar(x, y, error, label=label, **style)


def bars(ax, groups: list[str], kinds: dict, form: str = "{:.2f}") -> None:
    """Draw lying bars: kinds is {legend: [(value, lowest, highest) or None for each group]}."""
    height = 0.8 / len(kinds)
    top = max(value[2] for values in kinds.values() for value in values if value)
    for index, (kind, values) in enumerate(kinds.items()):
        color, hatch = AREAS[index % len(AREAS)]
        places = [n + (index - (len(kinds) - 1) / 2) * height for n in range(len(groups))]
        drawn = [(place, value) for place, value in zip(places, values, strict=True) if value]
        for nth, (place, (value, low, high)) in enumerate(drawn):
            style = {"color": color, "hatch": hatch, "ec": "black", "lw": 0.6}
            ax.barh(place, value, height * 0.9, label=None if nth else kind, **style)
            if high > low:
                ax.plot([low, high], [place, place], color="black", lw=1, marker="|", ms=4)
            ax.text(max(value, high) + top / 80, place, form.format(value), va="center", size=8)
    ax.set_yticks(range(len(groups)), groups)
    ax.set_xlim(0, top * 1.12)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def noun(one: dict, n: int = 2) -> str:
    """Return what n devices are called."""
    return ("GPU" if one["device"] == "cuda" else "process") + (
        "" if n == 1 else "s" if one["device"] == "cuda" else "es"
    )


def where(row: dict) -> str:
    """Return the devices of a row, as 2 × a GPU, or 2 processes on a CPU."""
    name, n = hardware(row).partition(", torch")[0], row["devices"]
    return f"{n} × {name}" if row["device"] == "cuda" else f"{n} {noun(row, n)}, {name}"


def device_axis(ax, found: list[dict], more=(1,), log: bool = False) -> None:
    """Mark the device counts that were measured, and more of them."""
    counts = sorted(set(more).union(*(one["points"] for one in found)))
    if log:
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
    ax.set_xticks(counts, counts)
    ax.set_xlabel(noun(found[0]))


def legend(ax) -> None:
    """Put the legend at the right, where it hides nothing."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def table(heads: list[str], lines: list[tuple]) -> None:
    """Print a table of text, numbers to the right."""
    cells = [heads, *([str(cell) for cell in row] for row in lines)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for row in cells:
        words = [row[0].ljust(widths[0])]
        words += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(words).rstrip())


# ---- scaling.ipynb -------------------------------------------------------------------------------


def contents(rows: list[dict]) -> None:
    """Print what was measured on which hardware."""
    for name, group in by(rows, hardware).items():
        print(name)
        for column in ("devices", "model", "mode", "precision"):
            print(f"    {column}: {', '.join(map(str, dict.fromkeys(r[column] for r in group)))}")


def speedup(rows: list[dict]):
    """Weak scaling of DDP: speedup and efficiency against the ideal and against the course."""
    found = scaled(rows)
    if not found:
        return missing("DDP on one device and on several, in weak scaling.")
    groups = by(found, lambda one: one["hardware"])
    figure, axes = canvas(len(groups), 2, 3.2)
    lines = []
    n, (low, high) = np.array(list(COURSE)), np.transpose(list(COURSE.values()))
    for (name, group), (left, right) in zip(groups.items(), axes, strict=True):
        group = main_model(group)
        for ax, divide in ((left, 1), (right, n)):
            ax.plot(n, n / divide, color="#888888", lw=1, label="ideal")
            error = np.stack([high - low, high - low]) / 2 / divide
            style = {"color": "#888888", "ls": "none", "marker": "x", "ms": 7, "capsize": 4}
            ax.errorbar(n, (low + high) / 2 / divide, error, label="what a course says", **style)
        for index, (one, label) in enumerate(
            zip(group, labels(group, ("model", "script", "precision")), strict=True)
        ):
            speeds = ratios(one)
            each = {k: tuple(v / k for v in values) for k, values in speeds.items()}
            line(left, index, speeds, label)
            line(right, index, each, label)
            for k, (value, slow, quick) in each.items():
                cells = f"{speeds[k][0]:.2f}", f"{value:.3f}", f"{slow:.3f} to {quick:.3f}"
                lines.append((label, k, *cells, "no DDP" if one["alone"] else "itself"))
        device_axis(left, group, COURSE)
        device_axis(right, group, COURSE, log=True)
        left.set(ylabel="speedup", yticks=left.get_xticks(), title=name)
        right.set(ylim=(0, None), ylabel="speedup / devices", title="efficiency")
        legend(right)
    table(["", "devices", "speedup", "efficiency", "windows", "1.0 is one device with"], lines)
    return figure


def data_parallel(rows: list[dict]):
    """nn.DataParallel against DDP on the same number of GPUs."""
    found = [one for one in series(rows) if one["mode"] == "weak" and base(one)]
    found = [one for one in found if one["device"] == "cuda"]
    old = [one for one in found if one["script"].startswith("00b") and max(one["points"]) > 1]
    old = quickest(old)
    if not old:
        return missing("DataParallel on several GPUs (00b uses none on the CPU).")
    groups, kinds, lines = [], {"DataParallel (00b)": [], "DDP": []}, []
    for one in old:
        new = [x for x in found if x["script"] in DDP and all(x[n] == one[n] for n in WORK)]
        new.sort(key=lambda x: DDP.index(x["script"]))
        for n in (n for n in one["points"] if n > 1):
            rival = next((ratios(x)[n] for x in new if n in x["points"]), None)
            groups.append(one | {"devices": n})
            kinds["DataParallel (00b)"].append(ratios(one)[n])
            kinds["DDP"].append(rival)
    names = labels(groups, always=("model", "precision", "devices"))
    figure, axes = canvas(1, height=1 + 0.45 * len(groups))
    bars(axes[0, 0], names, kinds)
    axes[0, 0].axvline(1, color="black", lw=1)
    axes[0, 0].set(xlabel="speedup against one GPU", title="DataParallel against DDP")
    legend(axes[0, 0])
    for name, a, b in zip(names, *kinds.values(), strict=True):
        if b:
            lines.append((name, f"{a[0]:.2f}", f"{b[0]:.2f}", f"{b[0] / a[0]:.1f}"))
    table(["speedup against one GPU", "DataParallel", "DDP", "DDP / DataParallel"], lines)
    return figure


def launchers(rows: list[dict]):
    """Spawn, torchrun and Lightning relative to rung 03 (or 02, where 03 was not measured)."""
    what = {"01": "01, mp.spawn", "02": "02, torchrun", "03": "03, torchrun"}
    what["04"] = "04, Lightning"
    found = [one for one in series(rows) if one["script"][:2] in what]
    found = [one for one in found if one["mode"] == "weak"] or found
    groups, same = [], (*WORK, "mode")
    for group in by(found, same).values():
        scripts = {one["script"][:2]: one["points"] for one in group}
        first = "03" if "03" in scripts else "02"
        others = {n for name in scripts if name != first for n in scripts[name]}
        most = max(others & set(scripts.get(first, [])), default=0)
        if most:
            speeds = {
                name: np.array(x[most]) / scripts[first][most][0]
                for name, x in scripts.items()
                if most in x
            }
            head = {name: group[0][name] for name in same}
            groups.append((head | {"devices": most, "of": first}, speeds))
    if not groups:
        return missing("rung 03 or 02 beside another one, on the same work.")
    names = labels([head for head, _ in groups], ("model", "precision", "devices"))
    figure, axes = canvas(1, height=1.2 + 0.35 * len(groups))
    ax = axes[0, 0]
    for index, (name, words) in enumerate(what.items()):
        have = [(row, head, x[name]) for row, (head, x) in enumerate(groups) if name in x]
        have = [(row, value) for row, head, value in have if head["of"] != name]
        if have:
            value, low, high = np.transpose([value for _, value in have])
            places = [row + (index - 1.5) * 0.2 for row, _ in have]
            style = {"color": LINES[index][0], "marker": LINES[index][2], "ms": 5, "ls": "none"}
            error = [value - low, high - value]
            ax.errorbar(value, places, xerr=error, capsize=2, label=words, **style)
    ax.axvline(1, color="black", lw=1)
    ax.set_yticks(range(len(groups)), names)
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set(xlabel="samples/s relative to 03 (or 02)", title="the launcher, and Lightning's loop")
    legend(ax)
    lines = []
    for label, (head, speeds) in zip(names, groups, strict=True):
        cells = [f"{speeds[name][0]:.3f}" if name in speeds else "" for name in what]
        _, low, high = speeds[head["of"]]
        lines.append((label, *cells, f"{low:.3f} to {high:.3f}"))
    table(["samples/s, relative", *what, "windows of 1.000"], lines)
    return figure


def weak_strong(rows: list[dict]):
    """Efficiency when the work grows with the devices, and when it does not."""
    weak, found = scaled(rows, "weak"), []
    shared = [name for name in WORK if name != "batch"]
    for one in quickest(scaled(rows, "strong")):
        same = [x for x in weak if all(x[name] == one[name] for name in shared)]
        found += [(x, one) for x in same if x["batch"] == one["batch"]][:1] or [
            (x, one) for x in same
        ][:1]
    if not found:
        return missing("the same work in weak and in strong scaling, on several devices.")
    groups = by(found, lambda pair: pair[1]["hardware"])
    figure, axes = canvas(len(groups), height=2.8)
    lines = []
    for (name, group), ax in zip(groups.items(), axes[:, 0], strict=True):
        chosen = main_model([pair[1] for pair in group])
        pairs = [one for pair in group if pair[1] in chosen for one in pair]
        for index, (one, label) in enumerate(
            zip(pairs, labels(pairs, ("model", "mode", "precision")), strict=True)
        ):
            efficiency = {n: tuple(v / n for v in x) for n, x in ratios(one).items()}
            line(ax, index, efficiency, label)
            for n, values in efficiency.items():
                batch = one["batch"] if one["mode"] == "weak" else one["batch"] // n
                lines.append((label, n, batch, f"{values[0]:.3f}"))
        ax.axhline(1, color="#888888", lw=1)
        device_axis(ax, pairs, log=True)
        ax.set(ylim=(0, None), ylabel="efficiency", title=name)
        legend(ax)
    table(["", "devices", "per-rank batch", "efficiency"], lines)
    return figure


def serial_fraction(speeds: dict) -> float:
    """Fit 1 / speedup = s + (1 - s) / n to {devices: samples/s}, and return s, from 0 to 1."""
    x = [1 - 1 / n for n in speeds]
    y = [speeds[1] / value - 1 / n for n, value in speeds.items()]
    return min(max(float(np.dot(x, y) / np.dot(x, x)), 0.0), 1.0)


def law(s: float, n):
    """Return Amdahl's speedup on n devices where the share s of the work stays serial."""
    return 1 / (s + (1 - s) / n)


def fits(points: dict, draws: int = 2000) -> tuple[float, tuple[float, float]]:
    """Return the serial fraction of the medians, and a range: 5 to 95 % of 2,000 fits.

    Each of those takes for each device count a speed between the slowest and the quickest window.
    """
    source, found = random.Random(0), []
    for _ in range(draws):
        found.append(
            serial_fraction(
                {n: source.triangular(low, high, mid) for n, (mid, low, high) in points.items()}
            )
        )
    found.sort()
    middle = serial_fraction({n: values[0] for n, values in points.items()})
    return middle, (min(middle, found[draws // 20]), max(middle, found[-1 - draws // 20]))


def amdahl(rows: list[dict], target: int = 8):
    """Amdahl's law fitted below `target` devices, and what it predicts there."""
    found = quickest([one for mode in ("weak", "strong") for one in scaled(rows, mode)])
    found = [one for one in found if {1} < {n for n in one["points"] if n < target}]
    found = [one for one in found if 1 in one["points"] and one["script"][0] == "0"]
    found = [one for one in found if one["device"] == "cuda"] or found
    if not found:
        return missing(f"DDP on one device and on 2 to {target - 1}.")
    groups = by(found, lambda one: one["hardware"])
    figure, axes = canvas(len(groups), height=3.6)
    lines = []
    for (name, group), ax in zip(groups.items(), axes[:, 0], strict=True):
        n, drawn = np.linspace(1, target, 50), main_model(group)
        ax.plot(n, n, color="#888888", lw=1, label="ideal")
        for one, label in zip(group, labels(group, ("model", "mode", "precision")), strict=True):
            points = {k: v for k, v in one["points"].items() if k < target}
            s, (low, high) = fits(points)
            y, least, most = law(s, target), law(high, target), law(low, target)
            known = {k: v[0] / points[1][0] for k, v in one["points"].items()}
            if one in drawn:
                color, dashes, marker = LINES[drawn.index(one) % len(LINES)]
                ax.plot(n, law(s, n), color=color, ls=dashes, label=f"{label}: fitted")
                ax.fill_between(n, law(high, n), law(low, n), color=color, alpha=0.15, lw=0)
                style = {"color": color, "ls": "none", "marker": marker}
                ax.plot(list(known), list(known.values()), label="    measured", **style)
                style |= {"mfc": "white", "ms": 10, "capsize": 5, "label": "    predicted"}
                ax.errorbar(target, y, [[y - least], [most - y]], zorder=1, **style)
            cells = ", ".join(map(str, points)), f"{s:.4f}", f"{low:.4f} to {high:.4f}", f"{y:.2f}"
            rest = f"{least:.2f} to {most:.2f}", f"{y * points[1][0]:.0f}"
            lines.append((label, *cells, *rest, f"{known.get(target, 0):.2f}".replace("0.00", "-")))
        device_axis(ax, group, (1, target))
        ax.set(ylabel="speedup against DDP on one", title=name)
        legend(ax)
    heads = ["", "fitted to", "serial", "5 to 95 %", f"speedup at {target}", "5 to 95 %"]
    table([*heads, "samples/s", "measured"], lines)
    for one, label in zip(found, labels(found, ("model", "mode", "precision")), strict=True):
        known = {k: v[0] for k, v in one["points"].items() if k < target}
        last = max(known)
        if min(known.values()) < known[1]:
            print(f"{label}: several are slower than one. The law has no such case.")
        elif len(known) > 2:
            there = law(serial_fraction({k: v for k, v in known.items() if k < last}), last)
            print(f"{label}: fitted without {last}, the law says {there:.2f} there; ", end="")
            print(f"measured {known[last] / known[1]:.2f}.")
    return figure


def bound(rows: list[dict]):
    """Efficiency of each model: much arithmetic for each weight, or many weights to send."""
    found = [one for one in scaled(rows) if one["script"][0] == "0"]
    if not found:
        return missing("DDP on one device and on several, in weak scaling.")
    groups = by(found, lambda one: one["hardware"])
    counts = {
        key: sorted({n for one in g for n in one["points"]} - {1}) for key, g in groups.items()
    }
    heights = [1 + 0.2 * len(g) * (1 + len(counts[key])) for key, g in groups.items()]
    figure, axes = canvas(len(groups), heights=heights)
    lines = []
    for (name, group), ax in zip(groups.items(), axes[:, 0], strict=True):
        group.sort(key=lambda one: -ratios(one)[max(one["points"])][0])
        names, kinds = labels(group, ("model", "precision")), {}
        for n in counts[name]:
            speeds = [ratios(one).get(n) for one in group]
            kinds[f"{n} {noun(group[0])}"] = [x and tuple(v / n for v in x) for x in speeds]
            lines += [
                (label, n, f"{x[0]:.2f}", f"{x[0] / n:.3f}")
                for label, x in zip(names, speeds, strict=True)
                if x
            ]
        bars(ax, names, kinds)
        ax.axvline(1, color="black", lw=1)
        ax.set(xlabel="efficiency (1 is ideal)", title=name)
        legend(ax)
    table(["", "devices", "speedup", "efficiency"], lines)
    return figure


def cores(rows: list[dict]):
    """The same cores of a CPU: one process with more threads, or more processes with one."""
    found = [one for one in series(rows) if one["device"] == "cpu" and one["model"] == "small"]
    found = [one for one in found if one["script"] in (*DDP, "00_single_gpu.py")]
    shared = [name for name in (*WORK, "mode") if name != "threads"]
    several = [g for g in by(found, shared).values() if any(max(x["points"]) > 1 for x in g)]
    if not several:
        return missing("the small model on a CPU, in one process and in several.")
    kinds = defaultdict(lambda: [None] * len(several))
    for row, group in enumerate(several):
        rungs = [x["script"] for x in group if max(x["points"]) > 1]
        ddp = min(rungs, key=DDP.index)
        for one in sorted(group, key=lambda x: (x["script"], x["threads"])):
            for n, values in one["points"].items():
                if one["script"][:3] == "00_" or (one["script"] == ddp and n > 1):
                    threads = f"{one['threads']} thread{'s' * (one['threads'] > 1)}"
                    kinds[f"{n} {noun(one, n)} × {threads}"][row] = values
    heads = [{k: v for k, v in g[0].items() if k not in ("script", "threads")} for g in several]
    names = labels(heads, ("model", "mode", "image_size"))
    figure, axes = canvas(1, height=1 + 0.2 * len(several) * (1 + len(kinds)))
    bars(axes[0, 0], names, kinds, "{:.0f}")
    axes[0, 0].set(
        xlabel="samples/s", title=" and ".join(dict.fromkeys(x["hardware"] for x in heads))
    )
    legend(axes[0, 0])
    lines = []
    for row, label in enumerate(names):
        first = kinds["1 process × 1 thread"][row] if "1 process × 1 thread" in kinds else None
        for kind, values in kinds.items():
            if values[row]:
                ratio = f"{values[row][0] / first[0]:.2f}" if first else ""
                lines.append((label, kind, f"{values[row][0]:.0f}", ratio))
    table(["", "", "samples/s", "1 process × 1 thread = 1"], lines)
    return figure


def ladder(rows: list[dict]):
    """What each part of topics/fast.py adds to the ones before it."""
    if not rows:
        return missing("results of benchmarks/ladder_of_speed.py.")
    groups = by(rows, lambda r: (hardware(r), r["model"], r["image_size"], r["per_rank_batch"]))
    steps = [list(dict.fromkeys(row["added"] for row in group)) for group in groups.values()]
    figure, axes = canvas(len(groups), heights=[1 + 0.4 * len(added) for added in steps])
    lines = []
    for (key, group), added, ax in zip(groups.items(), steps, axes[:, 0], strict=True):
        kinds, names = {}, [f"+ {name}" if name else "DDP, fp32" for name in added]
        for n, some in sorted(by(group, lambda r: r["devices"]).items()):
            found = {name: speed(x) for name, x in by(some, lambda r: r["added"]).items()}
            each = [name in found and tuple(v / n for v in found[name]) for name in added]
            kinds[f"{n} {noun(some[0], n)}"] = each
            for name, before, value in zip(names, [None, *each], each, strict=False):
                if value:
                    gain = f"{value[0] / before[0]:.3f}" if before else ""
                    lines.append(
                        (f"{key[1]}, {n} {noun(some[0], n)}", name, f"{n * value[0]:.0f}", gain)
                    )
        bars(ax, names, kinds, "{:.0f}")
        title = f"{key[1]}, {key[2]} px, batch {key[3]} a rank: {key[0]}"
        ax.set(xlabel=f"samples/s for each {noun(group[0], 1)}", title=title)
        legend(ax)
    table(["", "", "samples/s", "× the row before"], lines)
    return figure


# ---- communication.ipynb -------------------------------------------------------------------------


def ring(n: int, size, start: float, rate: float):
    """Return seconds of an all-reduce in a ring: 2 (n - 1) messages of size / n bytes each."""
    return 2 * (n - 1) * start + 2 * (n - 1) / n * size / rate


def fit_ring(n: int, size: list[float], seconds: list[float]) -> tuple[float, float]:
    """Fit (seconds to start a message, bytes a second); every measurement weighs the same."""
    columns = [np.full(len(size), 2.0 * (n - 1)), 2 * (n - 1) / n * np.array(size)]
    scaled_columns = np.stack([column / np.array(seconds) for column in columns], axis=1)
    start, slope = np.linalg.lstsq(scaled_columns, np.ones(len(size)), rcond=None)[0]
    if start < 0:  # no such thing: only the rate is left to fit
        start = 0.0
        slope = scaled_columns[:, 1].sum() / (scaled_columns[:, 1] ** 2).sum()
    return float(start), 1 / float(slope)


def messages(rows: list[dict]) -> dict:
    """Return {(hardware, backend, devices): {bytes: (seconds, lowest, highest)}}."""
    found = {}
    rows = [row for row in rows if row["devices"] > 1]
    for key, group in by(rows, lambda r: (hardware(r), r["backend"], r["devices"])).items():
        sizes = sorted(by(group, lambda r: r["bytes"]).items())
        found[key] = {
            size: (
                statistics.median(r["seconds"] for r in some),
                min(r["min"] for r in some),
                max(r["max"] for r in some),
            )
            for size, some in sizes
        }
    return {key: points for key, points in found.items() if len(points) > 1}


def human(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def bandwidth(rows: list[dict]):
    """Time and bus bandwidth of an all-reduce over the message's size, and the ring's law."""
    found = messages(rows)
    if not found:
        return missing("all-reduces of several sizes, on two devices or more.")
    figure, axes = canvas(1, 2, height=3.6)
    lines = []
    heads = [row | {"hardware": hardware(row)} for row in rows if row["devices"] > 1]
    heads = [by(heads, ("hardware", "backend", "devices"))[key][0] for key in found]
    names = [
        f"{words} ({row['backend']})" for words, row in zip(map(where, heads), heads, strict=True)
    ]
    for index, ((key, points), label) in enumerate(zip(found.items(), names, strict=True)):
        n, sizes = key[2], list(points)
        start, rate = fit_ring(n, sizes, [value[0] for value in points.values()])
        factor = 2 * (n - 1) / n
        line(axes[0, 0], index, {s: tuple(v * 1e3 for v in t) for s, t in points.items()}, label)
        speeds = {
            s: tuple(factor * s / v / 1e9 for v in (t[0], t[2], t[1])) for s, t in points.items()
        }
        line(axes[0, 1], index, speeds, label)
        for container in (axes[0, 0].containers[-1], axes[0, 1].containers[-1]):
            container[0].set_linestyle("none")
        curve = np.geomspace(sizes[0], sizes[-1], 60)
        style = {"color": LINES[index % len(LINES)][0], "ls": LINES[index % len(LINES)][1], "lw": 1}
        axes[0, 0].plot(curve, ring(n, curve, start, rate) * 1e3, **style)
        axes[0, 1].plot(curve, factor * curve / ring(n, curve, start, rate) / 1e9, **style)
        off = max(abs(ring(n, s, start, rate) / t[0] - 1) for s, t in points.items())
        best_rate = max(v[0] for v in speeds.values())
        equal = start * n * rate  # here a message costs as much to start as to move
        lines.append((label, f"{2 * (n - 1) * start * 1e6:.0f} µs", f"{rate / 1e9:.2f} GB/s"))
        lines[-1] += (f"{best_rate:.2f} GB/s", human(equal), f"{off:.0%}")
    for ax in axes[0]:
        ax.set(xscale="log", yscale="log", xlabel="bytes in the message")
    axes[0, 0].set(ylabel="ms", title="time of one all-reduce (line: the ring's law)")
    axes[0, 1].set(ylabel="GB/s", title="bus bandwidth")
    legend(axes[0, 1])
    heads = ["", "to start", "fitted rate", "best measured", "half of the time is the start at"]
    table([*heads, "farthest off"], lines)
    return figure


def profiles(rows: list[dict]) -> list[dict]:
    """Return the last profile of each kind of step."""
    names = ("model", "image_size", "precision", "per_rank_batch", "devices", "backend")
    rows = [row | {"hardware": hardware(row), "batch": row["per_rank_batch"]} for row in rows]
    groups = by(rows, lambda r: (r["hardware"], *(r[n] for n in names), r.get("bucket_mb")))
    return [group[-1] for group in groups.values()]


def overlap(rows: list[dict], most: int = 4):
    """One step of DDP: what the device computes, and when each bucket travels."""
    found = profiles(rows)[:most]
    if not found:
        return missing("profiles of benchmarks/overlap.py.")
    heights = [2 + len(row["buckets"]) for row in found]
    figure, axes = plt.subplots(
        len(found),
        1,
        squeeze=False,
        height_ratios=heights,
        figsize=(8, 0.8 * len(found) + 0.19 * sum(heights)),
    )
    for row, ax in zip(found, axes[:, 0], strict=True):
        phases = {"forward": (0, row["backward_start_ms"])}
        phases["backward (with its waiting)"] = (row["backward_start_ms"], row["backward_end_ms"])
        phases["optimizer"] = (row["backward_end_ms"], row["step_ms"])
        for index, (name, (start, end)) in enumerate(phases.items()):
            color, hatch = AREAS[(3, 1, 4)[index]]
            ax.barh(
                0, end - start, 0.8, start, color=color, hatch=hatch, ec="black", lw=0.6, label=name
            )
        for place, bucket in enumerate(row["buckets"], 1):
            start, end = bucket["start_ms"], bucket["end_ms"]
            label = "all-reduce of a bucket" if place == 1 else None
            ax.barh(place, end - start, 0.7, start, color=AREAS[0][0], label=label)
            room = row["step_ms"] / 100
            right = end < 0.8 * row["step_ms"]
            style = {"va": "center", "size": 7, "ha": "left" if right else "right"}
            ax.text(end + room if right else start - room, place, human(bucket["bytes"]), **style)
        title = f"{row['model']}, {row['image_size']} px, batch {row['batch']} a rank, "
        title += f"{row['precision']}: {row['hidden_ms']:.1f} ms of communication hidden, "
        title += f"{row['exposed_ms']:.1f} ms exposed\n{where(row)}, {row['date']}"
        ax.set(title=title, xlim=(0, row["step_ms"]), yticks=[])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("ms since the step began, on rank 0")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, ncols=4, fontsize=8, loc="outside lower center", frameon=False)
    return figure


def hidden(rows: list[dict]):
    """How much of each step's communication hides behind the backward pass."""
    found = profiles(rows)
    if not found:
        return missing("profiles of benchmarks/overlap.py.")
    names = labels(found, ("model", "devices", "precision"))
    figure, axes = canvas(1, height=1 + 0.4 * len(found))
    ax, lines = axes[0, 0], []
    for place, (row, name) in enumerate(zip(found, names, strict=True)):
        step, left = row["step_ms"], 0
        rest = step - row["hidden_ms"] - row["exposed_ms"]
        parts = {"no communication": rest, "communication, hidden": row["hidden_ms"]}
        parts["communication, exposed"] = row["exposed_ms"]
        for index, (words, value) in enumerate(parts.items()):
            color, hatch = AREAS[(3, 1, 0)[index]]
            style = {"color": color, "hatch": hatch if index else "", "ec": "black", "lw": 0.6}
            ax.barh(place, value / step, 0.7, left, label=None if place else words, **style)
            left += value / step
        total = row["hidden_ms"] + row["exposed_ms"]
        share = f"{row['hidden_ms'] / total:.0%}" if total else "-"
        lines.append((name, f"{step:.1f}", f"{total:.1f}", f"{row['exposed_ms']:.1f}", share))
        lines[-1] += (f"{row['exposed_ms'] / step:.1%}",)
    ax.set_yticks(range(len(found)), names)
    ax.set(xlim=(0, 1), xlabel="share of the step", title="what the step's time goes into")
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), ncols=3, fontsize=8, loc="outside lower center")
    heads = ["", "step ms", "all-reduce ms", "exposed ms", "hidden", "exposed, of the step"]
    table(heads, lines)
    return figure


def predicted(rows: list[dict], steps: list[dict]):
    """What the ring's law, fitted to lone messages, says of the buckets of real steps."""
    found, lines = messages(rows), []
    for row in profiles(steps):
        key = row["hardware"], row["backend"], row["devices"]
        if key in found:
            points = found[key]
            fitted = fit_ring(key[2], list(points), [value[0] for value in points.values()])
            sizes = [bucket["bytes"] for bucket in row["buckets"]]
            lone = sum(ring(key[2], size, *fitted) for size in sizes) * 1e3
            real = sum(bucket["end_ms"] - bucket["start_ms"] for bucket in row["buckets"])
            lines.append(
                (
                    row,
                    len(sizes),
                    human(sum(sizes)),
                    f"{lone:.1f}",
                    f"{real:.1f}",
                    f"{real / lone:.1f}",
                )
            )
    if not lines:
        return missing("messages and profiles of the same machine, day and device count.")
    names = labels([line[0] for line in lines], ("model", "devices", "precision"))
    heads = ["", "buckets", "bytes", "law, ms", "in the step, ms", "ratio"]
    return table(heads, [(name, *line[1:]) for name, line in zip(names, lines, strict=True)])


# ---- batch_and_lr.ipynb --------------------------------------------------------------------------

RULES = {  # lr in the file is the rate at factor 1; the rule multiplies it by factor ** power
    "none": ("rate stays", 0),
    "sqrt": ("rate × √factor", 0.5),
    "linear": ("rate × factor", 1),
}


def curves(rows: list[dict], what: str = "train_loss"):
    """A curve for each rule, a panel for each factor; the range is that of the seeds."""
    if not rows:
        return missing("recorded runs with larger batches.")
    factors = sorted({row["factor"] for row in rows})
    figure, axes = plt.subplots(1, len(factors), figsize=(9, 3), sharey=True, squeeze=False)
    for factor, ax in zip(factors, axes[0], strict=True):
        some = [row for row in rows if row["factor"] == factor]
        for index, (rule, words) in enumerate(RULES.items()):
            epochs = sorted(
                by([r for r in some if r["rule"] == rule], lambda r: r["epoch"]).items()
            )
            values = {epoch: [row[what] for row in group] for epoch, group in epochs}
            if values:
                points = {e: (statistics.fmean(v), min(v), max(v)) for e, v in values.items()}
                line(ax, index, {e + (index - 1) / 8: v for e, v in points.items()}, words[0])
        ax.set(xlabel="epoch", title=f"batch × {factor} = {some[0]['effective_batch']}")
    axes[0, 0].set_ylabel(what.replace("_", " "))
    if what == "train_loss":
        axes[0, 0].set_yscale("log")
    legend(axes[0, -1])
    return figure


def final(rows: list[dict]):
    """Test accuracy after the last epoch, over the batch, for each rule."""
    if not rows:
        return missing("recorded runs with larger batches.")
    last = max(row["epoch"] for row in rows)
    ends = by([row for row in rows if row["epoch"] == last], ("rule", "factor"))
    ones = [row for (_, factor), group in ends.items() if factor == 1 for row in group]
    figure, axes = canvas(1)
    ax, lines = axes[0, 0], []
    for index, (rule, (words, power)) in enumerate(RULES.items()):
        groups = {factor: group for (name, factor), group in ends.items() if name == rule}
        if not groups:
            continue
        if ones:
            groups = {1: ones} | groups  # at factor 1 all rules are one, and may be recorded once
        points = {}
        for factor, group in sorted(groups.items()):
            values = [100 * row["test_accuracy"] for row in group]
            batch = group[0]["effective_batch"]
            points[batch] = statistics.fmean(values), min(values), max(values)
            rate, seeds = f"{group[0]['lr'] * factor**power:.3g}", len({r["seed"] for r in group})
            loss = statistics.fmean(row["train_loss"] for row in group)
            spread = f"{min(values):.1f} to {max(values):.1f}"
            lines.append(
                (words, batch, rate, seeds, f"{loss:.3f}", f"{points[batch][0]:.1f}", spread)
            )
        line(ax, index, {b * 1.04 ** (index - 1): v for b, v in points.items()}, words)
    batches = sorted({row["effective_batch"] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, batches)
    ax.set(xlabel="effective batch", ylabel="test accuracy, %", title=f"after {last} epochs")
    legend(ax)
    table(["", "batch", "rate", "seeds", "train loss", "accuracy, %", "seeds' range"], lines)
    return figure


# ---- sampling.ipynb ------------------------------------------------------------------------------


def grid(panels: dict, meaning: dict, across: str):
    """Draw tables of cells: panels is {title: {row: [(text, kind)]}}, meaning is {kind: legend}."""
    heights = [len(table) for table in panels.values()]
    widest = max(len(cells) for table in panels.values() for cells in table.values())
    figure, axes = plt.subplots(
        len(panels),
        1,
        squeeze=False,
        figsize=(2 + 0.3 * widest, 0.8 * len(panels) + 0.3 * sum(heights)),
        height_ratios=heights,
    )
    for (title, lists), ax in zip(panels.items(), axes[:, 0], strict=True):
        for y, cells in enumerate(lists.values()):
            for x, (text, kind) in enumerate(cells):
                color, hatch = SHADES[kind % len(SHADES)]
                ax.barh(y, 1, 1, x - 0.5, color=color, hatch=hatch, ec="black", lw=0.6)
                box = {"fc": "white", "ec": "none", "pad": 0.8}
                ax.text(x, y, text, ha="center", va="center", size=8, bbox=box)
        ax.set_yticks(range(len(lists)), list(lists))
        ax.set(
            xlim=(-0.6, widest - 0.4), ylim=(len(lists) - 0.4, -0.6), title=title, aspect="equal"
        )
        ax.set_xticks(range(widest), range(widest), size=7)
        ax.grid(visible=False)
    axes[-1, 0].set_xlabel(across)
    patches = [
        Patch(
            fc=SHADES[kind % len(SHADES)][0],
            hatch=SHADES[kind % len(SHADES)][1],
            ec="black",
            label=words,
        )
        for kind, words in meaning.items()
    ]
    figure.legend(handles=patches, ncols=4, fontsize=8, loc="outside lower center", frameon=False)
    return figure


SHADES = [("#ffffff", ""), ("#9ecae1", "////"), ("#fdd0a2", "...."), ("#888888", "")]
SHADES += [("#c7e9c0", "xxxx"), ("#dddddd", "----")]


def hands(panels: dict):
    """A row for each rank, with the numbers of its samples in order: {title: {rank: samples}}."""
    ranks = sorted({rank for lists in panels.values() for rank in lists})
    cells = {
        title: {f"rank {rank}": [(n, rank) for n in lists[rank]] for rank in lists}
        for title, lists in panels.items()
    }
    return grid(cells, {rank: f"rank {rank}" for rank in ranks}, "place in the rank's list")


def owners(panels: dict):
    """A row for each epoch: which rank gets which sample. {title: {epoch: {rank: samples}}}."""
    cells, ranks = {}, set()
    for title, epochs in panels.items():
        cells[title] = {}
        for epoch, lists in epochs.items():
            owner = {sample: rank for rank in lists for sample in lists[rank]}
            ranks |= set(lists)
            cells[title][f"epoch {epoch}"] = [(owner[n], owner[n]) for n in sorted(owner)]
    return grid(cells, {rank: f"rank {rank}" for rank in sorted(ranks)}, "sample of the data set")


def repeats(panels: dict, samples: int):
    """A row for each rank, and which samples come a second time. Prints what each way counts."""
    cells, lines = {}, []
    for title, lists in panels.items():
        seen, cells[title] = set(), {}
        longest = max(map(len, lists.values()))
        for rank in lists:
            cells[title][f"rank {rank}"] = [(n, 0) for n in lists[rank]]
        for place in range(longest):
            for rank in lists:
                if place < len(lists[rank]):
                    sample = lists[rank][place]
                    cells[title][f"rank {rank}"][place] = (sample, 3 if sample in seen else 0)
                    seen.add(sample)
        dealt = sum(map(len, lists.values()))
        lost = sorted(set(range(samples)) - seen)
        lines.append((title, dealt, dealt - len(seen), len(lost)))
    table([f"{samples} samples", "dealt", "repeated", "left out"], lines)
    return grid(cells, {0: "first time", 3: "a second time"}, "place in the rank's list")


# ---- the README's figures ------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the data are")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures")
    args = parser.parse_args()
    plt.switch_backend("svg")
    args.out.mkdir(parents=True, exist_ok=True)
    steps = read(args.results / "overlap.jsonl")
    drawn = {
        "scaling.svg": speedup(best(read(args.results / "scaling.csv"))),
        "overlap.svg": overlap(steps, most=3),
    }
    for name, figure in drawn.items():
        if figure:
            figure.savefig(args.out / name, metadata={"Date": None})
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
