"""Random changes of the images: torchrun --standalone --nproc-per-node=2 augment.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(4, (size,), generator=generator)
        self.images = torch.rand(size, 1, 8, 8, generator=generator)
        self.images += F.one_hot(self.labels, 64).view(size, 1, 8, 8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i].flip(1) if torch.rand(()) < 0.5 else self.images[i]
        return image + 0.1 * torch.randn_like(image), self.labels[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 + rank)  # each rank its own changes; DDP sends the weights of rank 0
    dataset = Images(192)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers)
    model = DDP(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros((), device=device)
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: loss {losses / len(loader) / world_size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
