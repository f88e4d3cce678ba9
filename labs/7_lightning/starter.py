"""Lab 7: rung 04 with one fault. It trains on two processes, and its numbers are not those of 02.

The task is in labs/7_lightning/README.md. torchrun --standalone --nproc-per-node=2 starter.py
"""

import sys
import time
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{Path(__file__).resolve().parent}/../../..")  # the repo's root
import checks
import common


class Images(L.LightningDataModule):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def setup(self, stage):
        self.train_set, self.test_set = common.load_datasets(self.args)
        checks.same_on_all_ranks(self.args, self.args.start_epoch, self.train_set)  # all ranks
        self.device = self.trainer.strategy.root_device
        self.options = common.loader_options(self.args, self.device)
        self.options["batch_size"] = self.args.per_rank_batch

    def train_dataloader(self):  # Lightning calls sampler.set_epoch
        sampler = DistributedSampler(self.train_set, seed=self.args.seed, drop_last=True)
        where = f"rank {sampler.rank} of {sampler.num_replicas} | {self.device}"
        print(f"{where} | {len(sampler)} samples\n", end="", flush=True)  # all ranks
        return DataLoader(self.train_set, sampler=sampler, drop_last=True, **self.options)

    def val_dataloader(self):
        share = range(self.trainer.global_rank, len(self.test_set), self.trainer.world_size)
        return DataLoader(Subset(self.test_set, share), **self.options)  # each sample once


class Classifier(L.LightningModule):
    # How to log: sums over batches and ranks. Means would be wrong where the ranks' shards differ.
    sums = {"on_step": False, "on_epoch": True, "sync_dist": False, "reduce_fx": "sum"}

    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, common.build_model(args)
        self.save_hyperparameters({name: getattr(args, name) for name in checks.RESUME_KEYS})

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.args.lr, momentum=0.9)

    def on_train_start(self):
        checks.end_at_sigterm()  # Lightning's own handler waits for all ranks
        self.optimizers().param_groups[0]["lr"] = self.args.lr  # not that of the checkpoint
        if self.global_rank == 0:
            common.print_start(self.args, self.device)

    def on_train_epoch_start(self):
        self.start = time.perf_counter()

    def training_step(self, batch, batch_index):  # Lightning does the rest of the step
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        ones = torch.ones_like(labels, dtype=torch.float32)  # a number would stop the GPU each time
        self.log_dict({"loss": loss * len(labels), "samples": ones.sum()}, **self.sums)
        return loss

    def on_validation_start(self):  # after the last training batch
        self.seconds = common.seconds_since(self.start, self.device)
        for buffer in self.buffers():  # batch norm's: evaluate what rank 0 saves
            torch.distributed.broadcast(buffer, src=0)

    def validation_step(self, batch, batch_index):
        right = (self.model(batch[0]).argmax(dim=1) == batch[1]).float()
        self.log_dict({"correct": right.sum(), "tested": torch.ones_like(right).sum()}, **self.sums)

    def on_train_epoch_end(self):  # after validation, before the checkpoint
        metrics = self.trainer.callback_metrics  # all ranks: adds up over the ranks
        sums = torch.stack([metrics[name] for name in ("loss", "samples", "correct", "tested")])
        checks.loss_is_finite(self.args, self.current_epoch, sums, self)
        if self.global_rank == 0:
            common.log_epoch(self.args, self.current_epoch, sums, self.seconds)


def main(args, module=Classifier, data=Images, callbacks=(), **changes):
    torch.manual_seed(args.seed)
    args.start_epoch, path = checks.lightning_epochs(args), Path(args.checkpoint or "off").resolve()
    own = L.pytorch.callbacks.ModelCheckpoint(path.parent, path.stem, enable_version_counter=False)
    own.FILE_EXTENSION = path.suffix
    options = checks.lightning_trainer(args)  # GPU or CPU, the strategy, little output
    options |= {"devices": args.devices, "num_nodes": args.num_nodes, "precision": args.precision}
    options |= {"callbacks": [*callbacks, own] if args.checkpoint else [*callbacks]}
    options |= {"max_epochs": args.epochs, "use_distributed_sampler": False}  # we bring our own
    trainer = L.Trainer(**options | changes)
    trainer.fit(module(args), data(args), ckpt_path=path if args.start_epoch else None)
    return trainer


if __name__ == "__main__":  # record: a rank that fails reports its traceback to torchrun
    record(main)(common.parse_args("lightning", **checks.lightning_options()))
