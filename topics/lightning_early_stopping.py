"""Topic: Lightning stops early and keeps the best epoch: decisions that all ranks take together.

sync_dist   all ranks look at one number, the mean of their accuracies: one decision
own         each looks at the accuracy on its own shard. All stop when one has lost patience; a file
            is written when all have improved, so that the best epoch may be missed
rank_0      the others have no number, and Lightning ends the run with an error that says so

Standalone (no diff to show): it is a subclass of rung 04's Classifier.

Two processes on the CPU:   python -m topics.lightning_early_stopping --epochs 20 \
                                --checkpoint checkpoints/run.ckpt
Each rank's own number:     python -m topics.lightning_early_stopping --epochs 20 \
                                --checkpoint checkpoints/own.ckpt --log own
"""

import importlib
import os
import sys
from pathlib import Path

import lightning as L
import torch

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Classifier(rung.Classifier):
    def validation_step(self, batch, batch_index):
        right = (self.model(batch[0]).argmax(dim=1) == batch[1]).float()
        self.log_dict({"correct": right.sum(), "tested": torch.ones_like(right).sum()}, **self.sums)
        if self.args.log != "rank_0" or self.global_rank == 0:
            accuracy = {"value": right.mean(), "batch_size": len(right)}
            self.log("accuracy", **accuracy, sync_dist=self.args.log == "sync_dist")


def main(args):
    if not args.checkpoint:
        checks.fail("needs a --checkpoint: the best epoch is kept beside it")
    path = Path(args.checkpoint).resolve()
    name = f"{path.stem}-best-{{epoch}}"  # Lightning counts epochs from 0
    best = L.pytorch.callbacks.ModelCheckpoint(path.parent, name, monitor="accuracy", mode="max")
    stop = L.pytorch.callbacks.EarlyStopping("accuracy", mode="max", patience=args.patience)
    trainer = rung.main(args, module=Classifier, callbacks=[best, stop])
    text = f"stops after epoch {trainer.current_epoch}, keeps {Path(best.best_model_path).name}"
    score = f"{best.best_model_score:.1%}"
    print(f"rank {trainer.global_rank} {text} ({score})\n", end="", flush=True)
    found = [None] * trainer.world_size
    torch.distributed.all_gather_object(found, (trainer.current_epoch, best.best_model_path, score))
    if trainer.is_global_zero:
        checks.conclude(
            f"last epochs: {len({epoch for epoch, *_ in found})}, best scores: {len(set(found))}, "
            f"ranks: {len(found)}",
            "1 and 1 with sync_dist, and a score of each rank's own without",
            "all ranks decide by one number"
            if len(set(found)) == 1
            else "each judges by its shard",
        )


if __name__ == "__main__":
    # ddp: what the callbacks have seen is in this process, not in one that it has forked.
    options = checks.lightning_options() | {"strategy": ("ddp", "fsdp"), "patience": 2}
    rung.record(main)(common.parse_args("lightning", **options, log=("sync_dist", "own", "rank_0")))
