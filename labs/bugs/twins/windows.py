"""Batches of random windows: torchrun --standalone --nproc-per-node=2 windows.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batch(tokens, size, block):
    """Return windows that begin at random places, and the same one token later."""
    starts = torch.randint(len(tokens) - block, (size,)).tolist()
    x = torch.stack([tokens[i : i + block] for i in starts])
    y = torch.stack([tokens[i + 1 : i + 1 + block] for i in starts])
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--checkpoint", help="save to this file each 4 steps, go on from it")
    parser.add_argument("--max-steps", type=int, help="stop after that many, as a time limit does")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337 + rank)  # each rank its own windows; DDP sends the weights of rank 0
    tokens = torch.randint(16, (4000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 32
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-2)
    step = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DDP(model)

    while step < args.steps:
        if step % 5 == 0 and rank == 0:
            with torch.no_grad():
                x, y = batch(tokens, args.batch_size, 16)
                value = F.cross_entropy(model.module(x.to(device)).mT, y.to(device))
            print(f"step {step}: rank 0's estimate {value:.6f}")
        x, y = batch(tokens, args.batch_size, 16)
        loss = F.cross_entropy(model(x.to(device)).mT, y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        step += 1
        if rank == 0:
            print(f"step {step}: loss {total / world_size:.6f}")
            if args.checkpoint and step % 4 == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, args.checkpoint)
        if step == args.max_steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
