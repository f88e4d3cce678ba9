"""A streamed data set: torchrun --standalone --nproc-per-node=2 iterable.py"""

import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Every worker of every rank reads each n-th sample of the shuffled stream."""

    def __init__(self, size, rank, world_size, batch_size, num_workers, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = self.x[:, :4].argmax(dim=1)
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0
        # All ranks must have equally many full batches.
        self.size = size - size % (world_size * num_workers * batch_size)

    def __iter__(self):
        worker = get_worker_info()
        shards = self.world_size * worker.num_workers
        shard = self.rank * worker.num_workers + worker.id
        order = list(range(len(self.x)))
        random.Random(self.seed + self.epoch).shuffle(order)
        for index in order[: self.size][shard::shards]:
            yield self.x[index], self.y[index]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--num-workers", type=int, default=2)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    batch_size = args.batch_size // world_size
    dataset = Stream(130, rank, world_size, batch_size, args.num_workers)
    loader = DataLoader(dataset, batch_size, num_workers=args.num_workers)
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.SiLU(), nn.Linear(32, 4)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(args.epochs):
        dataset.epoch = epoch
        sums = torch.zeros(3, device=device)  # loss, correct, samples
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach() * len(y)
            sums[1] += (logits.argmax(dim=1) == y).sum()
            sums[2] += len(y)
        dist.all_reduce(sums)
        if rank == 0:
            loss, accuracy = sums[0] / sums[2], sums[1] / sums[2]
            print(f"epoch {epoch}: loss {loss:.6f}, train accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
