"""Sharded weights: torchrun --standalone --nproc-per-node=2 fsdp2.py --save FILE"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--save", help="write the whole weights to this file at the end")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))
    torch.manual_seed(0)
    x = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

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
    if args.save:
        # All ranks: each sends its shard. Rank 0 gets the whole.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
        if rank == 0:
            torch.save(weights, args.save)
        dist.barrier()  # whoever goes on may read the file
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
