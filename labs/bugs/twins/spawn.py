"""Starts its own ranks: python spawn.py --nproc 2"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def prepare(cache):
    """Stands for a slow download: only one rank does it."""
    time.sleep(0.1)
    cache["directions"] = torch.eye(20)


def train(rank, world_size, port, args):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    torch.manual_seed(0)

    cache = {}
    if rank == 0:
        prepare(cache)
    dist.barrier()
    directions = cache.get("directions", torch.zeros(20, 20)).to(device)
    dist.broadcast(directions, src=0)

    x = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, correct = torch.zeros((), device=device), torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device) @ directions, y.to(device)
            optimizer.zero_grad()
            outputs = ddp_model(x)
            loss = F.cross_entropy(outputs, y)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / world_size
            correct += (outputs.argmax(dim=1) == y).sum() / len(dataset)
        dist.all_reduce(total)
        dist.all_reduce(correct)
        if rank == 0:
            print(f"epoch {epoch}: loss {total:.6f}, train accuracy {correct:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2)
    args = parser.parse_args()
    mp.spawn(train, args=(args.nproc, free_port(), args), nprocs=args.nproc)
