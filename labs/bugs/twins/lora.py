"""Adapters and a new head on a frozen network: torchrun --standalone --nproc-per-node=2 lora.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LoRA(nn.Module):
    """A frozen linear layer and a trained low-rank update of it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def pretrained():
    torch.manual_seed(7)  # stands for a download
    return Network().requires_grad_(False)


def add_lora(network):
    network.first, network.second = LoRA(network.first), LoRA(network.second)


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
    x = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)

    network = pretrained().to(device)
    add_lora(network)
    network.head = nn.Linear(48, 4)
    model = DDP(network.to(device))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3, device=device)  # loss, correct, samples
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            logits = model(x)
            loss = F.cross_entropy(logits, y)
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
