"""Gradient accumulation: torchrun --standalone --nproc-per-node=2 accumulate.py"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337)
    x = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.micro_batch // world_size, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = args.epochs * len(loader) // args.accumulate
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for micro_step, (x, y) in enumerate(loader, 1):
            x, y = x.to(device), y.to(device)
            last = micro_step % args.accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y)
                (loss / args.accumulate).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.6f}, next learning rate {rate:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
