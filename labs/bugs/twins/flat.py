"""A flat training loop: torchrun --standalone --nproc-per-node=2 flat.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 20, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(dim=1))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)  # correct, tested
    for x, y in loader:
        counts[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        counts[1] += len(y)
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, test_set = make_dataset(192, seed=1), make_dataset(51, seed=2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    batch_size = args.batch_size // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_shard, batch_size)

    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        losses = torch.zeros(2, device=device)  # sum, samples
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses[0] += loss.detach() * len(y)
            losses[1] += len(y)
        dist.all_reduce(losses)
        counts = evaluate(model.module, test_loader, device)
        dist.all_reduce(counts)
        if rank == 0:
            loss, accuracy = losses[0] / losses[1], counts[0] / counts[1]
            print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.4f} of {counts[1]:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
