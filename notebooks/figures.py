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
from operator import itemgetter
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
GREY, BLACK = {"color": "#888888", "lw": 1}, {"color": "black", "lw": 1}

plt.rcParams.update({"figure.dpi": 80, "figure.facecolor": "white", "axes.grid": True})
plt.rcParams.update({"grid.color": "#dddddd", "axes.axisbelow": True, "hatch.linewidth": 0.6})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
plt.rcParams.update({"axes.titlesize": 9, "figure.constrained_layout.use": True})
plt.rcParams.update({"svg.hashsalt": "ddp"})

# ---- rows ----------------------------------------------------------------------------------------

WORK = ("hardware", "model", "image_size", "batch", "precision", "threads", "num_workers")
WORK += ("options",)
ROW = ("script", "mode", "devices", "model", "image_size", "per_rank_batch", "precision")
ROW += ("threads", "num_workers", "options", "gpu", "cpu", "torch")


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
    keep = {"torch", "cuda", "nccl", "python", "commit"}  # versions: 2.10 is not 2.1
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in file if line.strip()]
        else:
            rows = list(csv.DictReader(file))
            rows = [{k: v if k in keep else number(v) for k, v in row.items()} for row in rows]
    return latest([row | {"hardware": hardware(row)} for row in rows])


def latest(rows: list[dict]) -> list[dict]:
    """Return the rows without those of work that was measured again at a later commit."""
    if not rows or "script" not in rows[0]:
        return rows
    work = itemgetter(*ROW)
    last = {work(row): row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[work(row)]]


def hardware(row: dict) -> str:
    """Return what a row was measured on. Only rows of the same hardware and day are compared."""
    on_gpu = row.get("device") == "cuda"
    name = row["gpu"] if on_gpu else f"{row['cores']} cores of {row['cpu']}"
    return f"{name}, torch {row['torch'].partition('+')[0]}, {row['date']}"


def by(rows: list[dict], *names: str) -> dict:
    """Return the rows in groups, {value or values of these columns: rows}, in their order."""
    groups = defaultdict(list)
    for row in rows:
        groups[itemgetter(*names)(row)].append(row)
    return dict(groups)


def alike(one: dict, other: dict, names: tuple[str, ...]) -> bool:
    """Return whether two have the same in all these columns."""
    return all(one[name] == other[name] for name in names)


def best(rows: list[dict]) -> list[dict]:
    """Return the rows of one hardware: GPUs before CPUs, the most devices, the last day."""

    def rank(group):
        return group[0]["device"] == "cuda", max(r["devices"] for r in group), group[0]["date"]

    return max(by(rows, "hardware").values(), key=rank, default=[])


def windows(rows: list[dict], what: str = "samples_per_second") -> np.ndarray:
    """Return of rows of equal work (median, lowest window, highest window)."""
    lowest, highest = min(row["min"] for row in rows), max(row["max"] for row in rows)
    return np.array([statistics.median(row[what] for row in rows), lowest, highest])


def without(options: str) -> set[str]:
    """Return what topics/fast.py was told to leave out."""
    found = re.search(r"--without[= ](\S+)", str(options))
    return set(found[1].split(",")) if found else set()


def series(rows: list[dict]) -> list[dict]:
    """Return one dictionary for each kind of work: what it is, and its speed at each device count.

    points: {devices: (median, slowest, quickest window)} in samples/s
    alone:  whether the model without DDP was measured, on one device (rung 00)
    base:   the median of that, or else of this script on one device; None if not measured
    speedup, efficiency: as points, against the base, and that for each device
    """
    batch = {"weak": "per_rank_batch", "strong": "effective_batch"}
    rows = [row | {"batch": row[batch[row["mode"]]]} for row in rows]
    found = []
    for group in by(rows, *WORK, "mode", "script").values():
        one = {name: group[0][name] for name in (*WORK, "mode", "script", "device")}
        first = [row for row in rows if row["devices"] == 1 and alike(row, one, WORK[:-1])]
        # On one device weak and strong scaling are the same work.
        mine = [row for row in first if alike(row, one, ("script", "options"))]
        counts = by(group, "devices") | ({1: mine} if mine else {})
        one["points"] = {n: windows(counts[n]) for n in sorted(counts)}
        if one["script"].startswith("topics"):
            left_out = without(one["options"]) | {"ddp"}
            plain = [row for row in first if row["script"] == one["script"]]
            plain = [row for row in plain if without(row["options"]) == left_out]
        else:
            plain = [row for row in first if row["script"].startswith("00_")]
        one["alone"] = bool(plain)
        one["base"] = windows(plain or mine)[0] if plain or mine else None
        if one["base"]:
            one["speedup"] = {n: values / one["base"] for n, values in one["points"].items()}
            one["efficiency"] = {n: values / n for n, values in one["speedup"].items()}
        found.append(one)
    return found


def scaled(rows: list[dict], mode: str = "weak") -> list[dict]:
    """Return the series of DDP that have a speed on one device and on several.

    Of scripts that do the same work only the first in DDP is kept.
    """
    found = [one for one in series(rows) if one["mode"] == mode and one["script"] in DDP]
    found = [one for one in found if one["base"] and max(one["points"]) > 1]
    found = [one for one in found if "ddp" not in without(one["options"])]
    groups = by(found, *WORK).values()
    return [min(group, key=lambda one: DDP.index(one["script"])) for group in groups]


def rungs(found: list[dict]) -> list[dict]:
    """Return the series of rungs: those on GPUs, if there are any."""
    found = [one for one in found if one["script"][0] == "0"]
    return [one for one in found if one["device"] == "cuda"] or found


def main_model(found: list[dict]) -> list[dict]:
    """Return the series of the model that is shown where there is room for one."""
    models = [one["model"] for one in found]
    model = next((name for name in MODELS if name in models), models[0])
    size = max(one["image_size"] for one in found if one["model"] == model)
    return [one for one in found if (one["model"], one["image_size"]) == (model, size)]


def quickest(found: list[dict]) -> list[dict]:
    """Return of the series that differ in precision alone the quickest one."""
    same = [name for name in (*WORK, "mode", "script") if name != "precision"]
    return [max(group, key=itemgetter("base")) for group in by(found, *same).values()]


WORDS = {
    "script": lambda v: v.partition("_")[0] if v[0] == "0" else v,
    "image_size": "{} px".format,
    "batch": "batch {}".format,
    "threads": lambda v: f"{v} thread{'s' * (v > 1)}",
    "num_workers": "{} loaders".format,
    "devices": "on {}".format,
    "options": lambda v: f"without {','.join(sorted(without(v)))}" if without(v) else str(v),
}


def labels(found: list[dict], *always: str) -> list[str]:
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


def labelled(found: list[dict], *always: str) -> list[tuple[str, dict]]:
    """Return the dictionaries with their labels."""
    return list(zip(labels(found, *always), found, strict=True))


# ---- drawing -------------------------------------------------------------------------------------


def missing(sentence: str) -> None:
    print(f"Nothing to draw here: {sentence}")


def canvas(heights: list[float], columns: int = 1, size: tuple | None = None):
    """Return a figure with rows of these heights, and its axes: a list, or a list for each row."""
    size = size or (9, sum(heights))
    options = {"figsize": size, "height_ratios": heights, "squeeze": False}
    figure, axes = plt.subplots(len(heights), columns, **options)
    return figure, axes[:, 0] if columns == 1 else axes


def panels(found: list[dict], height: float, columns: int = 1):
    """Return a figure and, for each hardware, (its name, its rows or series, its axes)."""
    groups = by(found, "hardware")
    figure, axes = canvas([height] * len(groups), columns)
    return figure, list(zip(groups, groups.values(), axes, strict=True))


def line(ax, index: int, points: dict, label: str) -> None:
    """Draw {x: (y, lowest, highest)} with its range."""
    color, dashes, marker = LINES[index % len(LINES)]
    y, low, high = np.transpose(list(points.values()))
    error = [(y - low).clip(0), (high - y).clip(0)]
    style = {"color": color, "ls": dashes, "marker": marker, "ms": 5, "capsize": 3}
    ax.errorbar(list(points), y, error, label=label, **style)


def area(index: int, shades: list = AREAS) -> dict:
    """Return the style of one kind of bar."""
    color, hatch = shades[index % len(shades)]
    return {"color": color, "hatch": hatch, "ec": "black", "lw": 0.6}


def bars(ax, groups: list[str], kinds: dict, form: str = "{:.2f}") -> None:
    """Draw lying bars: kinds is {legend: {place in groups: (value, lowest, highest)}}."""
    height = 0.8 / len(kinds)
    top = max(high for values in kinds.values() for _, _, high in values.values())
    for index, (kind, values) in enumerate(kinds.items()):
        shift = (index - (len(kinds) - 1) / 2) * height
        for nth, (group, (value, low, high)) in enumerate(values.items()):
            place, label = group + shift, None if nth else kind
            ax.barh(place, value, height * 0.9, label=label, **area(index))
            if high > low:
                ax.plot([low, high], [place, place], marker="|", ms=4, **BLACK)
            ax.text(max(value, high) + top / 80, place, form.format(value), va="center", size=8)
    ax.set_yticks(range(len(groups)), groups)
    ax.set_xlim(0, top * 1.12)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def noun(one: dict, n: int = 2) -> str:
    """Return what n devices are called."""
    word, plural = ("GPU", "s") if one["device"] == "cuda" else ("process", "es")
    return word + plural * (n > 1)


def where(row: dict) -> str:
    """Return the devices of a row, as 2 × a GPU, or 2 processes on a CPU."""
    name, n = row["hardware"].partition(", torch")[0], row["devices"]
    return f"{n} × {name}" if row["device"] == "cuda" else f"{n} {noun(row, n)}, {name}"


def device_axis(ax, found: list[dict], more=(1,), log: bool = False) -> None:
    """Mark the device counts that were measured, and more of them."""
    counts = sorted(set(more).union(*(one["points"] for one in found)))
    if log:
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
    ax.set_xticks(counts, counts)
    ax.set_xlabel(noun(found[0]))


def finish(ax, **words) -> None:
    """Set the title and the names of the axes; put the legend at the right, where it hides none."""
    ax.set(**words)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def below(figure, columns: int, handles, names, frame: bool = False) -> None:
    """Put one legend below all panels."""
    style = {"fontsize": 8, "loc": "outside lower center", "frameon": frame}
    figure.legend(handles, names, ncols=columns, **style)


def table(heads: list[str], lines: list[tuple]) -> None:
    """Print a table of text, numbers to the right."""
    cells = [heads, *([str(cell) for cell in row] for row in lines)]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *row in cells:
        words = [c.rjust(w) for c, w in zip(row, widths, strict=True)]
        print("  ".join([name.ljust(first), *words]).rstrip())


# ---- scaling.ipynb -------------------------------------------------------------------------------


def contents(rows: list[dict]) -> None:
    """Print what was measured on which hardware."""
    for name, group in by(rows, "hardware").items():
        print(name)
        for column in ("devices", "model", "mode", "precision"):
            print(f"    {column}: {', '.join(map(str, by(group, column)))}")


def speedup(rows: list[dict]):
    """Weak scaling of DDP: speedup and efficiency against the ideal and against the course."""
    found = scaled(rows)
    if not found:
        return missing("DDP on one device and on several, in weak scaling.")
    figure, drawn = panels(found, 3.2, 2)
    lines = []
    n, (low, high) = np.array(list(COURSE)), np.transpose(list(COURSE.values()))
    crosses = {"color": "#888888", "ls": "none", "marker": "x", "ms": 7, "capsize": 4}
    crosses["label"] = "what a course says"
    for name, group, (left, right) in drawn:
        group = main_model(group)
        for ax, divide in ((left, 1), (right, n)):
            ax.plot(n, n / divide, label="ideal", **GREY)
            ax.errorbar(n, (low + high) / 2 / divide, (high - low) / 2 / divide, **crosses)
        for index, (label, one) in enumerate(labelled(group, "model", "script", "precision")):
            line(left, index, one["speedup"], label)
            line(right, index, one["efficiency"], label)
            for k, (value, slow, quick) in one["efficiency"].items():
                cells = f"{one['speedup'][k][0]:.2f}", f"{value:.3f}", f"{slow:.3f} to {quick:.3f}"
                lines.append((label, k, *cells, "no DDP" if one["alone"] else "itself"))
        device_axis(left, group, COURSE)
        device_axis(right, group, COURSE, log=True)
        left.set(ylabel="speedup", yticks=left.get_xticks(), title=name)
        finish(right, ylim=(0, None), ylabel="speedup / devices", title="efficiency")
    table(["", "devices", "speedup", "efficiency", "windows", "1.0 is one device with"], lines)
    return figure


def data_parallel(rows: list[dict]):
    """nn.DataParallel against DDP on the same number of GPUs."""
    found = [one for one in series(rows) if one["mode"] == "weak" and one["base"]]
    found = [one for one in found if one["device"] == "cuda"]
    old = [one for one in found if one["script"].startswith("00b") and max(one["points"]) > 1]
    if not old:
        return missing("DataParallel on several GPUs (00b uses none on the CPU).")
    new = [one for script in DDP for one in found if one["script"] == script]
    heads, theirs, ours = [], {}, {}
    for one in quickest(old):
        for n in (n for n in one["points"] if n > 1):
            rivals = [x for x in new if alike(x, one, WORK) and n in x["points"]]
            theirs[len(heads)] = one["speedup"][n]
            if rivals:
                ours[len(heads)] = rivals[0]["speedup"][n]
            heads.append(one | {"devices": n})
    names = labels(heads, "model", "precision", "devices")
    figure, [ax] = canvas([1 + 0.45 * len(heads)])
    bars(ax, names, {"DataParallel (00b)": theirs, "DDP": ours})
    ax.axvline(1, **BLACK)
    finish(ax, xlabel="speedup against one GPU", title="DataParallel against DDP")
    lines = []
    for row, speed in ours.items():
        a, b = theirs[row][0], speed[0]
        lines.append((names[row], f"{a:.2f}", f"{b:.2f}", f"{b / a:.1f}"))
    table(["speedup against one GPU", "DataParallel", "DDP", "DDP / DataParallel"], lines)
    return figure


def launchers(rows: list[dict]):
    """Spawn, torchrun and Lightning relative to rung 03 (or 02, where 03 was not measured)."""
    what = {"01": "01, mp.spawn", "02": "02, torchrun", "03": "03, torchrun"}
    what["04"] = "04, Lightning"
    found = [one for one in series(rows) if one["script"][:2] in what]
    found = [one for one in found if one["mode"] == "weak"] or found
    heads, speeds = [], []
    for group in by(found, *WORK, "mode").values():
        scripts = {one["script"][:2]: one["points"] for one in group}
        first = "03" if "03" in scripts else "02"
        others = {n for name in scripts if name != first for n in scripts[name]}
        most = max(others & set(scripts.get(first, [])), default=0)
        if most:
            here = {name: points[most] for name, points in scripts.items() if most in points}
            speeds.append({name: values / here[first][0] for name, values in here.items()})
            head = {name: group[0][name] for name in (*WORK, "mode")}
            heads.append(head | {"devices": most, "of": first})
    if not heads:
        return missing("rung 03 or 02 beside another one, on the same work.")
    names = labels(heads, "model", "precision", "devices")
    figure, [ax] = canvas([1.2 + 0.35 * len(heads)])
    for index, (name, words) in enumerate(what.items()):
        have = [row for row, x in enumerate(speeds) if name in x and heads[row]["of"] != name]
        if have:
            value, low, high = np.transpose([speeds[row][name] for row in have])
            style = {"color": LINES[index][0], "marker": LINES[index][2], "ms": 5, "ls": "none"}
            places, error = np.array(have) + (index - 1.5) * 0.2, [value - low, high - value]
            ax.errorbar(value, places, xerr=error, capsize=2, label=words, **style)
    ax.axvline(1, **BLACK)
    ax.set_yticks(range(len(heads)), names)
    ax.set_ylim(len(heads) - 0.5, -0.5)
    ax.set_title("the launcher, and Lightning's loop")
    finish(ax, xlabel="samples/s relative to 03 (or 02)")
    lines = []
    for label, head, here in zip(names, heads, speeds, strict=True):
        cells = [f"{here[name][0]:.3f}" if name in here else "" for name in what]
        _, low, high = here[head["of"]]
        lines.append((label, *cells, f"{low:.3f} to {high:.3f}"))
    table(["samples/s, relative", *what, "windows of 1.000"], lines)
    return figure


def weak_strong(rows: list[dict]):
    """Efficiency when the work grows with the devices, and when it does not."""
    weak, found = scaled(rows, "weak"), []
    shared = [name for name in WORK if name != "batch"]
    for one in quickest(scaled(rows, "strong")):
        twins = [other for other in weak if alike(other, one, shared)]
        twins.sort(key=lambda other: other["batch"] != one["batch"])  # one of that batch, if any
        found += [twins[0], one] if twins else []
    if not found:
        return missing("the same work in weak and in strong scaling, on several devices.")
    figure, drawn = panels(found, 2.8)
    lines = []
    for name, group, ax in drawn:
        group = main_model(group)
        for index, (label, one) in enumerate(labelled(group, "model", "mode", "precision")):
            line(ax, index, one["efficiency"], label)
            for n, values in one["efficiency"].items():
                batch = one["batch"] if one["mode"] == "weak" else one["batch"] // n
                lines.append((label, n, batch, f"{values[0]:.3f}"))
        ax.axhline(1, **GREY)
        device_axis(ax, group, log=True)
        finish(ax, ylim=(0, None), ylabel="efficiency", title=name)
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


def spread(points: dict, fit, draws: int = 2000) -> tuple[float, float, float]:
    """Return what fit makes of the medians, and a range: 5 to 95 % of 2,000 fits.

    Each of those takes for each device count a speed between the slowest and the quickest window.
    """
    source, found = random.Random(0), []
    ranges = {n: values.tolist() for n, values in points.items()}
    for _ in range(draws):
        drawn = {n: source.triangular(low, high, mid) for n, (mid, low, high) in ranges.items()}
        found.append(fit(drawn))
    found.sort()
    middle = fit({n: values[0] for n, values in points.items()})
    return middle, min(middle, found[draws // 20]), max(middle, found[-1 - draws // 20])


def amdahl(rows: list[dict], target: int = 8):
    """Amdahl's law fitted below `target` devices, and what it predicts there."""
    found = quickest([one for mode in ("weak", "strong") for one in scaled(rows, mode)])
    found = rungs([one for one in found if {1} < {n for n in one["points"] if n < target}])
    if not found:
        return missing(f"DDP on one device and on 2 to {target - 1}.")
    figure, drawn = panels(found, 3.6)
    lines = []
    n = np.linspace(1, target, 50)
    for name, group, ax in drawn:
        shown = main_model(group)
        ax.plot(n, n, label="ideal", **GREY)
        for label, one in labelled(group, "model", "mode", "precision"):
            points = {k: v for k, v in one["points"].items() if k < target}
            s, low, high = spread(points, serial_fraction)
            y, least, most = law(s, target), law(high, target), law(low, target)
            known = {k: v[0] / points[1][0] for k, v in one["points"].items()}
            if one in shown:
                color, dashes, marker = LINES[shown.index(one) % len(LINES)]
                ax.plot(n, law(s, n), color=color, ls=dashes, label=f"{label}: fitted")
                ax.fill_between(n, law(high, n), law(low, n), color=color, alpha=0.15, lw=0)
                style = {"color": color, "ls": "none", "marker": marker}
                ax.plot(list(known), list(known.values()), label="    measured", **style)
                style |= {"mfc": "white", "ms": 10, "capsize": 5, "label": "    predicted"}
                ax.errorbar(target, y, [[y - least], [most - y]], zorder=1, **style)
            cells = ", ".join(map(str, points)), f"{s:.4f}", f"{low:.4f} to {high:.4f}", f"{y:.2f}"
            cells += f"{least:.2f} to {most:.2f}", f"{y * points[1][0]:.0f}"
            lines.append((label, *cells, f"{known[target]:.2f}" if target in known else "-"))
        device_axis(ax, group, (1, target))
        finish(ax, ylabel="speedup against DDP on one", title=name)
    heads = ["", "fitted to", "serial", "5 to 95 %", f"speedup at {target}", "5 to 95 %"]
    table([*heads, "samples/s", "measured"], lines)
    for label, one in labelled(found, "model", "mode", "precision"):
        known = {k: v[0] for k, v in one["points"].items() if k < target}
        last = max(known)
        if min(known.values()) < known[1]:
            print(f"{label}: several are slower than one. The law has no such case.")
        elif len(known) > 2:
            there = law(serial_fraction({k: v for k, v in known.items() if k < last}), last)
            print(f"{label}: fitted without {last}, the law says {there:.2f} there; ", end="")
            print(f"measured {known[last] / known[1]:.2f}.")
    return figure


def ring_speedup(target: int, points: dict, batch: int, size: int, laws: dict):
    """Return for `target` devices what the ring's law says: (its answer, cells for a table).

    A step takes as long as on one device, and a share of its all-reduce on top: what does not hide
    behind the backward pass. The share is fitted to points, {devices: samples/s of `batch` samples
    each} with 1 and others; the time of the all-reduce is the ring's law. laws: {devices: (start,
    rate)} for those others.
    """
    counts = [n for n in points if n > 1]
    sent = np.array([ring(n, size, *laws[n]) for n in counts])
    late = ring(target, size, *laws[counts[-1]])  # as if more devices had the same links

    def share_of(speeds):  # a step on n devices takes n * batch / speed
        more = [batch * (n / speeds[n] - 1 / speeds[1]) for n in counts]
        return max(float(np.dot(more, sent) / np.dot(sent, sent)), 0.0)

    shares = spread(points, share_of)
    first = batch / points[1][0]
    middle, most, least, worst = (target * first / (first + s * late) for s in (*shares, 1))
    cells = ", ".join(map(str, points)), human(size), f"{late * 1e3:.2f}", f"{shares[0]:.2f}"
    return middle, (*cells, f"{middle:.2f}", f"{least:.2f} to {most:.2f}", f"{worst:.2f}")


def ring_ahead(rows: list[dict], lone: list[dict], steps: list[dict], target: int = 8):
    """What the ring's law predicts for `target` devices in weak scaling, to set beside Amdahl's."""
    sizes = {(row["hardware"], row["model"]): row["buckets"] for row in profiles(steps)}
    laws, lines, tests = defaultdict(dict), [], []
    for (hardware, _, n), points in messages(lone).items():
        laws[hardware][n] = fit_ring(n, points)
    for label, one in labelled(rungs(quickest(scaled(rows))), "model", "precision"):
        size = sum(bucket["bytes"] for bucket in sizes.get((one["hardware"], one["model"]), []))
        counts = [n for n in one["points"] if n < target and n in {1, *laws[one["hardware"]]}]
        if not size or not {1} < set(counts):
            continue
        points = {n: one["points"][n] for n in counts}
        real = {n: values[0] / points[1][0] for n, values in one["points"].items()}
        law_of = one["batch"], size, laws[one["hardware"]]
        _, cells = ring_speedup(target, points, *law_of)
        lines.append((label, *cells, f"{real[target]:.2f}" if target in real else "-"))
        if len(counts) > 2:
            *fewer, last = counts
            there, _ = ring_speedup(last, {n: points[n] for n in fewer}, *law_of)
            words = f"the law says {there:.2f} there; measured {real[last]:.2f}."
            tests.append(f"{label}: fitted without {last}, {words}")
    if not lines:
        return missing("scaling, lone messages and a profile of the same machine and day.")
    heads = ["", "fitted to", "gradients", f"all-reduce on {target}, ms", "not hidden"]
    heads += [f"speedup at {target}", "5 to 95 %", "if nothing is hidden", "measured"]
    table(heads, lines)
    print(*tests, sep="\n")


def bound(rows: list[dict]):
    """Efficiency of each model: much arithmetic for each weight, or many weights to send."""
    found = [one for one in scaled(rows) if one["script"][0] == "0"]
    if not found:
        return missing("DDP on one device and on several, in weak scaling.")
    groups = by(found, "hardware")
    counts = [sorted({1}.union(*(one["points"] for one in g))) for g in groups.values()]
    sizes = zip(groups.values(), counts, strict=True)
    figure, axes = canvas([1 + 0.2 * len(group) * len(some) for group, some in sizes])
    lines = []
    for (name, group), some, ax in zip(groups.items(), counts, axes, strict=True):
        group.sort(key=lambda one: -one["speedup"][max(one["points"])][0])
        names, kinds = labels(group, "model", "precision"), {}
        for n in some[1:]:
            have = {row: one for row, one in enumerate(group) if n in one["points"]}
            drawn = {row: one["efficiency"][n] for row, one in have.items()}
            kinds[f"{n} {noun(group[0])}"] = drawn
            for row, one in have.items():
                cells = f"{one['speedup'][n][0]:.2f}", f"{drawn[row][0]:.3f}"
                lines.append((names[row], n, *cells))
        bars(ax, names, kinds)
        ax.axvline(1, **BLACK)
        finish(ax, xlabel="efficiency (1 is ideal)", title=name)
    table(["", "devices", "speedup", "efficiency"], lines)
    return figure


def cores(rows: list[dict]):
    """The same cores of a CPU: one process with more threads, or more processes with one."""
    found = [one for one in series(rows) if one["device"] == "cpu" and one["model"] == "small"]
    found = [one for one in found if one["script"] in (*DDP, "00_single_gpu.py")]
    shared = [name for name in (*WORK, "mode") if name != "threads"]
    groups = [g for g in by(found, *shared).values() if any(max(x["points"]) > 1 for x in g)]
    if not groups:
        return missing("the small model on a CPU, in one process and in several.")
    kinds = defaultdict(dict)
    for row, group in enumerate(groups):
        ddp = min((x["script"] for x in group if max(x["points"]) > 1), key=DDP.index)
        for one in sorted(group, key=itemgetter("script", "threads")):
            for n, values in one["points"].items():
                if one["script"][:3] == "00_" or (one["script"] == ddp and n > 1):
                    kinds[f"{n} {noun(one, n)} × {WORDS['threads'](one['threads'])}"][row] = values
    heads = [{name: group[0][name] for name in shared} for group in groups]
    names = labels(heads, "model", "mode", "image_size")
    figure, [ax] = canvas([1 + 0.2 * len(groups) * (1 + len(kinds))])
    bars(ax, names, kinds, "{:.0f}")
    finish(ax, xlabel="samples/s", title=" and ".join(by(heads, "hardware")))
    lines = []
    for row, label in enumerate(names):
        first = kinds.get("1 process × 1 thread", {}).get(row)
        for kind in (kind for kind in kinds if row in kinds[kind]):
            speed = kinds[kind][row][0]
            ratio = "" if first is None else f"{speed / first[0]:.2f}"
            lines.append((label, kind, f"{speed:.0f}", ratio))
    table(["", "", "samples/s", "1 process × 1 thread = 1"], lines)
    return figure


def ladder(rows: list[dict]):
    """What each part of topics/fast.py adds to the ones before it."""
    if not rows:
        return missing("results of benchmarks/ladder_of_speed.py.")
    groups = by(rows, "hardware", "model", "image_size", "per_rank_batch")
    figure, axes = canvas([1 + 0.4 * len(by(group, "added")) for group in groups.values()])
    lines = []
    for (name, model, size, batch), ax in zip(groups, axes, strict=True):
        group = groups[name, model, size, batch]
        added, kinds = list(by(group, "added")), {}
        names = [f"+ {part}" if part else "DDP, fp32" for part in added]
        for n, some in sorted(by(group, "devices").items()):
            found = {added.index(part): windows(x) for part, x in by(some, "added").items()}
            devices = f"{n} {noun(some[0], n)}"
            kinds[devices] = {row: found[row] / n for row in sorted(found)}
            for row in sorted(found):
                gain = f"{found[row][0] / found[row - 1][0]:.3f}" if row - 1 in found else ""
                lines.append((f"{model}, {devices}", names[row], f"{found[row][0]:.0f}", gain))
        bars(ax, names, kinds, "{:.0f}")
        title = f"{model}, {size} px, batch {batch} a rank: {name}"
        finish(ax, xlabel=f"samples/s for each {noun(group[0], 1)}", title=title)
    table(["", "", "samples/s", "× the row before"], lines)
    return figure


# ---- communication.ipynb -------------------------------------------------------------------------


def ring(n: int, size, start: float, rate: float):
    """Return seconds of an all-reduce in a ring: 2 (n - 1) messages of size / n bytes each."""
    return 2 * (n - 1) * start + 2 * (n - 1) / n * size / rate


def fit_ring(n: int, points: dict) -> tuple[float, float]:
    """Fit (seconds to start a message, bytes a second); every measurement weighs the same."""
    size, seconds = np.array(list(points)), np.array([value[0] for value in points.values()])
    columns = np.transpose([2.0 * (n - 1) / seconds, 2 * (n - 1) / n * size / seconds])
    start, slope = np.linalg.lstsq(columns, np.ones(len(size)), rcond=None)[0]
    if start < 0:  # no such thing: only the rate is left to fit
        start, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    return float(start), 1 / float(slope)


def messages(rows: list[dict]) -> dict:
    """Return {(hardware, backend, devices): {bytes: (seconds, lowest, highest)}}."""
    groups = by([row for row in rows if row["devices"] > 1], "hardware", "backend", "devices")
    found = {
        key: {size: windows(some, "seconds") for size, some in sorted(by(group, "bytes").items())}
        for key, group in groups.items()
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
    figure, [(left, right)] = canvas([3.6], 2)
    heads, lines = by(rows, "hardware", "backend", "devices"), []
    for index, (key, points) in enumerate(found.items()):
        label, n, sizes = f"{where(heads[key][0])} ({key[1]})", key[2], list(points)
        start, rate = fit_ring(n, points)
        factor = 2 * (n - 1) / n
        # The longest time is the lowest bandwidth.
        speeds = {size: factor * size / t[[0, 2, 1]] / 1e9 for size, t in points.items()}
        line(left, index, {size: t * 1e3 for size, t in points.items()}, label)
        line(right, index, speeds, label)
        for ax in (left, right):
            ax.containers[-1][0].set_linestyle("none")
        curve = np.geomspace(sizes[0], sizes[-1], 60)
        style = {"color": LINES[index % len(LINES)][0], "ls": LINES[index % len(LINES)][1], "lw": 1}
        left.plot(curve, ring(n, curve, start, rate) * 1e3, **style)
        right.plot(curve, factor * curve / ring(n, curve, start, rate) / 1e9, **style)
        off = max(abs(ring(n, size, start, rate) / t[0] - 1) for size, t in points.items())
        cells = f"{2 * (n - 1) * start * 1e6:.0f} µs", f"{rate / 1e9:.2f} GB/s"
        cells += (f"{max(v[0] for v in speeds.values()):.2f} GB/s",)
        # where a message costs as much to start as to move
        lines.append((label, *cells, human(start * n * rate), f"{off:.0%}"))
    for ax in (left, right):
        ax.set(xscale="log", yscale="log", xlabel="bytes in the message")
    left.set(ylabel="ms", title="time of one all-reduce (line: the ring's law)")
    finish(right, ylabel="GB/s", title="bus bandwidth")
    heads = ["", "to start", "fitted rate", "best measured", "half of the time is the start at"]
    table([*heads, "farthest off"], lines)
    return figure


def profiles(rows: list[dict]) -> list[dict]:
    """Return the last profile of each kind of step."""
    names = ("hardware", "model", "image_size", "precision", "batch", "devices", "backend")
    rows = [row | {"batch": row["per_rank_batch"]} for row in rows]
    return [group[-1] for group in by(rows, *names, "bucket_mb").values()]


def overlap(rows: list[dict], most: int = 4):
    """One step of DDP: what the device computes, and when each bucket travels."""
    found = profiles(rows)[:most]
    if not found:
        return missing("profiles of benchmarks/overlap.py.")
    heights = [2 + len(row["buckets"]) for row in found]
    figure, axes = canvas(heights, size=(8, 0.8 * len(found) + 0.19 * sum(heights)))
    for row, ax in zip(found, axes, strict=True):
        step = row["step_ms"]
        moments = [0, row["backward_start_ms"], row["backward_end_ms"], step]
        phases = ("forward", "backward (with its waiting)", "optimizer")
        for index, (name, kind) in enumerate(zip(phases, (3, 1, 4), strict=True)):
            start, end = moments[index : index + 2]
            ax.barh(0, end - start, 0.8, start, label=name, **area(kind))
        for place, bucket in enumerate(row["buckets"], 1):
            start, end = bucket["start_ms"], bucket["end_ms"]
            label = "all-reduce of a bucket" if place == 1 else None
            ax.barh(place, end - start, 0.7, start, color=AREAS[0][0], label=label)
            left, right = start - step / 100, end + step / 100
            x, side = (right, "left") if end < 0.8 * step else (left, "right")
            ax.text(x, place, human(bucket["bytes"]), va="center", ha=side, size=7)
        title = f"{row['model']}, {row['image_size']} px, batch {row['batch']} a rank, "
        title += f"{row['precision']}: {row['hidden_ms']:.1f} ms of communication hidden, "
        title += f"{row['exposed_ms']:.1f} ms exposed\n{where(row)}, {row['date']}"
        ax.set(title=title, xlim=(0, step), yticks=[])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
    axes[-1].set_xlabel("ms since the step began, on rank 0")
    below(figure, 4, *axes[0].get_legend_handles_labels())
    return figure


def hidden(rows: list[dict]):
    """How much of each step's communication hides behind the backward pass."""
    found = profiles(rows)
    if not found:
        return missing("profiles of benchmarks/overlap.py.")
    names = labels(found, "model", "devices", "precision")
    figure, [ax] = canvas([1 + 0.4 * len(found)])
    lines = []
    for place, (row, name) in enumerate(zip(found, names, strict=True)):
        step, behind, exposed, left = row["step_ms"], row["hidden_ms"], row["exposed_ms"], 0
        total = behind + exposed
        for words, value, style in (
            ("no communication", step - total, area(0, SHADES)),
            ("communication, hidden", behind, area(1)),
            ("communication, exposed", exposed, area(0)),
        ):
            ax.barh(place, value / step, 0.7, left, label=None if place else words, **style)
            left += value / step
        share = f"{behind / total:.0%}" if total else "-"
        cells = f"{step:.1f}", f"{total:.1f}", f"{exposed:.1f}", share, f"{exposed / step:.1%}"
        lines.append((name, *cells))
    ax.set_yticks(range(len(found)), names)
    ax.set(xlim=(0, 1), xlabel="share of the step", title="what the step's time goes into")
    ax.invert_yaxis()
    below(figure, 3, *ax.get_legend_handles_labels(), frame=True)
    heads = ["", "step ms", "all-reduce ms", "exposed ms", "hidden", "exposed, of the step"]
    table(heads, lines)
    return figure


def predicted(rows: list[dict], steps: list[dict]):
    """What the ring's law, fitted to lone messages, says of the buckets of real steps."""
    alone, found, lines = messages(rows), [], []
    for row in profiles(steps):
        key = row["hardware"], row["backend"], row["devices"]
        if key in alone:
            law_of = fit_ring(key[2], alone[key])
            sizes = [bucket["bytes"] for bucket in row["buckets"]]
            lone = sum(ring(key[2], size, *law_of) for size in sizes) * 1e3
            real = sum(bucket["end_ms"] - bucket["start_ms"] for bucket in row["buckets"])
            cells = f"{lone:.1f}", f"{real:.1f}", f"{real / lone:.1f}"
            lines.append((len(sizes), human(sum(sizes)), *cells))
            found.append(row)
    if not lines:
        return missing("messages and profiles of the same machine, day and device count.")
    names = labels(found, "model", "devices", "precision")
    heads = ["", "buckets", "bytes", "law, ms", "in the step, ms", "ratio"]
    return table(heads, [(name, *cells) for name, cells in zip(names, lines, strict=True)])


# ---- batch_and_lr.ipynb --------------------------------------------------------------------------

RULES = {  # lr in the file is the rate at factor 1; the rule multiplies it by factor ** power
    "none": ("rate stays", 0),
    "sqrt": ("rate × √factor", 0.5),
    "linear": ("rate × factor", 1),
}


def seeds(rows: list[dict], what: str) -> tuple[float, float, float]:
    """Return (mean, lowest, highest) of rows that differ in their seed."""
    values = [row[what] for row in rows]
    return statistics.fmean(values), min(values), max(values)


def curves(rows: list[dict], what: str = "train_loss"):
    """A curve for each rule, a panel for each factor; the range is that of the seeds."""
    if not rows:
        return missing("recorded runs with larger batches.")
    groups = sorted(by(rows, "factor").items())
    figure, axes = plt.subplots(1, len(groups), figsize=(9, 3), sharey=True, squeeze=False)
    for (factor, group), ax in zip(groups, axes[0], strict=True):
        for index, (rule, (words, _)) in enumerate(RULES.items()):
            epochs = by([row for row in group if row["rule"] == rule], "epoch")
            if epochs:
                points = {e + (index - 1) / 8: seeds(epochs[e], what) for e in sorted(epochs)}
                line(ax, index, points, words)
        ax.set(xlabel="epoch", title=f"batch × {factor} = {group[0]['effective_batch']}")
    axes[0, 0].set_ylabel(what.replace("_", " "))
    if what == "train_loss":
        axes[0, 0].set_yscale("log")
    finish(axes[0, -1])
    return figure


def final(rows: list[dict]):
    """Test accuracy after the last epoch, over the batch, for each rule."""
    if not rows:
        return missing("recorded runs with larger batches.")
    last = max(row["epoch"] for row in rows)
    rows = [row | {"percent": 100 * row["test_accuracy"]} for row in rows if row["epoch"] == last]
    # At factor 1 all rules are one, and may be recorded once.
    ones = by([row for row in rows if row["factor"] == 1], "factor")
    figure, [ax] = canvas([3])
    lines = []
    for index, (rule, (words, power)) in enumerate(RULES.items()):
        some, points = [row for row in rows if row["rule"] == rule], {}
        if not some:
            continue
        for factor, group in sorted((ones | by(some, "factor")).items()):
            batch, loss = group[0]["effective_batch"], seeds(group, "train_loss")[0]
            mean, low, high = seeds(group, "percent")
            points[batch * 1.04 ** (index - 1)] = mean, low, high
            rate, count = f"{group[0]['lr'] * factor**power:.3g}", len(by(group, "seed"))
            cells = f"{loss:.3f}", f"{mean:.1f}", f"{low:.1f} to {high:.1f}"
            lines.append((words, batch, rate, count, *cells))
        line(ax, index, points, words)
    batches = sorted(by(rows, "effective_batch"))
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, batches)
    finish(ax, xlabel="effective batch", ylabel="test accuracy, %", title=f"after {last} epochs")
    table(["", "batch", "rate", "seeds", "train loss", "accuracy, %", "seeds' range"], lines)
    return figure


# ---- sampling.ipynb ------------------------------------------------------------------------------

SHADES = [("#ffffff", ""), ("#9ecae1", "////"), ("#fdd0a2", "...."), ("#888888", "")]
SHADES += [("#c7e9c0", "xxxx"), ("#dddddd", "----")]


def grid(tables: dict, meaning: dict, across: str):
    """Draw tables of cells: tables is {title: {row: [(text, kind)]}}, meaning is {kind: legend}."""
    heights = [len(lists) for lists in tables.values()]
    widest = max(len(cells) for lists in tables.values() for cells in lists.values())
    size = (2 + 0.3 * widest, 0.8 * len(tables) + 0.3 * sum(heights))
    figure, axes = canvas(heights, size=size)
    for (title, lists), ax in zip(tables.items(), axes, strict=True):
        for y, cells in enumerate(lists.values()):
            for x, (text, kind) in enumerate(cells):
                ax.barh(y, 1, 1, x - 0.5, **area(kind, SHADES))
                box = {"fc": "white", "ec": "none", "pad": 0.8}
                ax.text(x, y, text, ha="center", va="center", size=8, bbox=box)
        ax.set_yticks(range(len(lists)), list(lists))
        ax.set(xlim=(-0.6, widest - 0.4), ylim=(len(lists) - 0.4, -0.6))
        ax.set(title=title, aspect="equal")
        ax.set_xticks(range(widest), range(widest), size=7)
        ax.grid(visible=False)
    axes[-1].set_xlabel(across)
    shades = [SHADES[kind % len(SHADES)] for kind in meaning]
    patches = [Patch(facecolor=color, hatch=hatch, edgecolor="black") for color, hatch in shades]
    below(figure, 4, patches, meaning.values())
    return figure


def hands(tables: dict):
    """A row for each rank, with the numbers of its samples in order: {title: {rank: samples}}."""
    cells = {
        title: {f"rank {rank}": [(n, rank) for n in samples] for rank, samples in lists.items()}
        for title, lists in tables.items()
    }
    ranks = sorted({rank for lists in tables.values() for rank in lists})
    return grid(cells, {rank: f"rank {rank}" for rank in ranks}, "place in the rank's list")


def owners(tables: dict):
    """A row for each epoch: which rank gets which sample. {title: {epoch: {rank: samples}}}."""
    cells, ranks = {}, set()
    for title, epochs in tables.items():
        cells[title] = {}
        for epoch, lists in epochs.items():
            owner = {sample: rank for rank in lists for sample in lists[rank]}
            cells[title][f"epoch {epoch}"] = [(owner[n], owner[n]) for n in sorted(owner)]
            ranks |= set(lists)
    return grid(cells, {rank: f"rank {rank}" for rank in sorted(ranks)}, "sample of the data set")


def repeats(tables: dict, samples: int):
    """A row for each rank, and which samples come a second time. Prints what each way counts."""
    cells, lines = {}, []
    for title, lists in tables.items():
        seen, cells[title] = set(), {f"rank {rank}": [] for rank in lists}
        dealt = [(place, rank) for rank in lists for place in range(len(lists[rank]))]
        for place, rank in sorted(dealt):
            sample = lists[rank][place]
            cells[title][f"rank {rank}"].append((sample, 3 if sample in seen else 0))
            seen.add(sample)
        lines.append((title, len(dealt), len(dealt) - len(seen), len(set(range(samples)) - seen)))
    table([f"{samples} samples", "dealt", "repeated", "left out"], lines)
    return grid(cells, {0: "first time", 3: "a second time"}, "place in the rank's list")


# ---- the README's figures ------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the data are")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures")
    args = parser.parse_args()
    plt.switch_backend("svg")
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = {"scaling.svg": speedup(best(read(args.results / "scaling.csv")))}
    drawn["overlap.svg"] = overlap(read(args.results / "overlap.jsonl"), most=3)
    for name, figure in drawn.items():
        if figure:
            figure.draw_without_rendering()  # places the axes, with a last digit that varies
            figure.set_layout_engine("none")
            for ax in figure.axes:
                ax.set_position(np.round(ax.get_position().bounds, 4))
            figure.savefig(args.out / name, metadata={"Date": None})
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
