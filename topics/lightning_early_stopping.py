"""Topic: Lightning stops early and keeps the best epoch: decisions that all ranks take together.

sync_dist   all ranks look at one number, the mean of their accuracies: one decision
own         each looks at the accuracy on its own shard. All stop when one has lost patience; a file
            is written when all have improved, so that the best epoch may be missed
rank_0      the others have no number: EarlyStopping ends them with an error that says so. Without
            it (--patience 0) rank 0 waits in ModelCheckpoint and the others train on: their
            collectives do not fit, and all wait until --timeout, or Gloo sees it and ends them

Two processes on the CPU:   python -m topics.lightning_early_stopping --epochs 20
Each rank's own number:     python -m topics.lightning_early_stopping --epochs 20 --log own
The freeze:                 python -m topics.lightning_early_stopping --log rank_0 --patience 0
What changed:               diff -U0 -w 04_lightning.py topics/lightning_early_stopping.py
"""

import os
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

common.set_up_lightning()  # here, not in main: what ddp_spawn starts imports this file


class Classifier(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, common.build_model(args)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.args.lr, momentum=0.9)

    def train_dataloader(self):
        args, rank, world_size = self.args, self.trainer.global_rank, self.trainer.world_size
        train_set, test_set = common.load_datasets(args)
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
            own = self.sums[2] / self.sums[3]  # the accuracy on this rank's shard
            sums = strategy.reduce(self.sums, reduce_op="sum")  # all ranks call this
            if args.log != "rank_0" or self.global_rank == 0:
                self.log("accuracy", own, sync_dist=args.log == "sync_dist")
            if self.global_rank == 0:
                optimizer = self.configure_optimizers()  # a plain one, for the whole weights
                if "deepspeed" not in args.strategy:  # its momentum is in Lightning's file only
                    optimizer.load_state_dict(momentum)
                common.save_checkpoint(args, epoch + 1, self.model, optimizer)
                common.log_epoch(args, epoch, sums, seconds)


def main(args):
    if args.strategy in common.FORKS:
        common.fail(f"--strategy {args.strategy} trains in other processes than this: use ddp")
    if args.log not in ("sync_dist", "own", "rank_0") or args.patience < 0 or not args.checkpoint:
        common.fail("needs --log sync_dist, own or rank_0; --patience 0 or more; a --checkpoint")
    torch.manual_seed(args.seed)
    state = common.read_checkpoint(args)
    common.check(state, args)
    if state and state["epochs"] >= args.epochs:
        return
    path = Path(args.checkpoint or "unused").with_suffix(".ckpt")  # Lightning's own, to resume from
    if state and not path.exists():
        common.fail(f"Lightning needs {path} to go on: is {args.checkpoint} of another rung?")
    own = L.pytorch.callbacks.ModelCheckpoint(path.parent, path.stem, enable_version_counter=False)
    name = f"{path.stem}-best-{{epoch}}"  # Lightning counts epochs from 0
    best = L.pytorch.callbacks.ModelCheckpoint(path.parent, name, monitor="accuracy", mode="max")
    stop = L.pytorch.callbacks.EarlyStopping("accuracy", mode="max", patience=args.patience)
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
        callbacks=[best, own, stop] if args.patience else [best, own],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(Classifier(args), ckpt_path=path if state else None)
    text = f"stops after epoch {trainer.current_epoch}, keeps {Path(best.best_model_path).name}"
    print(f"rank {trainer.global_rank} {text} ({best.best_model_score:.1%})", flush=True)


if __name__ == "__main__":
    # torchrun or srun may have started the processes: then there are as many as there are.
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    devices = int(started or common.gpu_count() or 2)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    options = {"devices": devices, "num_nodes": nodes, "strategy": "ddp", "precision": "32-true"}
    options |= {"log": "sync_dist", "patience": 2}
    main(common.parse_args("lightning", **options))
