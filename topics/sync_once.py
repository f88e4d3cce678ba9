"""Topic: a Lightning strategy of our own: one all-reduce after the whole backward pass, no DDP.

DDP sends gradients in buckets while the backward pass computes, so torch.compile cuts the model at
their borders. This strategy leaves the model whole and averages all gradients once a step; the
idea is that of NequIP's SimpleDDPStrategy. But it hides no traffic behind computation, and buffers
(batch norm's) stay each rank's own.
Standalone (no diff to show): it is a subclass of rung 04's Classifier, and a whole strategy.

Two processes on the CPU:   python -m topics.sync_once
Cut at the buckets by DDP:  python -m topics.sync_once --strategy ddp --model wide --epochs 1
Compiled for speed:         python -m topics.sync_once --backend inductor
"""

import importlib
import os
import sys

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


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


class Classifier(rung.Classifier):
    pieces = breaks = 0

    def on_train_start(self):
        super().on_train_start()
        self.first_step = self.global_step  # of this run: it may have been resumed
        # Its forward, not the module: the weights keep their names.
        self.model.forward = torch.compile(self.model.forward, backend=self.count_and_compile)

    def count_and_compile(self, graph, inputs):
        self.pieces += self.training  # evaluation has graphs of its own
        return lookup_backend(self.args.backend)(graph, inputs)

    def on_validation_start(self):
        super().on_validation_start()
        self.breaks = sum(counters["graph_break"].values())

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if self.global_rank == 0:
            sent = getattr(self.trainer.strategy, "all_reduces", None)  # DDP does not count
            sent = f"{sent} all-reduces of gradients in " if sent else ""
            steps = f"{self.global_step - self.first_step} steps"
            print(f"{sent}{steps} | compiled pieces: {self.pieces}, graph breaks: {self.breaks}")

    def on_train_end(self):
        sent = getattr(self.trainer.strategy, "all_reduces", None)
        steps = self.global_step - self.first_step
        pieces = "in one piece" if self.pieces == 1 else f"cut into {self.pieces}"
        checks.conclude(
            (f"{sent} all-reduces of gradients, " if sent else "")
            + f"compiled pieces: {self.pieces}",
            f"{steps} and 1" if sent else "a cut at each of DDP's buckets",
            f"the model was {pieces}",
        )


if __name__ == "__main__":
    options = checks.lightning_options()
    options["strategy"] = ("sync_once", *options["strategy"])
    args = common.parse_args("lightning", **options, backend="aot_eager")
    rung.record(rung.main)(args, module=Classifier)
