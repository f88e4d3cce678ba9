"""Topic: a data set in memory, once on a node, for all ranks that Lightning starts.

The first process loads it, before Trainer.fit, and hands it to the LightningModule. With ddp_fork
the ranks have its memory: a page is copied only when somebody writes to it. With ddp_spawn the
module is pickled for each rank, and torch pickles no tensor's data: it moves that to shared memory.
With ddp each rank is the script run again, which loads again: N ranks hold N copies. So do ranks
that torchrun or srun has started; for those see --way mmap of topics/shared_dataset.py.

Shared, forked ranks:   python -m topics.lightning_dataset --dataset fake --strategy ddp_fork
Shared, spawned ranks:  python -m topics.lightning_dataset --dataset fake --strategy ddp_spawn
A copy in each rank:    python -m topics.lightning_dataset --dataset fake --strategy ddp
All GPUs, or 2 on CPU:  the same three commands
What changed:           diff -U0 -w 04_lightning.py topics/lightning_dataset.py
Budget: +33 -3 because more than half of it measures whose pages of memory the data is in.
"""

import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import common
from topics.shared_dataset import held, places

common.set_up_lightning()  # here, not in main: what ddp_spawn starts imports this file


class Classifier(L.LightningModule):
    def __init__(self, args, sets):
        super().__init__()
        self.args, self.model = args, common.build_model(args)
        self.sets, self.loaded_by, self.loaded_at = sets, os.getpid(), places(sets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.args.lr, momentum=0.9)

    def train_dataloader(self):
        args, rank, world_size = self.args, self.trainer.global_rank, self.trainer.world_size
        train_set, test_set = self.sets
        options = common.loader_options(args, self.device)
        sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
        batch = args.per_rank_batch
        test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
        self.test_loader = DataLoader(test_shard, batch, **options)
        return DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)

    def on_train_start(self):
        epoch = torch.tensor(float(self.current_epoch), device=self.device)  # read on its own disk
        if self.trainer.strategy.reduce(epoch, reduce_op="mean") != self.current_epoch:  # all ranks
            common.fail("the nodes' checkpoints differ: put --checkpoint on a disk that all see")
        if self.global_rank == 0:
            common.print_start(self.args, self.device)
        # Not Lightning's signal handlers: they wait for all ranks, and ask them before each batch.
        self.trainer._signal_connector.teardown()
        self.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_epoch_start(self):  # Lightning has called sampler.set_epoch
        self.sums = torch.zeros(4, device=self.device)  # loss, samples, correct, tested
        self.start = time.perf_counter()
        self.model.train()

    def training_step(self, batch, batch_index):  # Lightning does the rest of the step
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += len(labels)
        return loss

    def on_train_epoch_end(self):
        args, epoch, strategy = self.args, self.current_epoch, self.trainer.strategy
        seconds = common.seconds_since(self.start, self.device)
        # All ranks: with fsdp each holds a share of weights and momentum, and gathers the whole.
        momentum = strategy.optimizer_state(self.optimizers().optimizer)
        with FSDP.summon_full_params(self.trainer.model, writeback=False):
            # Not Lightning's validation loop: it runs through DDP, which needs as many batches on
            # each rank, so its sampler repeats samples to fill up. Here each sample counts once.
            self.sums[2:] = common.evaluate(self.model, self.test_loader, self.device)
            sums = strategy.reduce(self.sums, reduce_op="sum")  # all ranks call this
            if self.global_rank == 0:
                optimizer = self.configure_optimizers()  # a plain one, for the whole weights
                if "deepspeed" not in args.strategy:  # its momentum is in Lightning's file only
                    optimizer.load_state_dict(momentum)
                common.save_checkpoint(args, epoch + 1, self.model, optimizer)
                common.log_epoch(args, epoch, sums, seconds)

    def on_train_end(self):
        mine, strategy = places(self.sets), self.trainer.strategy
        for part in self.sets:
            for tensor in part.tensors:
                tensor.sum()  # a page counts when it has been used
        strategy.barrier()  # all ranks have used all pages
        copies = "an unknown number of"
        if sys.platform == "linux":
            total = held(os.getpid(), mine)
            if self.local_rank == 0 and self.loaded_by != os.getpid():  # but the parent of all
                total += held(self.loaded_by, self.loaded_at)
            total = strategy.reduce(torch.tensor(total, device=self.device), reduce_op="sum")
            copies = f"{total / sum(mine.values()):.2f}"
        if self.global_rank == 0:
            who = f"{self.args.strategy}: {self.args.world_size} ranks and their parent"
            text = f"{who} hold {copies} copies of the data"
            print(f"{text} ({sum(mine.values()) / 1e6:.1f} MB)", flush=True)


def main(args):
    torch.manual_seed(args.seed)
    state = common.read_checkpoint(args)
    common.check(state, args)
    if state and state["epochs"] >= args.epochs:
        return
    path = Path(args.checkpoint or "unused").with_suffix(".ckpt")  # Lightning's own, to resume from
    if state and not path.exists():
        common.fail(f"Lightning needs {path} to go on: is {args.checkpoint} of another rung?")
    own = L.pytorch.callbacks.ModelCheckpoint(path.parent, path.stem, enable_version_counter=False)
    if args.strategy == "sync_once":
        import topics.sync_once  # noqa: F401  a strategy of our own: it tells Lightning its name
    kind = L.pytorch.strategies.StrategyRegistry[args.strategy]
    trainer = L.Trainer(
        accelerator="gpu" if common.gpu_count() else "cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=kind["strategy"](timeout=timedelta(seconds=args.timeout), **kind["init_params"]),
        precision=args.precision,
        max_epochs=args.epochs,
        use_distributed_sampler=False,  # we bring our own
        callbacks=[own] if args.checkpoint else [],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    sets = common.load_datasets(args)  # each process that runs the script does
    if args.strategy == "ddp_spawn":
        room = shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else float("inf")
        if sum(places(sets).values()) > room:
            common.fail(f"/dev/shm has room for {room} bytes: use ddp_fork, or docker --shm-size")
        for part in sets:
            for tensor in part.tensors:
                tensor.share_memory_()  # pickling would, but after loaded_at has been noted
    model = Classifier(args, sets)
    trainer.fit(model, ckpt_path=path if state else None)


if __name__ == "__main__":
    # torchrun or srun may have started the processes: then there are as many as there are.
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    devices = int(started or common.gpu_count() or 2)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    options = {"devices": devices, "num_nodes": nodes, "strategy": "ddp", "precision": "32-true"}
    main(common.parse_args("lightning", **options))
