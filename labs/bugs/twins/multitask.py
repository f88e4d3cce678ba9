"""One trunk, two heads, two losses: torchrun --standalone --nproc-per-node=2 multitask.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.classify, self.regress = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        features = self.trunk(x)
        return self.classify(features), self.regress(features).squeeze(1)


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
    torch.manual_seed(0)
    x = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1), x.norm(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)
    model = DDP(TwoHeads().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for x, label, size in loader:
            x, label, size = x.to(device), label.to(device), size.to(device)
            optimizer.zero_grad()
            logits, guess = model(x)
            loss = F.cross_entropy(logits, label) + F.mse_loss(guess, size)
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
