"""Topic: a data set in memory, once on a node, for all ranks that Lightning starts.

The first process loads it, before Trainer.fit, and hands it to the LightningDataModule.

ddp_fork    the ranks have its memory: a page is copied only when somebody writes to it
ddp_spawn   the data module is pickled for each rank, and torch pickles no tensor's data: it moves
            that to shared memory
ddp         each rank is the script run again, which loads again: N ranks hold N copies. So do ranks
            that torchrun or srun has started; see --storage mmap of topics/shared_dataset.py

More than half of this file measures whose pages of memory the data is in.
Standalone (no diff to show): it is a subclass of rung 04's data module.

Shared, forked ranks:   python -m topics.lightning_dataset --dataset fake --strategy ddp_fork
Shared, spawned ranks:  python -m topics.lightning_dataset --dataset fake --strategy ddp_spawn
A copy in each rank:    python -m topics.lightning_dataset --dataset fake --strategy ddp
All GPUs, or 2 on CPU:  the same three commands
"""

import importlib
import os
import shutil
import sys

import lightning as L
import torch

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common
from topics.shared_dataset import resident_bytes, storages

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Images(rung.Images):
    moved = ("ddp_spawn",)  # with which strategies to shared memory

    def __init__(self, args):  # before Trainer.fit
        super().__init__(args)
        self.sets = self.load()
        if args.strategy in self.moved:
            room = shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else float("inf")
            if sum(storages(self.sets).values()) > room:
                checks.fail(f"/dev/shm has {room} bytes free: use ddp_fork, or docker --shm-size")
            for part in self.sets:
                for tensor in part.tensors:
                    tensor.share_memory_()  # pickling would, but after loaded_at has been noted
        self.loaded_by, self.loaded_at = os.getpid(), storages(self.sets)

    def load(self):
        return common.load_datasets(self.args)

    def setup(self, stage):
        self.train_set, self.test_set = self.sets
        checks.same_on_all_ranks(self.args, self.args.start_epoch, self.train_set)  # all ranks
        self.device = self.trainer.strategy.root_device
        self.options = common.loader_options(self.args, self.device)
        self.options["batch_size"] = self.args.per_rank_batch


class CountCopies(L.Callback):
    def on_train_end(self, trainer, module):
        data, strategy, local = trainer.datamodule, trainer.strategy, trainer.datamodule.sets
        for part in local:
            for tensor in part.tensors:
                tensor.sum()  # a page counts when it has been used
        strategy.barrier()  # all ranks have used all pages
        sizes, copies = storages(local), "an unknown number of"
        if sys.platform == "linux":
            total = resident_bytes(os.getpid(), sizes)
            if trainer.local_rank == 0 and data.loaded_by != os.getpid():  # but the parent of all
                total += resident_bytes(data.loaded_by, data.loaded_at)
            total = strategy.reduce(torch.tensor(total, device=module.device), reduce_op="sum")
            copies = f"{total / sum(sizes.values()):.2f}"
        if trainer.is_global_zero:
            who = f"{module.args.strategy}: {trainer.world_size} ranks and their parent"
            text = f"{who} hold {copies} copies of the data"
            print(f"{text} ({sum(sizes.values()) / 1e6:.1f} MB)", flush=True)
            ranks = f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}"
            checks.conclude(
                f"{copies} copies of the data on {ranks}",
                "one a rank" if data.loaded_by == os.getpid() else "1",
                "each rank loads"
                if data.loaded_by == os.getpid()
                else "their parent has loaded for all",
            )


if __name__ == "__main__":
    args = common.parse_args("lightning", **checks.lightning_options())
    rung.record(rung.main)(args, data=Images, callbacks=[CountCopies()])
