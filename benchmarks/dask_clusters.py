"""One Dask cluster for the job, one a node or one a rank: seconds until it is up, and to load.

    python benchmarks/dask_clusters.py      2 nodes of 2 ranks, 4 Dask workers in all

It runs topics/dask_data.py. The ways take turns, and each run adds a row to results/dask.csv, in
seconds: ready, from the first LocalCluster until all ranks are connected and the data are read;
loading, what the slowest rank waits for the data of an epoch; wall, from torchrun's start to its
end. load is how many processes wanted to run before that. The nodes are launchers on this machine.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402
import tour  # noqa: E402

import checks  # noqa: E402

SEEN = r"^{}: schedulers (\d+) \| Dask workers (\d+) .* ready in (\S+) s \| data (\S+) s$"


def measure(clusters: str, args: argparse.Namespace) -> dict | str:
    """Run it once; return the columns that are its own, or what was printed if that failed."""
    ranks = args.nodes * args.ranks_per_node
    each = args.workers // {"job": 1, "node": args.nodes, "rank": ranks}[clusters]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={args.nodes}"]
    command += [f"--nproc-per-node={args.ranks_per_node}", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint=localhost:{checks.free_port()}", "-m", "topics.dask_data"]
    command += [f"--clusters={clusters}", f"--workers={each}", f"--epochs={args.epochs}"]
    load, start, launchers, codes = os.getloadavg()[0], time.perf_counter(), [], ["too long"]
    with tempfile.TemporaryFile("w+") as log:
        options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": log}
        options |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        try:
            for _ in range(args.nodes):
                launchers.append(subprocess.Popen(command, **options))
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes = [process.wait(args.timeout) for process in launchers]
        finally:
            for process in launchers:
                tour.stop(process)
        log.seek(0)
        found = re.search(SEEN.format(clusters), text := log.read(), re.MULTILINE)
    if any(codes) or not found:
        return f"{codes}: {text[-1000:]}"
    row = {"clusters": clusters, "nodes": args.nodes, "ranks": ranks, "schedulers": int(found[1])}
    row |= {"workers": int(found[2]), "epochs": args.epochs, "ready": float(found[3])}
    row |= {"loading": round(float(found[4]) / args.epochs, 3)}
    return row | {"wall": round(time.perf_counter() - start, 1), "load": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", default=["job", "node", "rank"])
    for name, default in {"repeats": 3, "nodes": 2, "ranks-per-node": 2, "epochs": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--workers", type=int, default=4, help="Dask's, of all clusters together")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "dask.csv")
    args = parser.parse_args()
    tour.end_like_ctrl_c()
    for clusters in args.clusters * args.repeats:
        if isinstance(row := measure(clusters, args), str):
            sys.exit(f"dask_clusters.py: --clusters {clusters} has failed. {row}")
        scaling.append(args.csv, row | machine.describe())
        print(row, flush=True)


if __name__ == "__main__":
    main()
