"""Resumes within an epoch: torchrun --standalone --nproc-per-node=2 resume.py --checkpoint FILE"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--checkpoint", help="save to this file each --save-every, go on from it")
    parser.add_argument("--save-every", type=int, default=4, help="steps")
    parser.add_argument("--max-steps", type=int, help="stop after that many, as a time limit does")
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
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shuffle = torch.Generator().manual_seed(0)  # the same on all ranks

    epoch, batches_done, steps = 0, 0, 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch, batches_done, steps = state["epoch"], state["batches_done"], state["steps"]
        shuffle.set_state(state["shuffle"])  # of the start of this epoch
    model = DDP(model)

    while epoch < args.epochs:
        shuffle_state = shuffle.get_state()
        order = torch.randperm(len(dataset), generator=shuffle)[rank::world_size].tolist()
        batch_size = args.batch_size // world_size
        rest = Subset(dataset, order[batches_done * batch_size :])
        sums = torch.zeros(2, device=device)
        for x, y in DataLoader(rest, batch_size, drop_last=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach(), torch.ones((), device=device)])
            batches_done += 1
            steps += 1
            if args.checkpoint and steps % args.save_every == 0 and rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"epoch": epoch, "batches_done": batches_done, "steps": steps}
                torch.save(state | {"shuffle": shuffle_state}, args.checkpoint)
            if steps == args.max_steps:
                dist.destroy_process_group()
                return
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.6f} of {sums[1]:.0f} batches")
        epoch, batches_done = epoch + 1, 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
