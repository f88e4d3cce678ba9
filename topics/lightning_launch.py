"""Topic: how Lightning starts ranks: the same script again, with a rank in the environment.

The first process has no rank yet. Trainer.fit starts the other processes from it, with the same
arguments and these variables: LOCAL_RANK counts, and NODE_RANK is 0 on a single node. So what
stands before fit runs in each process, and a script that cannot run twice cannot run under ddp.
Under torchrun all processes have their variables from the start, and none is another's child.
Standalone (no diff to show): it imports rung 04 and prints before it.

Two processes on the CPU:   python -m topics.lightning_launch --epochs 1
Started by torchrun:        torchrun --standalone --nproc-per-node=2 -m topics.lightning_launch
All GPUs:                   the same two commands; torchrun with --nproc-per-node=gpu
"""

import importlib
import os
import sys

import torch.distributed as dist

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


def main(args):
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    found = " ".join(f"{name}={os.environ.get(name, '-')}" for name in names)
    who = f"process {os.getpid()}, child of {os.getppid()}"
    print(f"{who} | {found} | {' '.join(sys.argv)}\n", end="", flush=True)  # all processes
    trainer, children = rung.main(args), [os.getppid()]
    if dist.is_initialized():  # in each rank
        children = [None] * dist.get_world_size()
        dist.all_gather_object(children, os.getppid())
    if trainer.is_global_zero:
        checks.conclude(
            f"children of rank 0: {children.count(os.getpid())}, ranks: {len(children)}",
            "all others; none where torchrun has started them, or ddp_spawn",
            "this script has started ranks" if os.getpid() in children else "it has started none",
        )


if __name__ == "__main__":
    rung.record(main)(common.parse_args("lightning", **checks.lightning_options()))
