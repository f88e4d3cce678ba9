"""The generated parts of the READMEs: the ladder with its counts, the diffs, the tour's table.

    python tests/readme.py           says which README is stale; exits with 1 if there is one
    python tests/readme.py --write   writes them again

A generated part stands between <!-- generated: NAME --> and <!-- end -->, where NAME is one of

    picture           the ladder, drawn
    ladder            the ladder, as a table: sentences and commands come from the headers
    diff AFTER.py     what `diff -U0 -w BEFORE.py AFTER.py` prints, without the header of the file
    tour              the table of results/tour_cpu.json
    gpu               the table of results/gpu_parity.json
    speed             the table of results/scaling.csv
    topics            the topics, as a table like the ladder's
    strategies        the table of results/strategies.csv
    restarts          the table of results/restarts.csv
    nequip            the table of results/nequip.json
"""

import ast
import csv
import json
import re
import statistics
import sys

import pairs

ROOT = pairs.ROOT
sys.path.append(str(ROOT / "notebooks"))
import figures  # noqa: E402

PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
TOUR = ROOT / "results" / "tour_cpu.json"
# The command of a rung that works on any machine.
ANYWHERE = r"(?:python|torchrun --standalone --nproc-per-node=2) "
PICTURE = """\
00_single_gpu.py                      one process, one device: the baseline
├── 00b_data_parallel.py              nn.DataParallel: one process feeds all GPUs
└── 01_single_node_multi_gpu.py       DDP: one process a GPU, started by mp.spawn
    └── 02_torchrun.py                torchrun starts the processes
        └── 03_multinode.py           several nodes: rank and local rank differ
            └── 04_lightning.py       Lightning owns the loop, the ranks and the launch
"""


def rungs():
    """Return the rungs' paths, in order."""
    return sorted(ROOT.glob("[0-9]*.py"))


def before(path):
    """Return the file that this one is a variant of, None for the first rung."""
    found = {after: before for before, after in pairs.pairs()}
    if path in found or path == rungs()[0]:
        return found.get(path)
    return rungs()[rungs().index(path) - 1]  # Lightning's header shows its diff side by side


def count(path):
    """Return '+a -b': the lines of code that this file adds to and takes from the one before."""
    return "+{} -{}".format(*pairs.changed(before(path), path)) if before(path) else ""


def header(path):
    """Return the docstring of a file."""
    return ast.get_docstring(ast.parse(path.read_text()))


def sentence(path):
    """Return the first paragraph of a header, without its title."""
    text = " ".join(header(path).split("\n\n")[0].split()).partition(": ")[2]
    return text if text.startswith("nn.") else text[0].upper() + text[1:]


def picture():
    """Return the ladder as a drawing of plain characters, with its counts."""
    lines = []
    for line in PICTURE.splitlines():
        name = re.search(r"\S+\.py", line)[0]
        lines.append(f"{line[:38]}{count(ROOT / name):<10}{line[38:]}\n")
    return "```text\n" + "".join(lines) + "```\n"


def ladder():
    """Return the rungs as a table."""
    lines = ["| rung | in one sentence | runs anywhere | lines of code |", "|---|---|---|---|"]
    for path in rungs():
        command = re.search(rf"{ANYWHERE}{re.escape(path.name)}$", header(path), re.MULTILINE)[0]
        name = f"[`{path.name}`]({path.name})"
        lines.append(f"| {name} | {sentence(path)} | `{command}` | {count(path)} |")
    return "\n".join(lines) + "\n"


def diff(name):
    """Return, collapsed, the diff that leads to this file."""
    after = ROOT / name
    doc_end = ast.parse(after.read_text()).body[0].end_lineno
    hunks = re.split(r"^(?=@@)", pairs.diff(before(after), after), flags=re.MULTILINE)
    code = [hunk for hunk in hunks if hunk and int(re.search(r"\+(\d+)", hunk)[1]) > doc_end]
    title = f"<b>{before(after).name} → {after.relative_to(ROOT)}</b>, {count(after)} lines of code"
    body = "".join(code)
    return f"<details>\n<summary>{title}</summary>\n\n```diff\n{body}```\n\n</details>\n"


def tour():
    """Return the table of the recorded tour, and where it was measured."""
    record = json.loads(TOUR.read_text())
    lines = [
        "| rung | processes | train loss | test accuracy | samples/s | seconds | same as 00? |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for rung in record["rungs"]:
        last = rung["epochs"][-1]
        # as the tour counts it: without the first epoch, which warms up
        speed = statistics.median(e["samples_per_second"] for e in rung["epochs"][1:])
        cells = [rung["rung"], str(last["world_size"]), f"{last['train_loss']:.4f}"]
        cells += [f"{last['test_accuracy']:.1%}", f"{speed:.0f}", f"{rung['seconds']:.0f}"]
        lines.append("| " + " | ".join([*cells, "yes" if rung["same"] else "**no**"]) + " |")
    total = sum(rung["seconds"] for rung in record["rungs"])
    lines.append(f"\n{total:.0f} s in all. {where(record['machine'])}.")
    return "\n".join(lines) + "\n"


def where(machine):
    """Return hardware, versions and date of a measurement, in words."""
    if machine["gpus"]:
        hardware = f"{machine['gpus']} × {machine['gpu']}, NCCL {machine['nccl']}"
    else:
        hardware = f"{machine['cores']} cores of an {machine['cpu']} machine, no GPU"
    return f"{machine['date']}, {hardware}, Python {machine['python']}, torch {machine['torch']}"


def gpu():
    """Return the table of the tours on GPUs."""
    record = json.loads((ROOT / "results" / "gpu_parity.json").read_text())
    names = [str(tour["processes"]) for tour in record["tours"]]
    lines = ["| rung | " + " | ".join(f"{name} GPU" + "s" * (name != "1") for name in names) + " |"]
    lines.append("|---|" + "---|" * len(names))
    for rung in rungs():
        losses = []
        for tour in record["tours"]:
            (entry,) = [entry for entry in tour["rungs"] if entry["rung"] == rung.name]
            loss = f"{entry['epochs'][-1]['train_loss']:.6f}"
            losses.append(loss if entry["same"] else f"{loss} (not the same)")
        lines.append(f"| {rung.name} | " + " | ".join(losses) + " |")
    lines.append(f"\nTrain loss of the last epoch. {where(record['machine'])}.")
    return "\n".join(lines) + "\n"


def speed():
    """Return, a table for each machine and kind of work, the speeds at each device count."""
    rows = figures.read(ROOT / "results" / "scaling.csv")
    tables = {}
    for row in (row for row in rows if row["mode"] == "weak"):  # of the same work the median counts
        work = [row[name] for name in ("model", "image_size", "per_rank_batch")]
        line = tuple(row[name] for name in ("script", "precision", "threads", "options"))
        place = where(row).replace(f"{row['gpus']} × ", "")
        table = tables.setdefault((place, *work), {})
        table.setdefault(line, {}).setdefault(row["devices"], []).append(row["samples_per_second"])
    parts, machines = [], [machine for machine, *_ in tables]
    models = figures.MODELS.index
    order = sorted(tables, key=lambda work: (machines.index(work[0]), models(work[1]), -work[2]))
    for machine, model, size, batch in order:
        table = {
            line: {n: statistics.median(found) for n, found in counts.items()}
            for line, counts in tables[machine, model, size, batch].items()
        }
        counts = sorted({n for speeds in table.values() for n in speeds})
        lines = ["| script | precision | " + " | ".join(f"{n} ×" for n in counts)]
        lines[0] += " | of N × one process without DDP |"
        lines.append("|---|---|" + "---|" * (len(counts) + 1))
        for (script, precision, threads, options), speeds in sorted(table.items()):
            # one process without DDP, at the same precision
            twin = (script, precision, threads, f"{options},ddp" if options else "--without=ddp")
            alone = table.get(twin) or table.get(("00_single_gpu.py", precision, threads, ""))
            n = max(speeds)
            share = f"{speeds[n] / n / alone[1]:.3f}" if alone and n > 1 else ""
            words = f" {options}" * bool(options) + f", {threads} threads" * (threads > 1)
            cells = [f"{speeds[n]:.0f}" if n in speeds else "" for n in counts]
            cells = [f"`{script}`{words}", precision, *cells, share]
            lines.append("| " + " | ".join(cells) + " |")
        title = f"{model}, {size} × {size} pixels, {batch} images a process. {machine}."
        parts.append(title + "\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def expectation():
    """Return speedups on GPUs in weak scaling beside what a course expects, and Amdahl's law."""
    rows = figures.best(figures.read(ROOT / "results" / "scaling.csv"))
    found = [one for one in figures.series(rows) if one["mode"] == "weak" and one["alone"]]
    most = max(max(one["points"]) for one in found)
    found = [one for one in found if most in one["points"] or one["script"].startswith("02")]
    found = figures.quickest(found)
    found.sort(key=lambda one: (figures.MODELS.index(one["model"]), one["script"]))
    course = {n: ends for n, ends in figures.COURSE.items() if n > 1}
    wanted = [f"{low} to {high}" if high > low else f"{low}" for low, high in course.values()]
    lines = ["| speedup | " + " | ".join(f"{n} GPUs" for n in course) + " |"]
    lines += ["|---" * (len(course) + 1) + "|"]
    lines += ["| **a common expectation of DDP** | " + " | ".join(wanted) + " |"]
    for one in found:
        cells = {n: f"{values[0]:.2f}" for n, values in one["speedup"].items()}
        if one["script"].startswith("02") and 8 not in cells:  # relative to 1 GPU without DDP
            serial = figures.serial_fraction({n: v[0] for n, v in one["points"].items()})
            cells[8] = f"*{figures.law(serial, 8) * one['speedup'][1][0]:.1f} predicted*"
        name = f"`{one['script']}` {one['options']}".strip()
        name = f"{one['model']}: {name}, {one['precision']}"
        lines.append("| " + " | ".join([name, *(cells.get(n, "") for n in course)]) + " |")
    return "\n".join(lines) + "\n"


def strategies():
    """Return, a table for each machine and kind of work, memory and speed against rung 02."""
    path, names = ROOT / "results" / "strategies.csv", ("peak_memory_mb", "samples_per_second")
    # Against the rows of 02 of the same commit: they were measured in one go.
    together = ("model", "image_size", "per_rank_batch", "devices", "cpu", "gpu", "commit")
    with path.open(newline="", encoding="utf-8") as file:
        plain = [row for row in csv.DictReader(file) if row["script"] == "02_torchrun.py"]
    tables = {}
    for row in figures.read(path):
        work = f"{row['model']}, {row['image_size']} × {row['image_size']} pixels"
        work += f", {row['per_rank_batch']} images a rank, ranks: {row['devices']}. {where(row)}."
        twins = [twin for twin in plain if all(twin[n] == str(row[n]) for n in together)]
        shares = [row[n] / statistics.median(float(twin[n]) for twin in twins) for n in names]
        ways = tables.setdefault(work, {})  # of rows of the same way the median counts
        found = ways.setdefault((row["script"], row["options"]), [])
        found.append([row["peak_memory_mb"], *shares, row["overhead_seconds"]])
    parts = []
    for work, ways in tables.items():
        lines = ["| script | memory of a rank | of 02's | speed, of 02's | start and end |"]
        lines.append("|---|---|---|---|---|")
        for script, options in sorted(ways, key=lambda way: way != ("02_torchrun.py", "")):
            columns = zip(*ways[script, options], strict=True)
            memory, share, speed, overhead = map(statistics.median, columns)
            cells = [f"`{script}` {options}".strip(), f"{memory:.0f} MB", f"{share:.2f}"]
            cells += [f"{speed:.2f}", f"{overhead:.0f} s"]
            lines.append("| " + " | ".join(cells) + " |")
        parts.append(work + "\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def restarts():
    """Return how many runs of topics/crash.py end well, with the setting and without."""
    rows = figures.read(ROOT / "results" / "restarts.csv")
    lines = [
        "| | setting | runs that finish | from the kill to the new start line, median and range |"
    ]
    lines.append("|---|---|---|---|")
    kinds = figures.by(rows, "device", "processes", "setting")
    for (_, processes, setting), some in kinds.items():
        back = [row["back_after"] for row in some if row["back_after"] != ""]
        words = f"{statistics.median(back):.1f} s, {min(back):.1f} to {max(back):.1f} s"
        cells = [f"{processes} ranks; {where(some[0])}", "with" if setting else "without"]
        cells += [f"{sum(row['finished'] for row in some)} of {len(some)}", words]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def topics():
    """Return the topics as a table."""
    lines = ["| file | the one concept | variant of | lines of code |", "|---|---|---|---|"]
    for after in sorted(ROOT.glob("topics/*.py")):
        base = before(after).relative_to(ROOT)
        name = f"[`{after.name}`]({after.name})"
        lines.append(f"| {name} | {sentence(after)} | `{base}` | {count(after)} |")
    return "\n".join(lines) + "\n"


def nequip():
    """Return the table of the runs of the case study, and where it was measured."""
    record = json.loads((ROOT / "results" / "nequip.json").read_text())
    lines = ["| run | optimizer steps | forces MAE, eV/Å | energy MAE of a cell, eV |"]
    lines.append("|---|---|---|---|")
    for name, run in record["runs"].items():
        last = run["epochs"][-1]
        cells = [name, str(run["steps"])]
        cells += [f"{last['forces_mae']:.7f}", f"{last['total_energy_mae']:.7f}"]
        lines.append("| " + " | ".join(cells) + " |")
    one, two = (record["runs"][name]["epochs"] for name in ("1 rank", "2 ranks"))
    apart = max(abs(b[n] / a[n] - 1) for a, b in zip(one, two, strict=True) for n in a)
    names = ("nequip", "e3nn", "ase", "lightning")
    versions = ", ".join(f"{name} {record['machine'][name]}" for name in names)
    lines.append(f"\nErrors of the last epoch. {where(record['machine'])}, {versions}.")
    lines.append(
        f"\nLargest relative difference of 1 rank and 2 ranks, over all epochs: {apart:.0e}."
    )
    return "\n".join(lines) + "\n"


def fresh(text):
    """Return the text of a README with its generated parts made again."""
    make = {"picture": picture, "ladder": ladder, "diff": diff, "tour": tour, "topics": topics}
    make |= {"gpu": gpu, "speed": speed, "strategies": strategies, "nequip": nequip}
    make |= {"restarts": restarts, "expectation": expectation}

    def part(match):
        name, *arguments = match[2].split()
        return match[1] + make[name](*arguments) + match[3]

    return PART.sub(part, text)


def readmes():
    """Return the paths of all READMEs."""
    folders = ("[!.]*", "case_studies/*")
    return sorted([ROOT / "README.md", *(p for f in folders for p in ROOT.glob(f"{f}/README.md"))])


def stale():
    """Return {path: text as it should be} of the READMEs whose generated parts are not fresh."""
    wanted = {path: fresh(path.read_text()) for path in readmes()}
    return {path: text for path, text in wanted.items() if text != path.read_text()}


if __name__ == "__main__":
    todo = stale()
    for path, text in todo.items():
        print(f"{path.relative_to(ROOT)} is stale" + (": written" * ("--write" in sys.argv)))
        if "--write" in sys.argv:
            path.write_text(text)
    if todo and "--write" not in sys.argv:
        sys.exit("run: python tests/readme.py --write")
