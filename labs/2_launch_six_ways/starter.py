"""Lab 2: says who it is, as far as its launcher has told it."""

import os
import sys


def say(*arguments):
    names = {"rank": "RANK", "local rank": "LOCAL_RANK", "world size": "WORLD_SIZE"}
    slurm = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}
    told = [os.environ.get(n) or os.environ.get(f"SLURM_{slurm[n]}") or "-" for n in slurm]
    who = ", ".join(f"{name} {value}" for name, value in zip(names, told, strict=True))
    pids = f"pid {os.getpid()}, started by {os.getppid()}"
    print(f"{who} | arguments {arguments} | {pids}\n", end="", flush=True)  # one write


if __name__ == "__main__":
    if sys.argv[1:]:
        import torch.multiprocessing as mp

        mp.spawn(say, nprocs=int(sys.argv[1]))
    else:
        say()
