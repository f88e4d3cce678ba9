"""Topic: FSDP2 in Lightning: ModelParallelStrategy, which runs on GPUs and on the CPU.

Lightning makes the ranks and a device mesh. configure_model() shards the model: a rank keeps 1/N of
weights, gradients and momentum. (--strategy fsdp is FSDP1, which torch has for GPUs only.)
With --checkpoint each rank writes its shard to a folder; this script does not resume from it.
Standalone (no diff to show): it is a subclass of rung 04's Classifier.

Two processes on the CPU:   python -m topics.lightning_fsdp
More processes:             python -m topics.lightning_fsdp --devices 4
All GPUs:                   the first command
Without Lightning:          topics/fsdp.py
"""

import importlib
import os
import sys

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Sequential

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class Classifier(rung.Classifier):
    def configure_model(self):  # all ranks, before the optimizer is made
        for group in self.device_mesh.get_all_groups():
            group.set_timeout(self.args.timeout)  # not 30 minutes
        mesh = self.device_mesh["data_parallel"]
        # Each layer of a Sequential is gathered when it is its turn. The innermost goes first.
        for block in reversed([part for part in self.model.modules() if type(part) is Sequential]):
            for layer in block:
                if list(layer.parameters()) and not isinstance(layer, FSDPModule):
                    fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def on_train_end(self):
        momentum = [state["momentum_buffer"] for state in self.optimizers().state.values()]
        states = [*self.parameters(), *momentum]
        local, total = (
            sum(part.to_local().numel() for part in states),
            sum(part.numel() for part in states),
        )
        checks.conclude(
            f"{local} of {total} numbers of weights and momentum on rank 0",
            f"1/{self.trainer.world_size} of them",
            f"a rank keeps {local / total:.0%} of the states",
        )


if __name__ == "__main__":
    args = common.parse_args("lightning", **checks.lightning_options() | {"strategy": ("ddp",)})
    # Its default shards over the nodes alone, and leaves a node's ranks to tensor parallelism.
    sizes = {"data_parallel_size": args.devices * args.num_nodes, "tensor_parallel_size": 1}
    strategy = ModelParallelStrategy(**sizes, timeout=args.timeout)
    rung.record(rung.main)(args, module=Classifier, strategy=strategy)
