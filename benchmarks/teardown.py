"""How do ranks on the CPU end? Run rung 02 many times and count the exit codes of its ranks.

    python benchmarks/teardown.py --runs 200

A Gloo thread that still holds a tensor when Python shuts down aborts the process ("terminate called
without an active exception", exit code -6). The thread lives as long as its group, and
torch.distributed.nn, which torch imports with the first optimizer, takes the group that it finds as
a default argument: it keeps a group that is older than itself. So checks.py imports it first. One
run in five more imports it again after the group, as a script without checks.py does. The threads
get the CPU last here, or it would be a rare event. A rank is forked from this process, which has
imported torch, and then ends as any Python program ends.
"""

import argparse
import collections
import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # so that the forked ranks need not import it
import torch.distributed.nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402

import checks  # noqa: E402

RUNG = ROOT / "02_torchrun.py"
INIT = "    dist.init_process_group(backend, timeout=args.timeout)\n"
LAST = "        sums[2:] = common.evaluate("
LATE = "    importlib.reload(torch.distributed.nn.functional)\n"


def run_gloo_last() -> None:
    """Let Gloo's threads run when this core has nothing else to do."""
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def rank_main(rank: int, ranks: int, port: str, late: bool, log: Path) -> None:
    """In a forked process: be one rank of the rung, from its first line to its last."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    sys.argv = [RUNG.name, "--epochs=1", "--dataset=fake:192", "--image-size=16", "--lr=0.01"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    source = RUNG.read_text()
    assert source.count(LAST) == source.count(INIT) == 1, f"{RUNG.name} has changed"
    source = source.replace(LAST, f"        run_gloo_last()\n{LAST}")
    source = source.replace(INIT, INIT + LATE) if late else source
    main = {"__name__": "__main__", "importlib": importlib, "run_gloo_last": run_gloo_last}
    exec(compile(source, str(RUNG), "exec"), main)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "teardown.csv")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Gloo's question
    log, failed = Path(tempfile.mkstemp()[1]), 0
    for late in (False, True):
        codes: collections.Counter = collections.Counter()
        runs = max(args.runs // 5, 1) if late else args.runs
        for _ in range(runs):
            port, pids = checks.free_port(), []
            for rank in range(args.processes):
                if not (pid := os.fork()):
                    rank_main(rank, args.processes, port, late, log)
                    sys.exit(0)  # not os._exit: Python shuts down as ever
                pids.append(pid)
            codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        row = {"imported": "after" if late else "before", "runs": runs}
        row |= {"processes": args.processes, "ranks": sum(codes.values()), "aborted": codes[-6]}
        row["failed_otherwise"] = row["ranks"] - codes[0] - codes[-6]
        scaling.append(args.csv, row | machine.describe())
        print(row)
        failed += row["failed_otherwise"] + (0 if late else row["aborted"])  # late ones may abort
    if failed:
        print(log.read_text()[-2000:])
    log.unlink()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
