"""What a number was measured on: recorded with every result."""

import datetime
import os
import platform
import subprocess
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
