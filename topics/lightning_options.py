"""Topic: DDP's options, accumulation and precision as Lightning spells them; which hook runs where.

--variant none        rung 04
          static      DDPStrategy(static_graph=True, gradient_as_bucket_view=True)
          bf16_hook   DDPStrategy(ddp_comm_hook=...): the gradients travel in 16 bits
          unused      a layer that no batch uses needs DDPStrategy(find_unused_parameters=True), or
                      in short strategy="ddp_find_unused_parameters_true"
          accumulate  Trainer(accumulate_grad_batches=4): it divides the loss, sends once a step
          16-mixed    Trainer(precision="16-mixed"): float16 with a GradScaler; on a CPU Lightning
                      takes bfloat16 in its place

Each process says when it is in prepare_data (once a node: to download) and in setup (all ranks).
Standalone (no diff to show): it gives options to rung 04.

Two processes on the CPU:   python -m topics.lightning_options --variant accumulate
All GPUs:                   the same command
Without Lightning:          topics/ddp_tuning.py, topics/gradient_accumulation.py
"""

import importlib
import os
import sys

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes

DDP_OPTIONS = {
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "bf16_hook": {"ddp_comm_hook": bf16_compress_hook},
    "unused": {"find_unused_parameters": True},
}
MICRO_BATCHES = 4


class Images(rung.Images):
    def prepare_data(self):  # nothing that is set here would be there on the other ranks
        print(f"rank {self.trainer.global_rank} | prepare_data\n", end="", flush=True)

    def setup(self, stage):
        print(f"rank {self.trainer.global_rank} | setup\n", end="", flush=True)
        super().setup(stage)
        self.options["batch_size"] //= self.trainer.accumulate_grad_batches


class Classifier(rung.Classifier):
    def __init__(self, args):
        super().__init__(args)
        self.passes = self.sent = 0
        if args.variant == "unused":
            self.spare = torch.nn.Linear(1, 1)

    def on_train_start(self):
        super().on_train_start()
        self.steps_before = self.trainer.global_step  # those of the checkpoint

    def on_before_backward(self, loss):
        self.passes += 1
        self.sent += self.trainer.strategy.model.require_backward_grad_sync

    def on_train_end(self):
        trainer, steps = self.trainer, self.trainer.global_step - self.steps_before
        checks.conclude(
            f"{self.passes} backward passes, {self.sent} with an all-reduce, {steps} steps, "
            f"precision {trainer.precision}",
            f"{steps * trainer.accumulate_grad_batches} passes, an all-reduce a step",
            f"{'each step has' if self.sent == steps else 'not each step has'} one all-reduce",
        )


if __name__ == "__main__":
    variants = ("none", *DDP_OPTIONS, "accumulate", "16-mixed")
    options = checks.lightning_options() | {"strategy": ("ddp",), "variant": variants}
    args = common.parse_args("lightning", **options)
    changes = {"strategy": DDPStrategy(timeout=args.timeout, **DDP_OPTIONS.get(args.variant, {}))}
    if args.variant == "16-mixed":
        changes["precision"] = args.variant
    if args.variant == "accumulate":
        if args.per_rank_batch % MICRO_BATCHES:
            checks.fail(
                f"a rank's batch of {args.per_rank_batch} does not split into 4: use another"
            )
        # Of what is left at an epoch's end, Lightning makes a step as well. 04 drops it; so here.
        whole = args.train_size // args.batch_size * MICRO_BATCHES
        changes |= {"accumulate_grad_batches": MICRO_BATCHES, "limit_train_batches": whole}
    rung.record(rung.main)(args, module=Classifier, data=Images, **changes)
