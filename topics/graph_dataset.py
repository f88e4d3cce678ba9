"""Topic: a graph neural network on a data set of graphs, with PyTorch Geometric.

Nothing about the ranks changes. A batch is one large graph of many parts. Ranks have different
numbers of nodes in it, but the same number of graphs, and over graphs the loss is a mean. The
network is a GIN; it tells from the edges alone by which of three rules a graph has grown.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.graph_dataset
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/graph_dataset.py
Budget: +55 -9 because it brings its own data set and its own model.
Step: the forward pass takes graphs because there are no images.
"""

import os
import random
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # inside of torch_geometric
try:
    from torch_geometric.data import Data, InMemoryDataset
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GIN, global_mean_pool
except ImportError:
    checks.fail("needs torch_geometric: pip install torch_geometric")


class Grown(InMemoryDataset):
    """Graphs that grow node by node. Each new node takes two edges: how is the label.

    0: to any nodes; 1: to ends of earlier edges, so the rich get richer; 2: to one of the newest 4.
    """

    def __init__(self, graphs, seed):
        super().__init__()
        dice = random.Random(seed)  # the same graphs on all ranks
        self.data, self.slices = self.collate([self.grow(dice, i % 3) for i in range(graphs)])

    def grow(self, dice, label):
        edges = [(0, 1)]
        for new in range(2, dice.randint(10, 30)):
            for _ in range(2):
                any_of, newest = dice.randrange(new), new - dice.randint(1, min(4, new))
                edges.append((new, (any_of, dice.choice(dice.choice(edges)), newest)[label]))
        pairs = torch.tensor(edges).T
        both_ways = torch.cat([pairs, pairs.flip(0)], dim=1)
        degree = both_ways[0].bincount().clamp(max=15)  # all that a node knows of itself
        x = F.one_hot(degree, 16).float()
        return Data(x=x, edge_index=both_ways, y=torch.tensor([label]))


class Model(nn.Module):
    """Two rounds of messages between neighbours, then the mean over the nodes of each graph.

    As in build_model(): no kink, no batch norm, no dropout.
    """

    def __init__(self):
        super().__init__()
        self.gin, self.head = GIN(16, 32, num_layers=2, act="gelu"), nn.Linear(32, 3)

    def forward(self, graphs):
        nodes = self.gin(graphs.x, graphs.edge_index)
        return self.head(global_mean_pool(nodes, graphs.batch, graphs.num_graphs))


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = Grown(2000, seed=1), Grown(499, seed=2)
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    model = DDP(model)  # all ranks: takes the weights of rank 0

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for graphs in common.progress(train_loader, epoch):
            graphs = graphs.to(device, non_blocking=True)
            labels = graphs.y
            optimizer.zero_grad()
            loss = F.cross_entropy(model(graphs), labels)
            loss.backward()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, ((x, x.y) for x in test_loader), device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if start_epoch < args.epochs:
        right = sums[2] / sums[3]
        checks.conclude(
            f"{right:.0%} of {sums[3]:.0f} graphs right",
            "33% by chance",
            f"the edges alone tell {'how' if right > 0.4 else 'little of how'} a graph has grown",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun")
    if (args.dataset, args.model) != ("digits", "small"):
        checks.fail("has its own data set and model: leave out --dataset and --model")
    args.dataset, args.model = "graphs", "GIN"  # a checkpoint of another script is refused
    main(args)
