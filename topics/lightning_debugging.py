"""Topic: to debug a Lightning script: two ranks on the CPU, prints with the rank, a breakpoint.

A run on the CPU needs no GPU and has the same ranks and collectives, and an error is raised where
it happens. Rank 0 stops in the debugger in batch --at, the others wait for it at a barrier. Look
around there (p loss, p batch[0].shape, w), and continue with c. The wait ends with --timeout.
Standalone (no diff to show): it is a subclass of rung 04's Classifier.

Two processes on the CPU:   python -m topics.lightning_debugging --timeout 3600
In another batch:           python -m topics.lightning_debugging --timeout 3600 --at 7
"""

import importlib
import os
import sys
import time

import torch

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Classifier(rung.Classifier):
    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        if self.global_step == self.args.at:
            text = f"rank {self.global_rank} | batch {batch_index} | loss {loss:.4f}"
            print(f"{text}\n", end="", flush=True)
            if self.global_rank == 0:
                breakpoint()  # only this rank reads the terminal
            start = time.perf_counter()
            self.trainer.strategy.barrier()  # all ranks: nobody continues before rank 0
            self.waited = time.perf_counter() - start
            print(f"rank {self.global_rank} | behind the barrier\n", end="", flush=True)
        return loss

    def on_train_end(self):
        waited = [None] * self.trainer.world_size
        own = round(getattr(self, "waited", 0), 1)
        torch.distributed.all_gather_object(waited, own)  # all ranks
        patience = self.args.timeout.total_seconds()
        if self.global_rank == 0:
            checks.conclude(
                f"{waited} s at the barrier",
                "0 for rank 0, which had the debugger",
                f"the others have waited for it, and would for {patience:g} s"
                if hasattr(self, "waited")
                else f"there was no batch {self.args.at}, and no debugger",
            )


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a machine with GPUs as well
    # Only ddp: rank 0 is this process, which has the terminal.
    options = checks.lightning_options() | {"strategy": ("ddp",), "at": 2}
    args = common.parse_args("lightning", **options)
    # Lightning's progress bar, by rich, hides the prompt.
    rung.record(rung.main)(args, module=Classifier, enable_progress_bar=False)
