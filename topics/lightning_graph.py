"""Topic: graphs of PyTorch Geometric under Lightning, and how often they are in memory.

Graphs and network are those of topics/graph_dataset.py, and so are the losses. A batch is a pair of
graphs and labels; then the steps of rung 04 stay as they are. An InMemoryDataset holds all graphs
in a few long tensors, which ranks share as those of topics/lightning_dataset.py: ddp_fork and
ddp_spawn hand the parent's to the ranks, under ddp each rank makes its own.
Standalone (no diff to show): it is a subclass of lightning_dataset's data module.

Shared, forked ranks:   python -m topics.lightning_graph --strategy ddp_fork
Shared, spawned ranks:  python -m topics.lightning_graph --strategy ddp_spawn
A copy in each rank:    python -m topics.lightning_graph --strategy ddp
All GPUs, or 2 on CPU:  the same three commands
More to share:          the same with --graphs 20000
"""

import os
import sys
from unittest import mock

import lightning as L

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common
from topics.lightning_dataset import CountCopies, Images, rung

# When imported, torch_geometric asks torch how it was built. To answer, torch starts CUDA, and then
# forked ranks cannot use it (https://github.com/pytorch/pytorch/issues/138453). So: no answer.
with mock.patch("torch.__config__.show", return_value=""):
    from topics.graph_dataset import Grown, Model  # it says so where PyTorch Geometric is missing
from torch_geometric.data import Batch


class Graphs(Grown):
    @property
    def tensors(self):
        """All that is shared and counted: nodes, edges and labels, and where each graph begins."""
        return [*self._data.to_dict().values(), *self.slices.values()]  # .data would warn


def graphs_and_labels(graphs):
    batch = Batch.from_data_list(graphs)  # what PyTorch Geometric's own DataLoader does
    return batch, batch.y


class GraphData(Images):
    # Small tensors lie among Python's objects, on pages that forked ranks do write to.
    moved = ("ddp_spawn", "ddp_fork", "ddp_notebook")

    def load(self):  # before Trainer.fit
        return Graphs(self.args.graphs, seed=1), Graphs(499, seed=2)

    def setup(self, stage):
        super().setup(stage)
        self.options["collate_fn"] = graphs_and_labels


class Classifier(rung.Classifier):
    def __init__(self, args):
        L.LightningModule.__init__(self)  # not that of 04, which makes a model for images
        self.args, self.model = args, Model()
        self.save_hyperparameters({name: getattr(args, name) for name in checks.RESUME_KEYS})


if __name__ == "__main__":
    args = common.parse_args("lightning", **checks.lightning_options(), graphs=2000)
    if (args.dataset, args.model) != ("digits", "small"):
        checks.fail("has its own data set and model: leave out --dataset and --model")
    if args.graphs < args.batch_size:
        checks.fail(f"--graphs {args.graphs} is less than --batch-size {args.batch_size}")
    args.dataset, args.model = "graphs", "GIN"  # a checkpoint of another script is refused
    rung.record(rung.main)(args, module=Classifier, data=GraphData, callbacks=[CountCopies()])
