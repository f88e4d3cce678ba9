"""Mixed precision and clipping: torchrun --standalone --nproc-per-node=2 amp_clip.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clip_gradients(parameters, max_norm):
    """Clip in place; return the norm before."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--max-norm", type=float, default=0.1)
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
    model = DDP(nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_gradients(model.parameters(), args.max_norm)
            scaler.step(optimizer)
            scaler.update()
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.5f}, last gradient norm {norm:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
