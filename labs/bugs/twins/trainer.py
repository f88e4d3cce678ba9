"""A Trainer with a snapshot: torchrun --standalone --nproc-per-node=2 trainer.py --snapshot FILE"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x, y=None):
        """Return the loss where there are labels, else the logits."""
        return self.net(x) if y is None else self.loss(x, y)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Trainer:
    def __init__(self, model, optimizer, train_set, val_set, batch_size, snapshot, device):
        self.rank, self.local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        self.device, self.snapshot, self.epochs_run = device, snapshot, 0
        self.model, self.optimizer = model.to(device), optimizer
        self.sampler = DistributedSampler(train_set, drop_last=True)
        self.train_loader = DataLoader(train_set, batch_size, sampler=self.sampler, drop_last=True)
        shard = range(self.rank, len(val_set), dist.get_world_size())
        self.val_loader = DataLoader(Subset(val_set, shard), batch_size)
        if snapshot and os.path.exists(snapshot):
            self.load()
        self.model = DDP(self.model)

    def load(self):
        state = torch.load(self.snapshot, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epochs_run = state["epochs_run"]

    def save(self, epoch):
        state = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": epoch + 1,
        }
        torch.save(state, self.snapshot)

    def run_batch(self, x, y):
        x, y = x.to(self.device), y.to(self.device)
        self.optimizer.zero_grad()
        loss = self.model(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        counts = torch.zeros(2, device=self.device)
        for x, y in self.val_loader:
            logits = self.model.module(x.to(self.device))
            counts[0] += (logits.argmax(dim=1) == y.to(self.device)).sum()
            counts[1] += len(y)
        dist.all_reduce(counts)
        return counts

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        total = 0.0
        for x, y in self.train_loader:
            total += self.run_batch(x, y)
        mean = torch.tensor(total / len(self.train_loader), device=self.device)
        dist.all_reduce(mean)
        return (mean / dist.get_world_size()).item()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            loss = self.run_epoch(epoch)
            counts = self.validate()
            if self.rank == 0:
                accuracy = f"accuracy {counts[0] / counts[1]:.4f} of {counts[1]:.0f}"
                print(f"epoch {epoch}: loss {loss:.6f}, {accuracy}")
            if self.snapshot and self.rank == 0:
                self.save(epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--snapshot", help="save to this file each epoch, go on from it")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    x = torch.randn(231, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
    generator = torch.Generator().manual_seed(42)
    train_set, val_set = random_split(dataset, [192, 39], generator)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch_size = args.batch_size // dist.get_world_size()
    trainer = Trainer(model, optimizer, train_set, val_set, batch_size, args.snapshot, device)
    trainer.train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
