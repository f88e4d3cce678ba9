"""Batch norm and random features: torchrun --standalone --nproc-per-node=2 batchnorm.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class RandomFeatures(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("directions", torch.randn(inputs, outputs))

    def forward(self, x):
        return torch.cos(x @ self.directions)


@torch.no_grad()
def average_statistics(model):
    """All ranks: each has seen its own batches, so take the mean of the running statistics."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            for statistic in (module.running_mean, module.running_var):
                dist.all_reduce(statistic)
                statistic /= dist.get_world_size()


@torch.no_grad()
def evaluate(model, dataset, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    for x, y in DataLoader(dataset, 16):
        counts[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        counts[1] += len(y)
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # each rank its own noise; DDP sends the weights of rank 0
    x = torch.randn(243, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    train_set, test_set = Subset(dataset, range(192)), Subset(dataset, range(192, 243))
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))

    layers = [RandomFeatures(20, 64), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.GELU()]
    model = DDP(nn.Sequential(*layers, nn.Linear(32, 4)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2, device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        average_statistics(model)
        counts = evaluate(model.module, test_shard, device)
        dist.all_reduce(counts)
        if rank == 0:
            accuracy = f"accuracy {counts[0] / counts[1]:.4f} of {counts[1]:.0f}"
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.6f}, {accuracy}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
