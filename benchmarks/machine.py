"""What a number was measured on: recorded with every result."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch


def describe() -> dict:
    """Return hardware, versions, commit and date of a measurement on this machine."""
    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
        cpu = cpuinfo.split("model name", 1)[1].split(":", 1)[1].split("\n", 1)[0].strip()
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpus": len(names),
        "gpu": names[0] if names else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "python": platform.python_version(),
        "os": platform.system(),
        "commit": commit or os.environ.get("GIT_COMMIT"),
        "date": datetime.date.today().isoformat(),
    }
