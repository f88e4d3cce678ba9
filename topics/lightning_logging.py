"""Topic: self.log on several ranks: whose number it is, who waits for whom, and how it hangs.

rank_zero_only    rank 0's own number, of its share of the data: no communication
sync_dist         a mean over the ranks: not exact where their shares differ in size (997 samples)
sync_dist_group   the same over a group of ranks, here those with even and those with odd numbers
sums              log correct and all samples as sums, and divide at the end: exact

The time in self.log is printed. With sync_dist it has the wait for the slowest rank in it, which
else comes in the backward pass: the step itself gets longer by less.

A self.log with sync_dist on rank 0 alone (--deadlock 1) waits for ranks that never come, until
--timeout ends it. What only rank 0 logs takes rank_zero_only.

Two processes on the CPU:   python -m topics.lightning_logging
Four processes:             python -m topics.lightning_logging --devices 4
The deadlock:               python -m topics.lightning_logging --deadlock 1 --timeout 30
What changed:               diff -U0 -w 04_lightning.py topics/lightning_logging.py
Budget: +42 -1 because it has four logs, their times and a hang in one file.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
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
        test_set = Subset(test_set, range(len(test_set))[:997])
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
        ranks = range(self.trainer.world_size)
        groups = [dist.new_group(ranks[i::2]) for i in range(min(2, len(ranks)))]  # all ranks
        self.group = groups[self.global_rank % 2]
        self.log_seconds, self.first_step = torch.zeros(2), self.global_step

    def on_train_epoch_start(self):  # Lightning has called sampler.set_epoch
        self.sums = torch.zeros(4, device=self.device)  # loss, samples, correct, tested
        self.start = time.perf_counter()
        self.model.train()

    def training_step(self, batch, batch_index):  # Lightning does the rest of the step
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += len(labels)
        times = [time.perf_counter()]
        self.log("loss", loss)
        times.append(time.perf_counter())
        if not self.args.deadlock or self.global_rank == 0:  # deadlock: the others never answer
            self.log("loss_sync_dist", loss, sync_dist=True)  # a barrier and an all-reduce
        times.append(time.perf_counter())
        self.log_seconds += torch.tensor(times).diff()
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
            correct, tested = self.sums[2:].clone()  # of this rank's share
            own = {"value": correct / tested, "batch_size": int(tested)}
            self.log("rank_zero_only", **own, rank_zero_only=True)
            self.log("sync_dist", **own, sync_dist=True)
            self.log("sync_dist_group", **own, sync_dist=True, sync_dist_group=self.group)
            self.log("correct", correct, sync_dist=True, reduce_fx="sum")
            self.log("tested", tested, sync_dist=True, reduce_fx="sum")
            sums = strategy.reduce(self.sums, reduce_op="sum")  # all ranks call this
            if self.global_rank == 0:
                optimizer = self.configure_optimizers()  # a plain one, for the whole weights
                if "deepspeed" not in args.strategy:  # its momentum is in Lightning's file only
                    optimizer.load_state_dict(momentum)
                common.save_checkpoint(args, epoch + 1, self.model, optimizer)
                common.log_epoch(args, epoch, sums, seconds)


def main(args):
    if args.strategy in common.FORKS:
        common.fail(f"--strategy {args.strategy} trains in other processes than this: use ddp")
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
    model = Classifier(args)
    try:
        trainer.fit(model, ckpt_path=path if state else None)
    except RuntimeError as error:
        ends = ("Timed out waiting", "by peer")  # by peer: a rank that waited as long has left
        if args.deadlock and trainer.is_global_zero and any(end in str(error) for end in ends):
            common.fail(f"rank 0 waited in self.log, for ranks that do not call it: {error}")
        raise
    if trainer.is_global_zero:
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        for name in ("rank_zero_only", "sync_dist", "sync_dist_group"):
            print(f"{name:15} {found[name]:.4%}")
        correct, tested = found["correct"], found["tested"]
        print(f"{'sums':15} {correct / tested:.4%}, {correct:.0f} of {tested:.0f}")
        steps = trainer.global_step - model.first_step
        plain, synced = (model.log_seconds / steps * 1000).tolist()
        text = f"a step is {plain:.3f} ms in self.log, with sync_dist {synced:.3f} ms"
        print(f"{text}, the wait for the slowest rank included", flush=True)


if __name__ == "__main__":
    # torchrun or srun may have started the processes: then there are as many as there are.
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    devices = int(started or common.gpu_count() or 2)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    options = {"devices": devices, "num_nodes": nodes, "strategy": "ddp", "precision": "32-true"}
    options |= {"deadlock": 0}
    main(common.parse_args("lightning", **options))
