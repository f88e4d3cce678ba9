"""Warm-up, decay and an EMA: torchrun --standalone --nproc-per-node=2 schedule_ema.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def accuracy(model, dataset, device):
    x, y = dataset.tensors
    return (model(x.to(device)).argmax(dim=1) == y.to(device)).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="for the batch of one rank")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(2))
    test_set = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    network = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    model = DDP(network)
    ema = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    lr = args.lr * world_size  # linear scaling: the effective batch grows with the ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    total, warmup = args.epochs * len(loader), 4
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup))
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema.update_parameters(network)
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        if rank == 0:  # no collective in it: the plain network and its average
            rate = scheduler.get_last_lr()[0]
            both = accuracy(network, test_set, device), accuracy(ema, test_set, device)
            print(
                f"epoch {epoch}: loss {sums[0] / sums[1]:.6f}, next learning rate {rate:.6f}"
                f", accuracy {both[0]:.4f}, of the average {both[1]:.4f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
