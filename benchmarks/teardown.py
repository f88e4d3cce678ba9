"""How do ranks on the CPU end? Run rung 02 many times and count the exit codes of its ranks.

    python benchmarks/teardown.py --runs 200

A Gloo thread that still holds a tensor when Python shuts down aborts the process ("terminate called
without an active exception", exit code -6). A rank is forked from this process, which has imported
torch, and then ends as any Python program ends.
"""

import argparse
import collections
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch._dynamo  # so that the forked ranks need not import it

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402

import checks  # noqa: E402

RUNG = ROOT / "02_torchrun.py"


def rank_main(rank: int, ranks: int, port: str, log: Path) -> None:
    """In a forked process: be one rank of the rung, from its first line to its last."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    sys.argv = [RUNG.name, "--epochs=1", "--dataset=fake:192", "--image-size=16", "--lr=0.01"]
    exec(compile(RUNG.read_text(), str(RUNG), "exec"), {"__name__": "__main__"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "teardown.csv")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Gloo's question
    codes: collections.Counter = collections.Counter()
    log = Path(tempfile.mkstemp()[1])
    for _ in range(args.runs):
        port, pids = checks.free_port(), []
        for rank in range(args.processes):
            if not (pid := os.fork()):
                rank_main(rank, args.processes, port, log)
                sys.exit(0)  # not os._exit: Python shuts down as ever
            pids.append(pid)
        codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    failed = sum(codes.values()) - codes[0]
    row = {"runs": args.runs, "processes": args.processes, "aborted": codes[-6]}
    scaling.append(args.csv, row | {"failed_otherwise": failed - codes[-6]} | machine.describe())
    print(f"{sum(codes.values())} ranks, exit codes: {dict(codes)}")
    if failed:
        print(log.read_text()[-2000:])
    log.unlink()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
