"""Two networks, two losses, two optimizers: torchrun --standalone --nproc-per-node=2 gan.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def bce(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


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
    dataset = TensorDataset(2 + torch.randn(192, 8, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)

    generator = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    discriminator = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(device)
    generator = DDP(generator)
    discriminator = DDP(discriminator)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    torch.manual_seed(rank)  # each rank its own noise

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3, device=device)  # loss of D, loss of G, steps
        for (real,) in loader:
            real = real.to(device)
            fake = generator(torch.randn(len(real), 4, device=device))
            loss_d = bce(discriminator(real), 1.0) + bce(discriminator(fake.detach()), 0.0)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()

            discriminator.requires_grad_(False)
            loss_g = bce(discriminator(fake), 1.0)
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            discriminator.requires_grad_(True)
            sums += torch.stack([loss_d.detach(), loss_g.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            loss_d, loss_g = (sums[:2] / sums[2]).tolist()
            print(f"epoch {epoch}: loss of D {loss_d:.6f}, of G {loss_g:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
