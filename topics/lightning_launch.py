"""Topic: how Lightning starts ranks: the same script again, with a rank in the environment.

The first process has no rank yet. Trainer.fit starts the other processes from it, with the same
arguments and these variables: LOCAL_RANK counts, and NODE_RANK is 0 on a single node. So what
stands before fit runs in each process, and a script that cannot run twice cannot run under ddp.
Under torchrun all processes have their variables from the start, and none is another's child.

Two processes on the CPU:   python -m topics.lightning_launch --epochs 1
Started by torchrun:        torchrun --standalone --nproc-per-node=2 -m topics.lightning_launch
All GPUs:                   the same two commands; torchrun with --nproc-per-node=gpu
What changed:               diff -U0 -w 04_lightning.py topics/lightning_launch.py
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
            sums = strategy.reduce(self.sums, reduce_op="sum")  # all ranks call this
            if self.global_rank == 0:
                optimizer = self.configure_optimizers()  # a plain one, for the whole weights
                if "deepspeed" not in args.strategy:  # its momentum is in Lightning's file only
                    optimizer.load_state_dict(momentum)
                common.save_checkpoint(args, epoch + 1, self.model, optimizer)
                common.log_epoch(args, epoch, sums, seconds)


def main(args):
    names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    found = " ".join(f"{name}={os.environ.get(name, '-')}" for name in names)
    who = f"process {os.getpid()}, child of {os.getppid()}"
    print(f"{who} | {found} | {' '.join(sys.argv)}", flush=True)  # all processes
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
    trainer.fit(Classifier(args), ckpt_path=path if state else None)


if __name__ == "__main__":
    # torchrun or srun may have started the processes: then there are as many as there are.
    started = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    devices = int(started or common.gpu_count() or 2)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    options = {"devices": devices, "num_nodes": nodes, "strategy": "ddp", "precision": "32-true"}
    main(common.parse_args("lightning", **options))
