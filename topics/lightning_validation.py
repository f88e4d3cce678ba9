"""Topic: three ways to test with Lightning on several ranks, and which of them is right.

padded       Trainer.test with its own sampler: repeats samples, so that all ranks have equally many
one device   a second Trainer, of one process: right, and as slow as one process
exact        as in 04: each rank tests its shard, and the *sums* are added: right, and quick
The test set here has 997 samples, so it does not divide. Without Lightning: evaluation.py.

Two processes on the CPU:   python -m topics.lightning_validation
Three processes:            python -m topics.lightning_validation --devices 3
Started by torchrun:        torchrun --standalone --nproc-per-node=2 -m topics.lightning_validation
What changed:               diff -U0 -w 04_lightning.py topics/lightning_validation.py
Budget: +23 -2 because it needs a test step and a second Trainer.
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
        test_set = self.test_set = Subset(test_set, range(len(test_set))[:997])
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

    def test_step(self, batch, batch_index):  # its sums are exact; its samples may come twice
        images, labels = batch
        correct = (self.model(images).argmax(dim=1) == labels).sum()
        sums = {"correct": correct.float(), "tested": float(len(labels))}
        self.log_dict(sums, on_epoch=True, reduce_fx="sum", sync_dist=True)

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
            self.exact = sums[2:].tolist()
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
        use_distributed_sampler=True,  # for the test only: train_loader has a sampler of its own
        callbacks=[own] if args.checkpoint else [],
        enable_checkpointing=bool(args.checkpoint),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    model = Classifier(args)
    trainer.fit(model, ckpt_path=path if state else None)

    test_loader = DataLoader(model.test_set, 100)
    (padded,) = trainer.test(model, test_loader, verbose=False)  # all ranks
    torch.distributed.destroy_process_group()  # so that the second Trainer is alone
    if trainer.is_global_zero:
        quiet = {"logger": False, "enable_progress_bar": False}
        alone = L.Trainer(accelerator=trainer.accelerator, devices=1, **quiet)
        (one,) = alone.test(model, test_loader, verbose=False)
        ways = {"padded": padded.values(), "one device": one.values(), "exact": model.exact}
        for way, (correct, tested) in ways.items():
            print(f"{way:10} {correct:.0f} of {tested:.0f} = {correct / tested:.4%}", flush=True)


if __name__ == "__main__":
    # torchrun or srun may have started the processes: then there are as many as there are.
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    devices = int(started or common.gpu_count() or 2)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    options = {"devices": devices, "num_nodes": nodes, "strategy": "ddp", "precision": "32-true"}
    main(common.parse_args("lightning", **options))
