"""How fast is each script at 1, 2, 4 ... devices? It runs the rungs themselves, at equal work.

    python benchmarks/scaling.py                       the rungs, on what this machine has
    python benchmarks/scaling.py --devices 1 2 --models resnet50 vit_b_16 --batch-size 256
    python benchmarks/scaling.py --scripts topics/fast.py --extra=--without=compile
    python benchmarks/scaling.py --help                what else

weak:   --batch-size is each rank's batch. Every rank does the same work at every device count.
strong: --batch-size is the effective batch. All ranks together do the same work.

An epoch is a window: the first warms up, and the median of the others counts. Each measurement
adds a row to --csv at once, so Ctrl-C keeps what was measured. observer/ watches the ranks.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import tour  # noqa: E402

import common  # noqa: E402

OBSERVER = ROOT / "benchmarks" / "observer"
RUNGS = [path.name for path in sorted(ROOT.glob("0*.py"))]
PRECISIONS = {  # by the environment, so that the scripts stay as they are
    "fp32": {"NVIDIA_TF32_OVERRIDE": "0"},
    "tf32": {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},  # convolutions use TF32 by default
}


def run(command: list[str], env: dict, timeout: float) -> str | None:
    """Run to the end; return None, or the last line of what was printed if that failed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(os.environ, PYTHONUNBUFFERED="1") | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out = process.communicate(timeout=timeout)[0]
        lines = [line for line in out.splitlines() if "Error" in line] or out.splitlines() or [""]
        return f"exit code {process.returncode}: {lines[-1]}" if process.returncode else None
    except subprocess.TimeoutExpired:
        return f"has not ended after {timeout:.0f} s"
    finally:
        tour.stop(process)


def measure(work: dict, windows: int, extra: list[str], timeout: float = 600) -> dict | str:
    """Measure one row; return its columns, or what went wrong.

    work: script, mode, devices, model, image_size, batch_size (as in the header), images (a rank's
    in weak scaling, else all ranks'), precision, threads (of each process), num_workers.
    extra: options of the script; NAME=VALUE goes to its environment, as in a shell.
    """
    devices, grow = work["devices"], work["devices"] if work["mode"] == "weak" else 1
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--dataset=fake:{work['images'] * grow}", f"--model={work['model']}"]
        options += [f"--image-size={work['image_size']}", f"--epochs={windows + 1}"]
        options += [f"--batch-size={work['batch_size'] * grow}", f"--log-json={folder}/log"]
        options += [f"--num-workers={work['num_workers']}"]
        options += ["--lr=1e-4"]  # speed does not depend on it, and no number overflows
        set_there = [word for word in extra if re.match(r"\w+=", word)]
        options += [word for word in extra if word not in set_there]
        env = {"OBSERVE": folder, "OMP_NUM_THREADS": str(work["threads"])}
        path = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = f"{OBSERVER}{os.pathsep}{path}" if path else str(OBSERVER)
        env |= dict(word.split("=", 1) for word in set_there)
        env |= PRECISIONS.get(work["precision"], {})
        if common.gpu_count():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:devices])
        start = time.perf_counter()
        if wrong := run(tour.commands(work["script"], devices, 1)[0] + options, env, timeout):
            return wrong
        wall = time.perf_counter() - start
        log = [json.loads(line) for line in Path(folder, "log").read_text().splitlines()][1:]
        ranks = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(Path(folder).glob("*.jsonl"))  # rank 0 first
        ]
    if not ranks:
        return "no rank was observed: it does not call common.seconds_since"
    backend, epochs = ranks[0][0]["backend"], sum(entry["seconds"] for entry in ranks[0])
    # In the first one: later a peak may be that of an evaluation, or of what a topic proves.
    memory = max(entries[0]["peak_memory"] for entries in ranks)
    ranks = [entries[1:] for entries in ranks]
    speeds = [entry["samples_per_second"] for entry in log]
    before = zip(*([entry["before_backward"] for entry in rank] for rank in ranks), strict=True)
    spread = [max(seconds) / min(seconds) for seconds in before if min(seconds) > 0]
    first = log[0]
    return {
        **{name: work[name] for name in ("script", "mode", "devices", "model", "image_size")},
        "per_rank_batch": work["batch_size"] * grow // devices,
        "effective_batch": work["batch_size"] * grow,
        **{name: work[name] for name in ("precision", "threads", "num_workers")},
        "options": " ".join(extra),
        "windows": len(speeds),
        # What was done, not what was asked for: the batches that do not fill up are dropped.
        "images_per_window": round(first["samples_per_second"] * ranks[0][0]["seconds"]),
        **median_of(speeds),
        "straggler_ratio": None,  # of old rows: of whole epochs, in which ranks wait for each other
        "before_backward_ratio": round(statistics.median(spread), 4) if spread else None,
        "peak_memory_mb": round(memory / 2**20),
        # All but the training: to start, to evaluate, to end.
        "overhead_seconds": round(wall - epochs, 1),
        "device": first["device"].partition(":")[0],
        "backend": backend,
        **machine.describe(),
    }


def median_of(speeds: list[float]) -> dict[str, float]:
    """Return the columns of the windows' samples/s."""
    found = {"samples_per_second": statistics.median(speeds)}
    found |= {"min": min(speeds), "max": max(speeds)}
    return {name: round(value, 2) for name, value in found.items()}


def append(path: Path, row: dict) -> None:
    """Add a row, sealed; nothing that is in the file is ever changed."""
    row = machine.sealed(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        head = next(csv.reader(file), None)
        if head and head != list(row):
            sys.exit(f"{path} has other columns: {', '.join(head)}. Use another --csv")
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if not head:
            writer.writeheader()
        writer.writerow(row)


def work_of(args: argparse.Namespace, **own: str | int) -> dict:
    """Return what measure() takes as work: own, and from the options what all rows share."""
    names = ("image_size", "batch_size", "images", "num_workers")
    return {
        "mode": "weak",
        "threads": args.threads[0],
        **{n: getattr(args, n) for n in names},
    } | own


def run_all(works: list[tuple[dict, list[str], dict]], args: argparse.Namespace) -> NoReturn:
    """Measure and record row by row, with a progress line each; exit with 1 if one has failed.

    works: what measure() takes as work and extra, and the columns that come before its own.
    """
    tour.end_like_ctrl_c()
    failed = False
    for number, (work, extra, columns) in enumerate(works, 1):
        words = [work[name] for name in ("script", "mode", "devices", "model", "precision")]
        print(f"[{number}/{len(works)}]", *columns.values(), *words, *extra, end=" ", flush=True)
        start = time.perf_counter()
        try:
            row = measure(work, args.windows, extra, args.timeout)
        except KeyboardInterrupt:
            name = Path(sys.argv[0]).name
            sys.exit(f"{name}: interrupted; what was measured is in {args.csv}")
        if isinstance(row, str):
            failed = True
            print(f"FAILED, {row}", flush=True)
            continue
        append(args.csv, columns | row)
        speed = f"{row['samples_per_second']:.0f} samples/s"
        print(f"{speed} ({time.perf_counter() - start:.0f} s)", flush=True)
    sys.exit(failed)


def powers_of_two(count: int) -> list[int]:
    return [n for n in (2**i for i in range(20)) if n < count] + [count]


def parser() -> argparse.ArgumentParser:
    """Return the options that scaling.py and ladder_of_speed.py share."""
    add = (made := argparse.ArgumentParser()).add_argument
    add("--devices", type=int, nargs="+", default=powers_of_two(common.gpu_count() or 2))
    add("--image-size", type=int, default=64)
    add("--batch-size", type=int, default=64, help="weak: of a rank; strong: effective")
    add("--images", type=int, default=1024, help="a window; weak: of a rank; strong: of all")
    add("--threads", type=int, nargs="+", default=[1], help="of each process")
    add("--num-workers", type=int, default=0)
    add("--windows", type=int, default=5, help="measured, after one to warm up")
    add("--extra", action="append", default=[], help="one option more, or NAME=VALUE")
    add("--timeout", type=float, default=900, help="seconds for one row")
    return made


def main() -> None:
    options = parser()
    options.description = __doc__
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--scripts", nargs="+", default=RUNGS)
    options.add_argument("--modes", nargs="+", default=["weak"], choices=["weak", "strong"])
    options.add_argument("--models", nargs="+", default=["small"])
    precisions = [*PRECISIONS, "bf16"]
    options.add_argument("--precisions", nargs="+", default=["fp32"], choices=precisions)
    options.add_argument("--csv", type=Path, default=ROOT / "results" / "scaling.csv")
    args = options.parse_args()
    if missing := [script for script in args.scripts if not (ROOT / script).is_file()]:
        options.error(f"no such script: {', '.join(missing)}. Use {' '.join(RUNGS)} or topics/...")
    works = []
    for model in args.models:
        for precision in args.precisions:
            for mode in args.modes:
                for devices in args.devices:
                    for script in args.scripts:
                        alone = script.startswith("00_") or not common.gpu_count()
                        if script.startswith("00") and alone and devices > 1:
                            continue
                        for threads in args.threads:
                            own = {"script": script, "mode": mode, "devices": devices}
                            own |= {"model": model, "precision": precision, "threads": threads}
                            works.append((work_of(args, **own), args.extra, {}))
    run_all(works, args)


if __name__ == "__main__":
    main()
