"""Topic: a Lightning strategy of our own: one all-reduce after the whole backward pass, no DDP.

DDP sends gradients in buckets while the backward pass computes, so torch.compile cuts the model at
their borders. This strategy leaves the model whole and averages all gradients once a step; the
idea is that of NequIP's SimpleDDPStrategy. But it hides no traffic behind computation, and buffers
(batch norm's) stay each rank's own.

Two processes on the CPU:   python -m topics.sync_once
Cut at the buckets by DDP:  python -m topics.sync_once --strategy ddp --model wide --epochs 1
Compiled for speed:         python -m topics.sync_once --backend inductor
What changed:               diff -U0 -w 04_lightning.py topics/sync_once.py
Budget: +43 -4 because it is a whole strategy.
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
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import common

common.set_up_lightning()  # here, not in main: what ddp_spawn starts imports this file


class SyncOnce(DDPStrategy):
    all_reduces = 0

    def configure_ddp(self):  # all ranks: start with the weights of rank 0, and wrap nothing
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def optimizer_step(self, optimizer, closure, model=None, **options):
        # Lightning calls this where the optimizer steps, not for batches that only accumulate. The
        # closure runs forward and backward. What clips the gradients comes after it.
        def closure_and_average():
            loss = closure()
            self.average([weight for weight in self.model.parameters() if weight.requires_grad])
            return loss

        return super().optimizer_step(optimizer, closure_and_average, model, **options)

    def average(self, weights):
        """All ranks: replace the gradients by their means over the ranks, in one all-reduce."""
        # A weight that one rank has not used is zero there. One that no rank has used gets no
        # gradient, as with DDP: the momentum of its last one must not move it.
        used = weights[0].new_ones(len(weights))
        for index, weight in enumerate(weights):
            if weight.grad is None:
                used[index] = 0  # one by one: for a list, a GPU would wait
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        flat = torch.cat([used, *(grad.flatten() for grad in grads)])
        dist.all_reduce(flat)
        self.all_reduces += 1
        used, *grads = flat.div_(self.world_size).split([len(weights), *map(torch.numel, weights)])
        for weight, grad, share in zip(weights, grads, used, strict=True):
            if weight.grad is not None or share > 0:
                weight.grad = grad.view_as(weight).to(weight.dtype)


StrategyRegistry.register("sync_once", SyncOnce, override=True)


class Classifier(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, common.build_model(args)
        self.pieces = 0
        # In a list, so that it is no submodule: the weights keep their names, and are there once.
        self.compiled = [torch.compile(self.model, backend=self.count_and_compile)]

    def count_and_compile(self, graph, inputs):
        self.pieces += 1
        return lookup_backend(self.args.backend)(graph, inputs)

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
        self.first_step = self.global_step  # of this run: it may have been resumed
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
        loss = F.cross_entropy(self.compiled[0](images), labels)
        self.sums[0] += loss.detach() * len(labels)
        self.sums[1] += len(labels)
        return loss

    def on_train_epoch_end(self):
        args, epoch, strategy = self.args, self.current_epoch, self.trainer.strategy
        seconds = common.seconds_since(self.start, self.device)
        pieces, breaks = self.pieces, sum(counters["graph_break"].values())
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
                sent = f"{getattr(strategy, 'all_reduces', 'uncounted')} all-reduces of gradients"
                steps = f"in {self.global_step - self.first_step} steps"
                print(f"{sent} {steps} | {pieces} compiled pieces, {breaks} graph breaks")


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
    options = {"devices": devices, "num_nodes": nodes, "strategy": "sync_once"}
    options |= {"precision": "32-true", "backend": "aot_eager"}
    main(common.parse_args("lightning", **options))
