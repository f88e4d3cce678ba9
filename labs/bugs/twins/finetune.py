"""First the head, then all layers: torchrun --standalone --nproc-per-node=2 finetune.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--unfreeze-at", type=int, default=1, help="epoch")
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
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)

    backbone = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
    network = nn.Sequential(backbone.requires_grad_(False), nn.Linear(48, 4)).to(device)
    model = DDP(network)
    optimizer = torch.optim.SGD(network[1].parameters(), lr=0.2)

    for epoch in range(args.epochs):
        if epoch == args.unfreeze_at:
            backbone.requires_grad_(True)
            optimizer.add_param_group({"params": backbone.parameters(), "lr": 0.1})
            model = DDP(network)  # it knows what was trainable when it was made
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
