"""The READMEs' tables that are made from results/. readme.py puts them where they go."""

import json
from pathlib import Path
from statistics import median

import pandas as pd

RESULTS = Path(__file__).parent.parent / "results"
# Commits at which rung 04 took out, by itself, what SIGTERM_BROADCAST=off now takes out of it.
NO_BROADCAST = {"2fa7cd5", "f380b22", "8c6419d", "627d42f", "ba6d4a1"}


def table(heads, lines):
    """Return a table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def where(machine):
    """Return date, hardware and versions of a measurement."""
    hardware = f"{machine['cores']} cores of an {machine['cpu']} machine, no GPU"
    if machine["gpus"]:
        hardware = f"{machine['gpus']:.0f} × {machine['gpu']}, NCCL {machine['nccl']}"
    return f"{machine['date']}, {hardware}, Python {machine['python']}, torch {machine['torch']}"


def read(name):
    """Return the rows of a .csv in results/, with the place of each measurement."""
    text = dict.fromkeys(("torch", "nccl", "python", "commit", "options"), str)
    rows = pd.read_csv(RESULTS / name, dtype=text).fillna({"options": ""})
    rows = rows.drop(columns="seal", errors="ignore")  # it is for the tests, not for readers
    if "script" in rows:
        old = rows.script.eq("04_lightning.py") & rows.commit.isin(NO_BROADCAST)
        rows.loc[old, "options"] = ("SIGTERM_BROADCAST=off " + rows.options).str.strip()
        fed = rows.script.str.startswith("0") & rows.num_workers.gt(0)  # fast.py has its own feed
        words = rows.options + " --num-workers=" + rows.num_workers.astype(str)
        rows.loc[fed, "options"] = words.str.strip()
    return rows.assign(place=rows.apply(where, axis=1))


def latest(rows):
    """Return the rows without those of work that was measured again at a later commit."""
    work = ["script", "mode", "devices", "model", "image_size", "per_rank_batch", "precision"]
    work += ["threads", "options"]
    return rows[rows.commit == rows.groupby(work).commit.transform("last")]


def tour():
    record, lines = json.loads((RESULTS / "tour_cpu.json").read_text()), []
    for rung in record["rungs"]:
        last = rung["epochs"][-1]
        # as the tour counts it: without the first epoch, which warms up
        speed = pd.DataFrame(rung["epochs"][1:]).samples_per_second.median()
        cells = [rung["rung"], last["world_size"], f"{last['train_loss']:.4f}"]
        cells += [f"{last['test_accuracy']:.1%}", f"{speed:.0f}", f"{rung['seconds']:.0f}"]
        lines.append([*cells, "yes" if rung["same"] else "**no**"])
    heads = "rung", "processes", "train loss", "test accuracy", "samples/s", "seconds", "as in 00?"
    return f"{where(record['machine'])}.\n\n{table(heads, lines)}"


def gpu():
    record, lines = json.loads((RESULTS / "gpu_parity.json").read_text()), {}
    for run in record["tours"]:
        for rung in run["rungs"]:
            loss = f"{rung['epochs'][-1]['train_loss']:.6f}" + " (not as in 00)" * (
                not rung["same"]
            )
            lines.setdefault(rung["rung"], [rung["rung"]]).append(loss)
    heads = ["train loss of the last epoch", *(f"{run['processes']} ×" for run in record["tours"])]
    return f"{where(record['machine'])}.\n\n{table(heads, lines.values())}"


def near(low, high):
    """Whether what was measured lies so close together that three digits mean something."""
    return high <= 1.1 * low


def number(middle, low, high):
    """Return a speed; as a range, to two digits, where it differed from run to run."""
    if near(low, high):
        return f"{middle:.0f}"
    return " to ".join(f"{float(f'{end:.2g}'):.0f}" for end in (low, high))


def ratio(found, base):
    """Return the ratio of two speeds, (middle, low, high) each; a range where one of them is."""
    if near(*found[1:]) and near(*base[1:]):
        return f"{found[0] / base[0]:.2f}"
    return f"{found[1] / base[2]:.1f} to {found[2] / base[1]:.1f}"


def spread(rows, names):
    """Return {names: (commit, (middle, low, high))} of the speeds of rows."""
    found = {}
    for key, some in rows.groupby(names, sort=False):
        speeds = some.samples_per_second.median(), some["min"].min(), some["max"].max()
        found[key] = some.commit.iloc[-1], speeds
    return found


def by_machine(rows):
    """Return the rows with a place that says neither the day nor the number of devices."""
    return rows.assign(place=rows.place.str.replace(r"^[\d-]+, (\d+ × )?", "", regex=True))


def speed(model=".*", precision=".*", scripts=".*", options=".*"):
    """Return samples/s and speedup in weak scaling, a table for each machine and kind of work."""
    rows = by_machine(read("scaling.csv").query("mode == 'weak'"))
    names = {"model": model, "precision": precision, "script": scripts, "options": options}
    for name, wanted in names.items():
        rows = rows[rows[name].str.fullmatch(wanted)]
    parts, line = [], ["script", "precision", "threads", "options"]
    for work, group in rows.groupby(["model", "image_size", "per_rank_batch", "place"], sort=False):
        bases = spread(group, [*line, "devices", "commit"])
        group, days = latest(group), sorted({*group.date})
        speeds, counts, lines = spread(group, [*line, "devices"]), sorted({*group.devices}), []
        for script, kind, threads, options in sorted({key[:-1] for key in speeds}):
            # against one process without DDP, of the same run, at the same precision
            twin = (script, kind, threads, f"{options},ddp" if options else "--without=ddp", 1)
            twin = twin if twin in speeds else ("00_single_gpu.py", kind, threads, "", 1)
            words = f" {options}" * bool(options) + f", {threads} threads" * (threads > 1)
            cells = [f"`{script}`{words}", kind]
            for n in counts:
                commit, found = speeds.get((script, kind, threads, options, n), (None, None))
                cells.append(number(*found) if found else "")
                if n > 1 and (*twin, commit) in bases:
                    cells[-1] += f" ({ratio(found, bases[*twin, commit][1])})"
            lines.append(cells)
        heads = ["samples/s (speedup)", "precision", *(f"{n} ×" for n in counts)]
        title = "{0}, {1} × {1} pixels, {2} images a process. {4}, {3}.".format(
            *work, " and ".join(days)
        )
        parts.append(f"{title}\n\n{table(heads, lines)}")
    return "\n".join(parts)


def strategies():
    """Return memory and speed against rung 02, a table for each machine, kind of work and commit.

    Only what was measured in one go is compared.
    """
    rows, parts = read("strategies.csv"), []
    last, is_02 = latest(rows).index, rows.script == "02_torchrun.py"
    together = ["model", "image_size", "per_rank_batch", "devices", "place", "commit"]
    for work, group in rows.groupby(together, sort=False):
        plain, lines = group[is_02[group.index]], []
        shown = group[is_02[group.index] | group.index.isin(last)]
        if plain.empty or len(plain) == len(shown):
            continue
        base = spread(plain, ["script"])["02_torchrun.py",][1]
        memory = plain.peak_memory_mb.median()
        speeds = spread(shown, ["script", "options"])
        medians = shown.groupby(["script", "options"], sort=False).median(numeric_only=True)
        for (script, options), row in medians.iterrows():
            found = speeds[script, options][1]
            cells = [f"`{script}` {options}".strip(), f"{row.peak_memory_mb:.0f} MB"]
            cells += [f"{row.peak_memory_mb / memory:.2f}"]
            cells += ["1.00" if script.startswith("02") else ratio(found, base)]
            lines.append([*cells, f"{row.overhead_seconds:.0f} s"])
        lines.sort(key=lambda cells: not cells[0].startswith("`02"))
        heads = ["script", "memory of a rank", "of 02's", "speed, of 02's", "overhead"]
        title = "{0}, {1} × {1} pixels, {2} images a rank, ranks: {3}. {4}, commit {5}."
        parts.append(f"{title.format(*work)}\n\n{table(heads, lines)}")
    return "\n".join(parts)


def feeding():
    """Return how fast each way of topics/feeding.py is, of the last run on each kind of device."""
    if not (RESULTS / "feeding.csv").is_file():
        return "Not measured yet.\n"
    all_rows, parts = read("feeding.csv"), []
    run = all_rows.place + all_rows.commit.fillna("")
    last = run == run.groupby(all_rows.device).transform("last")
    for _, rows in all_rows[last].groupby("device", sort=False):
        bare, lines = None, []
        for (feed, store, workers, pinned), some in rows.groupby(
            ["feed", "store", "num_workers", "pinned"], sort=False, dropna=False
        ):
            found = spread(some, ["feed"])[feed,][1]
            bare = found if feed == "bare" else bare
            how = "the bare step" if feed == "bare" else f"`{feed}`"
            how += ", not pinned" * (pinned == "no")
            count = f"{workers:.0f}" if feed in ("samples", "batches") else ""
            quickest = some.alone.iloc[-1]  # to three digits
            quickest = "" if pd.isna(quickest) else f"{float(f'{quickest:.3g}'):.0f}"
            share = f"{found[0] / bare[0]:.3f}" if near(*found[1:]) else ratio(found, bare)
            cells = [how, "" if pd.isna(store) else store, count, quickest]
            lines.append([*cells, number(*found), share])
        heads = ["who feeds", "from", "workers", "alone, samples/s", "with the step", "of the bare"]
        work = rows[["model", "image_size", "batch_size", "place"]].iloc[0]
        title = "{0}, {1} × {1} pixels, batch {2}. {3}.".format(*work)
        parts.append(f"{title}\n\n{table(heads, lines)}")
    return "\n".join(parts)


def compiled():
    """Return the speed of each way to have torch.compile and DDP, and its share of `once`.

    A share is of one commit; of several the last one counts that has measured the way.
    """
    if not (RESULTS / "compiled_ddp.csv").is_file():
        return "Not measured yet.\n"
    work_of, parts = ["model", "image_size", "per_rank_batch", "place"], []
    for work, group in by_machine(read("compiled_ddp.csv")).groupby(work_of, sort=False):
        found = {}
        for (_, n), run in group.groupby(["commit", "devices"], sort=False):
            speeds = {way: speed for (way,), (_, speed) in spread(run, ["way"]).items()}
            once = speeds.get("once")
            for way, speed in speeds.items():
                share = f" ({speed[0] / once[0]:.3f})" if once else ""
                found[way, n] = number(*speed) + share
        counts = sorted({n for _, n in found})
        ways = dict.fromkeys(way for way, _ in found)
        lines = [[f"`{way}`", *(found.get((way, n), "") for n in counts)] for way in ways]
        heads = ["samples/s (of `once`)", *(f"{n} ×" for n in counts)]
        days = " and ".join(sorted({*group.date}))
        title = "{0}, {1} × {1} pixels, {2} images a rank. {4}, {3}.".format(*work, days)
        parts.append(f"{title}\n\n{table(heads, lines)}")
    return "\n".join(parts)


def loading():
    """Return what each model keeps of the speed of its step on a resident batch."""
    if not (RESULTS / "data_loading.jsonl").is_file():
        return "Not measured yet.\n"
    lines = (RESULTS / "data_loading.jsonl").read_text().splitlines()
    old = {"script": "00_single_gpu.py", "options": ""}  # of rows that do not say it
    rows = pd.DataFrame([old | json.loads(line) for line in lines])
    work, cells = ["script", "options", "model", "image_size", "batch_size", "num_workers"], []
    work.append("images")
    for row in rows[~rows.duplicated([*work, "gpu"], keep="last")].to_dict("records"):
        how = f"`{row['script']}` {row['options']}".strip()
        data = f"{row['image_size']} px, batch {row['batch_size']}, {row['images']} an epoch"
        kept, speeds = f"{row['ratio']:.3f}", [row["rung"], row["resident"]]
        if not all(near(min(some), max(some)) for some in speeds):
            kept = ratio(*((median(some), min(some), max(some)) for some in speeds))
        cells.append([how, row["model"], data, row["num_workers"], kept, where(row)])
    heads = ["script", "model", "images", "workers", "of its resident step", "measured"]
    return table(heads, cells)


def last_lines():
    """Return the last line of each topic, a table for each machine; nothing without a file."""
    if not (RESULTS / "topics.jsonl").is_file():
        return "Not measured yet.\n"
    lines = (RESULTS / "topics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    last, parts = {(row["topic"], row["gpu"]): row for row in rows}, {}
    for row in last.values():
        text = row["last_line"].replace("|", "·") or f"exit code {row['exit_code']}"
        parts.setdefault(where(row), []).append([f"`{row['topic']}`", row["processes"], text])
    heads = ["topic", "ranks", "its last line"]
    return "\n".join(f"{at}.\n\n{table(heads, cells)}" for at, cells in parts.items())


def restarts():
    lines = []
    for (place, ranks, setting), some in read("restarts.csv").groupby(
        ["place", "processes", "setting"], sort=False
    ):
        back = some.back_after.dropna()
        words = f"{back.median():.1f} s, {back.min():.1f} to {back.max():.1f} s"
        cells = [f"{ranks} ranks; {place}", "with" if setting else "without"]
        lines.append([*cells, f"{some.finished.sum()} of {len(some)}", words])
    return table(["", "setting", "runs that finish", "from the kill to the new start line"], lines)


def dask():
    """Return the seconds of each way to have Dask's clusters: median, smallest to largest."""
    if not (RESULTS / "dask.csv").is_file():
        return "Not measured yet.\n"
    lines, work = [], ["place", "nodes", "ranks", "workers", "clusters"]
    for key, some in read("dask.csv").groupby(work, sort=False):
        cells = [f"`{key[-1]}`", f"{key[2]} on {key[1]}", some.schedulers.iloc[-1], key[3]]
        for name in ("ready", "loading", "wall"):
            seconds = some[name]
            cells.append(f"{seconds.median():.2f} s, {seconds.min():.2f} to {seconds.max():.2f} s")
        lines.append([*cells, len(some), key[0]])
    heads = ["`--clusters`", "ranks on nodes", "schedulers", "Dask workers", "until it is up"]
    return table([*heads, "data of an epoch", "the whole run", "runs", "measured"], lines)


def nequip():
    """Return the errors of each way as measured last, a table for the CPU and one for GPUs."""
    parts, names = {}, ("nequip", "e3nn", "ase", "lightning")
    for record in json.loads((RESULTS / "nequip.json").read_text()):
        versions = ", ".join(f"{name} {record['machine'][name]}" for name in names)
        runs, places = parts.setdefault(record["machine"]["gpu"], ({}, {}))
        runs |= record["runs"]
        places |= dict.fromkeys(record["runs"], f"{where(record['machine'])}, {versions}")
    return "\n".join(errors_of(*part) for part in parts.values())


def errors_of(runs, places):
    """Return NequIP's table of some runs, and how far those that should be equal are apart."""
    errors, lines = {name: pd.DataFrame(run["epochs"]) for name, run in runs.items()}, []
    for name, run in errors.items():
        last = (f"{run[kind].iloc[-1]:.7f}" for kind in ("forces_mae", "total_energy_mae"))
        lines.append([name, runs[name]["steps"], *last])
    text = table(["run", "optimizer steps", "forces MAE, eV/Å", "energy MAE of a cell, eV"], lines)
    text += f"\nErrors of the last epoch. {'; '.join(dict.fromkeys(places.values()))}.\n"
    own = ", Lightning's own DDP"
    for other in ("2 ranks", f"2 ranks{own}", "2 ranks, compiled", f"2 ranks, compiled{own}"):
        if other in errors:
            apart = (errors[other] / errors["1 rank"] - 1).abs().max(axis=None)
            text += f"\nLargest relative difference of 1 rank and {other}, over all epochs: "
            text += f"{apart:.0e}.\n"
    return text
