"""The READMEs' tables that are made from results/. readme.py puts them where they go."""

import json
from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).parent.parent / "results"


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
    return rows.assign(place=rows.apply(where, axis=1))


def latest(rows):
    """Return the rows without those of work that was measured again at a later commit."""
    work = ["script", "mode", "devices", "model", "image_size", "per_rank_batch", "precision"]
    work += ["threads", "num_workers", "options"]
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


def speed(model=".*", precision=".*", scripts=".*"):
    """Return samples/s and speedup in weak scaling, a table for each machine and kind of work."""
    rows = latest(read("scaling.csv")).query("mode == 'weak'")
    rows = rows.assign(place=rows.place.str.replace(r"\d+ × ", "", regex=True))
    for name, wanted in {"model": model, "precision": precision, "script": scripts}.items():
        rows = rows[rows[name].str.fullmatch(wanted)]
    parts, line = [], ["script", "precision", "threads", "options"]
    for work, group in rows.groupby(["model", "image_size", "per_rank_batch", "place"], sort=False):
        speeds = group.groupby([*line, "devices"]).samples_per_second.median().unstack()
        lines = []
        for (script, kind, threads, options), found in speeds.iterrows():
            # against one process without DDP, at the same precision
            twin = (script, kind, threads, f"{options},ddp" if options else "--without=ddp")
            twin = twin if twin in speeds.index else ("00_single_gpu.py", kind, threads, "")
            alone = speeds[1].get(twin)
            words = f" {options}" * bool(options) + f", {threads} threads" * (threads > 1)
            gains = {n: f" ({found[n] / alone:.2f})" if alone and n > 1 else "" for n in speeds}
            cells = [f"{found[n]:.0f}{gains[n]}" if found[n] > 0 else "" for n in speeds]
            lines.append([f"`{script}`{words}", kind, *cells])
        heads = ["samples/s (speedup)", "precision", *(f"{n} ×" for n in speeds)]
        title = "{0}, {1} × {1} pixels, {2} images a process. {3}.".format(*work)
        parts.append(f"{title}\n\n{table(heads, lines)}")
    return "\n".join(parts)


def strategies():
    """Return, a table for each machine and kind of work, memory and speed against rung 02."""
    rows, names = read("strategies.csv"), ["peak_memory_mb", "samples_per_second"]
    # Against the rows of 02 of the same commit: they were measured in one go.
    together = ["model", "image_size", "per_rank_batch", "devices", "place", "commit"]
    plain = rows[rows.script == "02_torchrun.py"].groupby(together)[names].median()
    rows, parts = latest(rows).merge(plain, "left", on=together, suffixes=("", "_02")), []
    rows = rows.assign(**{f"{name}_02": rows[name] / rows[f"{name}_02"] for name in names})
    for work, group in rows.groupby(together[:-1], sort=False):
        medians = group.groupby(["script", "options"], sort=False).median(numeric_only=True)
        lines = []
        for (script, options), row in medians.iterrows():
            cells = [f"`{script}` {options}".strip(), f"{row.peak_memory_mb:.0f} MB"]
            cells += [f"{row.peak_memory_mb_02:.2f}", f"{row.samples_per_second_02:.2f}"]
            lines.append([*cells, f"{row.overhead_seconds:.0f} s"])
        lines.sort(key=lambda cells: not cells[0].startswith("`02"))
        heads = ["script", "memory of a rank", "of 02's", "speed, of 02's", "overhead"]
        title = "{0}, {1} × {1} pixels, {2} images a rank, ranks: {3}. {4}.".format(*work)
        parts.append(f"{title}\n\n{table(heads, lines)}")
    return "\n".join(parts)


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


def nequip():
    record, lines = json.loads((RESULTS / "nequip.json").read_text()), []
    runs = {name: pd.DataFrame(run["epochs"]) for name, run in record["runs"].items()}
    for name, run in runs.items():
        errors = (f"{run[kind].iloc[-1]:.7f}" for kind in ("forces_mae", "total_energy_mae"))
        lines.append([name, record["runs"][name]["steps"], *errors])
    apart = (runs["2 ranks"] / runs["1 rank"] - 1).abs().max(axis=None)
    names = ("nequip", "e3nn", "ase", "lightning")
    versions = ", ".join(f"{name} {record['machine'][name]}" for name in names)
    text = table(["run", "optimizer steps", "forces MAE, eV/Å", "energy MAE of a cell, eV"], lines)
    text += f"\nErrors of the last epoch. {where(record['machine'])}, {versions}.\n"
    text += "\nLargest relative difference of 1 rank and 2 ranks, over all epochs: "
    return f"{text}{apart:.0e}.\n"
