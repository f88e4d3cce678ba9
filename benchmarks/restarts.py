"""How surely, and how soon, is a job back after kill -9 of a rank? topics/crash.py, many times.

    python benchmarks/restarts.py                      20 runs, with the setting of the text
    python benchmarks/restarts.py --setting 0          without it
    python benchmarks/restarts.py --help               what else

A row for each run goes to results/restarts.csv. back_after is the time from the kill to the start
line of the new ranks, in seconds; finished is 1 if torchrun ended with code 0 within --timeout.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402
import tour  # noqa: E402

import common  # noqa: E402


def crash(processes: int, setting: int, timeout: float) -> dict:
    """Run it once; return what is seen of the kill and of the restart."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", "--max-restarts=3", "-m", "topics.crash"]
        command += ["--epochs=2", f"--checkpoint={folder}/crash.pt", f"--timeout={timeout / 4}"]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(setting), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(timeout, tour.stop, [process])
        timer.start()
        killed, starts = None, []
        try:
            for line in process.stdout:  # ends when all have ended
                if "kill -9" in line:
                    killed = time.perf_counter()
                elif "| world size" in line:
                    starts.append(time.perf_counter())
            code = process.wait()
        finally:
            timer.cancel()
            tour.stop(process)
        later = [start - killed for start in starts if killed and start > killed]
    return {
        "processes": processes,
        "setting": setting,
        "finished": int(code == 0),
        "restarts": max(len(starts) - 1, 0),
        "back_after": round(later[0], 2) if later else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=max(2, common.gpu_count()))
    parser.add_argument("--setting", type=int, default=1, choices=[0, 1])
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one run")
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "restarts.csv")
    args = parser.parse_args()
    tour.end_like_ctrl_c()
    for number in range(1, args.runs + 1):
        row = crash(args.processes, args.setting, args.timeout)
        row |= {"device": "cuda" if common.gpu_count() else "cpu"}
        scaling.append(args.csv, row | machine.describe())
        print(f"[{number}/{args.runs}]", *(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
