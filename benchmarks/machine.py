"""What a number was measured on, and a seal that shows if it was changed: for every result.

    python benchmarks/machine.py FILE ...    seals the rows of these files that have no seal yet

A benchmark seals its rows itself. The command was run once, for the rows that are older than that;
it is also for a record that was put together by hand. It never makes a seal again.
"""

import csv
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

CODE = ("--", ":!results", ":!*.md")  # what git is asked about


def git(*words: str) -> str:
    """Return what git prints, "" where there is no git or no repository."""
    command = ["git", "-C", str(Path(__file__).parent.parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def describe() -> dict:
    """Return hardware, versions, commit and date of a measurement on this machine."""
    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
        cpu = cpuinfo.split("model name", 1)[1].split(":", 1)[1].split("\n", 1)[0].strip()
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(affinity(0)) if affinity else os.cpu_count()
    commit = os.environ.get("GIT_COMMIT") or git("rev-parse", "--short", "HEAD")
    if "GIT_COMMIT" not in os.environ and git("status", "--porcelain", "-uno", *CODE):
        commit += "-dirty"  # other code than that of the commit was measured
    return {
        "cpu": cpu,
        "cores": cores,  # that this process may use
        "gpus": len(names),
        "gpu": names[0] if names else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "os": platform.system(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def seal(row: dict) -> str:
    """Return a short checksum of the row's other cells, in order, with their names."""
    cells = [f"{k}={'' if v is None else v}" for k, v in row.items() if k != "seal"]
    return hashlib.sha256("\n".join(cells).encode()).hexdigest()[:12]


def sealed(row: dict) -> dict:
    """Return the row with its seal at the end."""
    return row | {"seal": seal(row)}


def rows(path: Path) -> list[dict]:
    """Return the rows of a .csv, a .jsonl or a .json file; a .json that is no list is one row."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    found = json.loads(text)
    return found if isinstance(found, list) else [found]


def seal_the_rest(path: Path) -> None:
    """Seal the rows that have no seal; all others stay as they are."""
    found = [row if row.get("seal") else sealed(row) for row in rows(path)]
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    elif path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    else:
        alone = isinstance(json.loads(path.read_text()), dict)
        path.write_text(json.dumps(found[0] if alone else found, indent=1) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        seal_the_rest(Path(name))
