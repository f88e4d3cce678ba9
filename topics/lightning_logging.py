"""Topic: self.log on several ranks: whose number it is, who waits for whom, and how it hangs.

rank_zero_only    rank 0's own number, of its shard of the data: no communication
sync_dist         a mean over the ranks: not exact where their shards differ in size (997 samples)
sync_dist_group   the same over a group of ranks, here those with even and those with odd numbers
sums              log correct and all samples as sums, and divide at the end: exact (as 04 does)

The time in self.log is printed. With sync_dist it has the wait for the slowest rank in it, which
else comes in the backward pass: the step itself gets longer by less.

A self.log with sync_dist on rank 0 alone (--deadlock 1) waits for ranks that never come, until
--timeout ends it. What only rank 0 logs takes rank_zero_only.
Standalone (no diff to show): it is a subclass of rung 04's Classifier.

Two processes on the CPU:   python -m topics.lightning_logging
Four processes:             python -m topics.lightning_logging --devices 4
The deadlock:               python -m topics.lightning_logging --deadlock 1 --timeout 30
"""

import importlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Images(rung.Images):
    def setup(self, stage):
        super().setup(stage)
        self.test_set = Subset(self.test_set, range(len(self.test_set))[:997])


class Classifier(rung.Classifier):
    def on_train_start(self):
        super().on_train_start()
        ranks, timeout = range(self.trainer.world_size), self.args.timeout
        parts = [ranks[i::2] for i in range(min(2, len(ranks)))]
        groups = [dist.new_group(part, timeout=timeout) for part in parts]  # all ranks, for each
        self.group = groups[self.global_rank % 2]
        self.log_seconds, self.first_step = torch.zeros(2), self.global_step

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        times = [time.perf_counter()]
        self.log("loss_of_step", loss)
        times.append(time.perf_counter())
        if not self.args.deadlock or self.global_rank == 0:  # deadlock: the others never answer
            self.log("loss_sync_dist", loss, sync_dist=True)  # a barrier and an all-reduce
        times.append(time.perf_counter())
        self.log_seconds += torch.tensor(times).diff()
        return loss

    def validation_step(self, batch, batch_index):
        right = (self.model(batch[0]).argmax(dim=1) == batch[1]).float()
        self.log_dict({"correct": right.sum(), "tested": torch.ones_like(right).sum()}, **self.sums)
        own = {"value": right.mean(), "batch_size": len(right)}
        self.log("rank_zero_only", **own, rank_zero_only=True)
        self.log("sync_dist", **own, sync_dist=True)
        self.log("sync_dist_group", **own, sync_dist=True, sync_dist_group=self.group)


def main(args):
    try:
        trainer = rung.main(args, module=Classifier, data=Images)
    except RuntimeError as error:
        ends = ("Timed out waiting", "by peer")  # by peer: a rank that waited as long has left
        if args.deadlock and checks.rank() == 0 and any(end in str(error) for end in ends):
            checks.fail(f"rank 0 waited in self.log, for ranks that do not call it: {error}")
        raise
    if trainer.is_global_zero and trainer.callback_metrics:  # none: nothing was left to do
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        for name in ("rank_zero_only", "sync_dist", "sync_dist_group"):
            print(f"{name:15} {found[name]:.4%}")
        correct, tested = found["correct"], found["tested"]
        print(f"{'sums':15} {correct / tested:.4%}, {correct:.0f} of {tested:.0f}")
        model = trainer.lightning_module
        steps = trainer.global_step - model.first_step
        plain, synced = (model.log_seconds / steps * 1000).tolist()
        text = f"a step is {plain:.3f} ms in self.log, with sync_dist {synced:.3f} ms"
        print(f"{text}, the wait for the slowest rank included", flush=True)
        off = abs(found["sync_dist"] - correct / tested)
        checks.conclude(
            f"accuracy {found['sync_dist']:.3%} with sync_dist, {correct / tested:.3%} by sums",
            "the same where all shards are equally large",
            "the mean over the ranks is not exact" if off > 1e-6 else "the shards are equal here",
        )


if __name__ == "__main__":
    # ddp: the numbers are in this process, not in one that it has forked.
    options = checks.lightning_options() | {"strategy": ("ddp", "fsdp"), "deadlock": 0}
    rung.record(main)(common.parse_args("lightning", **options))
