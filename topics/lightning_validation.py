"""Topic: three ways to test with Lightning on several ranks, and which of them is right.

padded       Trainer.test with its own sampler: repeats samples, so that all ranks have equally many
one device   a second Trainer, of one process: right, and as slow as one process
exact        as in 04: each rank tests its shard, and the *sums* are added: right, and quick

The test set here has 997 samples, so it does not divide. Without Lightning: evaluation.py.
Standalone (no diff to show): it is a subclass of rung 04's Classifier.

Two processes on the CPU:   python -m topics.lightning_validation
Three processes:            python -m topics.lightning_validation --devices 3
Started by torchrun:        torchrun --standalone --nproc-per-node=2 -m topics.lightning_validation
"""

import importlib
import os
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Images(rung.Images):
    def setup(self, stage):
        super().setup(stage)
        self.test_set = Subset(self.test_set, range(len(self.test_set))[:997])


class Classifier(rung.Classifier):
    # Its sums are exact. Which samples it gets, and how often, is the sampler's work.
    # Lightning sends validation through DDP's forward. Without buffers that is no collective, so
    # exact may have more batches on one rank than on another. With batch norm each forward
    # broadcasts its buffers, and the rank with one batch more would wait for the others in vain:
    # such a model needs DDPStrategy(broadcast_buffers=False) (since torch 2.13:
    # forward_sync_buffers), or equally many batches.
    test_step = rung.Classifier.validation_step


def main(args):
    trainer = rung.main(args, module=Classifier, data=Images)
    model, data, metrics = trainer.lightning_module, trainer.datamodule, trainer.callback_metrics
    if not metrics:
        return  # nothing was left to do
    ways = {"exact": (metrics["correct"], metrics["tested"])}
    test_loader = DataLoader(data.test_set, 100)
    options = checks.lightning_trainer(args) | {"accelerator": trainer.accelerator}
    padded = L.Trainer(devices=args.devices, num_nodes=args.num_nodes, **options)
    ways["padded"] = padded.test(model, test_loader, verbose=False)[0].values()  # all ranks
    torch.distributed.destroy_process_group()  # so that the last Trainer is alone
    if trainer.is_global_zero:
        options = {"accelerator": trainer.accelerator, "logger": False}
        alone = L.Trainer(devices=1, enable_progress_bar=False, **options)
        ways["one device"] = alone.test(model, test_loader, verbose=False)[0].values()
        for way, (correct, tested) in ways.items():
            print(f"{way:10} {correct:.0f} of {tested:.0f} = {correct / tested:.4%}", flush=True)
        tested = {way: int(tested) for way, (_, tested) in ways.items()}
        checks.conclude(
            f"{tested} samples tested",
            f"{len(data.test_set)}",
            f"Trainer.test counts {tested['padded'] - len(data.test_set)} twice on these ranks",
        )


if __name__ == "__main__":
    # ddp: the last Trainer needs the weights in this process, not in one that it has forked.
    options = checks.lightning_options() | {"strategy": ("ddp",)}
    rung.record(main)(common.parse_args("lightning", **options))
