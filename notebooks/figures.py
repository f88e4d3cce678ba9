"""The tables behind the notebooks, and the two figures of the READMEs, from results/.

    python notebooks/figures.py              writes the READMEs' figures to results/figures/

A table has a row for each point of a figure: its `middle` (a median), and from `low` to `high` what
was measured. What is drawn from it, and what is calculated, stands in the notebooks' cells.
"""

import argparse
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

RESULTS = Path(__file__).parent.parent / "results"
# A rule of thumb from course notes for the speedup on so many GPUs: (lowest, highest).
EXPECTED = {1: (1, 1), 2: (1.8, 1.8), 4: (3.5, 3.5), 8: (6, 7)}
# Of scripts that do the same work the first is shown, and of models where there is room for one.
DDP = ["02_torchrun.py", "03_multinode.py", "01_single_node_multi_gpu.py", "topics/fast.py"]
MODELS = ["resnet50", "vit_b_16", "small", "wide"]
WORK = ["hardware", "device", "model", "image_size", "batch", "precision", "threads", "num_workers"]
KIND = [*WORK, "mode", "script", "options", "commit"]  # ratios are of one commit

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
plt.rcParams.update({"legend.fontsize": 8, "legend.frameon": False, "svg.hashsalt": "ddp"})
pd.set_option("display.width", 200, "display.max_columns", 20)


def read(path):
    """Return the rows of a .csv or .jsonl file with the hardware that each was measured on.

    Without a file: no rows, in the columns of the file of this name in results/.
    """
    if not (path := Path(path)).is_file():
        print(f"There is no file {path.name}, so there is nothing to draw.")
        return read(RESULTS / path.name).head(0)
    text = dict.fromkeys(("torch", "commit", "options", "gpu"), str)  # torch 2.10 is not 2.1
    if path.suffix == ".jsonl":
        rows = pd.DataFrame(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    else:
        rows = pd.read_csv(path, dtype=text).fillna({"options": ""})
    rows = rows.drop(columns="seal", errors="ignore")
    cpu = rows.cores.astype(str) + " cores of " + rows.cpu
    rows["hardware"] = rows.gpu.where(rows.device == "cuda", cpu)
    # Only what was measured with the same torch on the same day is compared.
    rows["hardware"] += ", torch " + rows.torch.str.partition("+")[0] + ", " + rows.date
    if "script" not in rows:
        return rows
    old = rows.script.str.startswith("04_") & rows.commit.isin(["2fa7cd5", "f380b22"])
    rows.loc[old, "options"] = "SIGTERM_BROADCAST=off"  # rung 04 did that by itself then
    work = ["script", "mode", "devices", "model", "image_size", "per_rank_batch", "precision"]
    work += ["threads", "num_workers", "options", "hardware"]
    # Work that was measured again at a later commit of that day counts as it was there.
    return rows[rows.commit == rows.groupby(work, dropna=False).commit.transform("last")]


def speeds(rows):
    """Return samples/s of each kind of work on each number of devices: a median, low and high.

    alone: the median on one device without DDP (00, or fast --without=ddp); NaN if not measured
    base:  that, or else the median of the script itself on one device
    kind:  a number, the same for all device counts
    """
    ones = rows[rows.devices == 1]  # there weak and strong scaling are the same work
    both = [ones.assign(mode="weak"), ones.assign(mode="strong")]
    rows = pd.concat([rows[rows.devices > 1], *both]).sort_index(kind="stable")
    rows["batch"] = rows.per_rank_batch.where(rows["mode"] == "weak", rows.effective_batch)
    columns = {"middle": ("samples_per_second", "median"), "low": ("min", "min")}
    groups = rows.groupby([*KIND, "devices"], sort=False)
    found = groups.agg(**columns, high=("max", "max")).reset_index()
    single = found[found.devices == 1].set_index(KIND).middle
    topic = found.script.str.startswith("topics/")
    without = (found.options + ",ddp").where(found.options != "", "--without=ddp")
    script = found.script.where(topic, "00_single_gpu.py")
    twin = found.assign(script=script, options=without.where(topic, ""))
    found["alone"] = single.reindex(pd.MultiIndex.from_frame(twin[KIND])).to_numpy()
    itself = single.reindex(pd.MultiIndex.from_frame(found[KIND])).to_numpy()
    found["base"] = found.alone.fillna(pd.Series(itself, found.index))
    found["kind"] = found.groupby(KIND, sort=False).ngroup()
    return found.sort_values(["kind", "devices"])


def ddp(found, mode="weak"):
    """Return the kinds of DDP that have a base and were measured on several devices."""
    found = found[found.script.isin(DDP) & (found["mode"] == mode) & found.base.notna()]
    found = found[~found.options.str.contains("ddp")]
    found = found[found.groupby("kind").devices.transform("max") > 1]
    order, same = found.script.map({name: n for n, name in enumerate(DDP)}), [*WORK, "options"]
    return found[order == order.groupby([found[name] for name in same]).transform("min")]


def main_model(found):
    """Return the rows of the model that is shown of each hardware, at its largest image size."""
    order = found.model.map({name: n for n, name in enumerate(MODELS)}).fillna(len(MODELS))
    found = found[order == order.groupby(found.hardware).transform("min")]
    return found[found.image_size == found.groupby("hardware").image_size.transform("max")]


def lesson(found):
    """Return DDP and DataParallel on several devices, of a large model and of a small one."""
    names = {"02_torchrun.py": "DDP", "00b_data_parallel.py": "DataParallel"}
    found = found.assign(script=found.script.map(names)).dropna(subset=["script", "base"])
    found = found[(found["mode"] == "weak") & found.model.isin(["resnet50", "small"])]
    return quickest(found[found.groupby("kind").devices.transform("max") > 1])


def quickest(found):
    """Return of kinds that differ in precision alone the one with the quickest base."""
    same = [name for name in KIND if name not in ("precision", "commit")]
    return found[found.base == found.groupby(same).base.transform("max")]


def draws(points, count=2000):
    """Return so many sets of speeds, each drawn from low to high, most of them near middle."""
    source, ranges = random.Random(0), points[["low", "high", "middle"]].to_numpy().tolist()
    return np.array([[source.triangular(*some) for some in ranges] for _ in range(count)])


def profiles(rows):
    """Return the last profile of each kind of step."""
    kind = ["hardware", "model", "image_size", "precision", "per_rank_batch", "devices", "backend"]
    return rows.drop_duplicates(kind, keep="last")


def best(rows):
    """Return the rows of one hardware: GPUs before CPUs, the most devices, the last day."""
    order = rows.assign(cuda=rows.device == "cuda", day=rows.hardware.str[-10:])
    order = order.sort_values(["cuda", "devices", "day"])
    return rows[rows.hardware.isin(order.hardware[-1:])]


WORDS = {"image_size": "{} px".format, "batch": "batch {}".format, "devices": "on {}".format}
WORDS |= {"script": lambda value: value.partition("_")[0] if value[0] == "0" else value}
WORDS |= {"options": lambda value: value.replace("--without=", "without ")}
WORDS |= {"threads": lambda n: f"{n} thread{'s' * (n > 1)}"}


def labels(rows, always, *names):
    """Return for each row the words of a column, and of those others that tell rows apart."""
    names = [always, *(name for name in names if rows[name].nunique() > 1)]
    words = [rows[name].map(WORDS.get(name, str)) for name in names]
    joined = [", ".join(filter(None, some)) for some in zip(*words, strict=True)]
    return pd.Series(joined, rows.index, dtype=object)


def noun(device, n=2):
    """Return what n devices are called."""
    word, plural = ("GPU", "s") if device == "cuda" else ("process", "es")
    return word + plural if n > 1 else word


def where(row):
    """Return the devices of a row, as 2 × a GPU, or 2 processes on a CPU."""
    name, n = row.hardware.partition(", torch")[0], row.devices
    return f"{n} × {name}" if row.device == "cuda" else f"{n} {noun(row.device, n)}, {name}"


def human(size):
    """Return bytes in words."""
    power = min(int(np.log10(size)) // 3, 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def panels(found, what, height=2.8, columns=1):
    """Return (name, rows, axes) of each hardware, or say what is missing. height: or of rows."""
    groups = list(found.groupby("hardware", sort=False))
    if not groups:
        print(f"Nothing to draw here: it takes {what}.")
        return []
    heights = [height(rows) if callable(height) else height for _, rows in groups]
    size = {"figsize": (9, sum(heights)), "height_ratios": heights}
    _, axes = plt.subplots(len(groups), columns, squeeze=False, **size)
    rows_of_axes = axes[:, 0] if columns == 1 else axes
    return [(*group, ax) for group, ax in zip(groups, rows_of_axes, strict=True)]


def line(ax, index, x, points, **style):
    """Draw the middle of points over x, with the range from low to high."""
    color, dashes, marker = LINES[index % len(LINES)]
    error = np.array([points.middle - points.low, points.high - points.middle]).clip(0)
    style = {"color": color, "ls": dashes, "marker": marker, "ms": 5, "capsize": 3} | style
    ax.errorbar(x, points.middle, error, **style)


def area(index):
    """Return the style of one kind of bar."""
    color, hatch = AREAS[index % len(AREAS)]
    return {"color": color, "hatch": hatch, "ec": "black", "lw": 0.6}


def finish(ax, **words):
    """Set the title and the names of the axes; put the legend at the right, where it hides none."""
    ax.set(**words)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def mark_devices(ax, points, more=(1,), scale="linear"):
    """Mark the device counts that were measured, and more of them."""
    counts = sorted({*points.devices, *more})
    ax.set_xscale(scale)
    ax.minorticks_off()
    ax.set_xticks(counts, counts)
    ax.set_xlabel(noun(points.device.iloc[0]))


def speedup(found):
    """Draw speedup and efficiency of DDP, against the ideal and against the rule of thumb."""
    drawn = panels(found, "DDP on one device and on several, in weak scaling", 3.2, columns=2)
    n, (low, high) = np.array(list(EXPECTED)), np.transpose(list(EXPECTED.values()))
    style = {"color": "#888888", "ls": "none", "marker": "x", "ms": 7, "capsize": 4}
    for name, group, (left, right) in drawn:
        for ax, divide in ((left, 1), (right, n)):
            ax.plot(n, n / divide, label="ideal", **GREY)
            middle, spread = (low + high) / 2 / divide, (high - low) / 2 / divide
            ax.errorbar(n, middle, spread, label="rule of thumb", **style)
        group = group.assign(label=labels(group, "model", "script", "precision", "options"))
        for index, (label, points) in enumerate(group.groupby("label", sort=False)):
            gains = points[["middle", "low", "high"]].div(points.base, axis=0)
            line(left, index, points.devices, gains)
            line(right, index, points.devices, gains.div(points.devices, axis=0), label=label)
        mark_devices(left, group, EXPECTED)
        mark_devices(right, group, EXPECTED, scale="log")
        left.set(ylabel="speedup", yticks=left.get_xticks(), title=name)
        finish(right, ylim=(0, None), ylabel="speedup / devices", title="efficiency")
    return plt.gcf() if drawn else None


def overlap(rows, most=4):
    """Draw one step of DDP: what the device computes, and when each bucket travels."""
    rows, legend = profiles(rows)[-most:], {}
    if rows.empty:
        return print("Nothing to draw here: it takes profiles of benchmarks/overlap.py.")
    heights = 2 + rows.buckets.map(len)
    size = {"figsize": (8, 0.8 * len(rows) + 0.19 * heights.sum()), "height_ratios": heights}
    figure, axes = plt.subplots(len(rows), squeeze=False, **size)
    for row, ax in zip(rows.itertuples(), axes[:, 0], strict=True):
        moments = [0, row.backward_start_ms, row.backward_end_ms, row.step_ms]
        phases = {"forward": 3, "backward (with its waiting)": 5, "optimizer": 4}
        for (name, kind), start, end in zip(phases.items(), moments, moments[1:], strict=False):
            legend[name] = ax.barh(0, end - start, 0.8, start, **area(kind))
        # A GPU has its own scale: from its first bucket on.
        left = 0 if row.device == "cpu" else row.buckets[0]["start_ms"] - 0.02 * row.step_ms
        gap, gaps = (row.step_ms - left) / 100, getattr(row, "exposed", None)
        if row.device == "cpu":  # it computes until the last bucket is ready
            gaps = [(row.buckets[-1]["start_ms"], row.backward_end_ms)]
        kind, gaps = ("hidden", gaps) if isinstance(gaps, list) else ("all-reduce, not split", [])
        for place, bucket in enumerate(row.buckets, 1):
            start, end = bucket["start_ms"], bucket["end_ms"]
            spans = [(kind, "#0072b2" if kind == "hidden" else "#666666", start, end)]
            spans += [("exposed", "#d55e00", max(start, a), min(end, b)) for a, b in gaps]
            for name, color, a, b in spans:
                if a < b:  # the edge is seen however short it is
                    legend[name] = ax.barh(place, b - a, 0.7, a, color=color, ec=color)
            late = end > row.step_ms - 20 * gap
            x, side = (start - gap, "right") if late else (end + gap, "left")
            ax.text(x, place, human(bucket["bytes"]), va="center", ha=side, size=7)
        title = f"{row.model}, {row.image_size} px, batch {row.per_rank_batch}, {row.precision}: "
        title += f"{row.hidden_ms:.1f} ms hidden, {row.exposed_ms:.1f} exposed\n{where(row)}"
        ax.set(title=title, xlim=(left, row.step_ms), ylim=(place + 0.6, -0.6), yticks=[])
        ax.grid(axis="y", visible=False)
    ax.set_xlabel("ms since the step began, on rank 0")
    figure.legend(legend.values(), legend, ncols=3, loc="outside lower center")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the data are")
    parser.add_argument("--out", type=Path, default=RESULTS / "figures")
    args = parser.parse_args()
    plt.switch_backend("svg")
    args.out.mkdir(parents=True, exist_ok=True)
    scaling = speeds(best(read(args.results / "scaling.csv")))
    steps = profiles(read(args.results / "overlap.jsonl")).groupby("device").tail(2)
    drawn = {"scaling.svg": speedup(lesson(scaling)), "overlap.svg": overlap(steps)}
    for name, figure in drawn.items():
        if figure:  # first place the axes, with a last digit that varies
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            for ax in figure.axes:
                ax.set_position(np.round(ax.get_position().bounds, 4))
            figure.savefig(args.out / name, metadata={"Date": None})
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
