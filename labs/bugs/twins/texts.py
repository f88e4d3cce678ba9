"""Texts of unequal lengths: torchrun --standalone --nproc-per-node=2 texts.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = -100


class Texts(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 17, (size,), generator=generator)
        starts = torch.randint(0, 32, (size,), generator=generator)
        self.texts = [(s + 3 * torch.arange(n)) % 32 for s, n in zip(starts, lengths, strict=True)]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def collate(texts):
    """Return inputs and targets; a target PAD is ignored."""
    inputs = nn.utils.rnn.pad_sequence([t[:-1] for t in texts], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([t[1:] for t in texts], True, PAD)
    return inputs, targets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="texts of all ranks together")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = Texts(128, seed=1)
    sampler = DistributedSampler(dataset, drop_last=True)
    options = {"sampler": sampler, "drop_last": True, "collate_fn": collate}
    loader = DataLoader(dataset, args.batch_size // world_size, **options)
    model = nn.Sequential(nn.Embedding(32, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 32))
    model = DDP(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # loss, tokens
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            logits = model(inputs).flatten(0, 1)
            summed = F.cross_entropy(logits, targets.flatten(), reduction="sum")
            tokens = (targets != PAD).sum()
            all_tokens = tokens.clone()
            dist.all_reduce(all_tokens)
            # DDP takes the mean over the ranks, but the loss is a mean over all tokens.
            loss = summed * world_size / all_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([summed.detach(), tokens.float()])
        dist.all_reduce(total)
        if rank == 0:
            loss = total[0] / total[1]
            print(f"epoch {epoch}: loss {loss:.6f}, perplexity {loss.exp():.4f}")

    # The losses of single tokens, from all ranks: each has another number of them.
    with torch.no_grad():
        inputs, targets = collate([dataset[i] for i in list(sampler)[:4]])
        logits = model.module(inputs.to(device)).flatten(0, 1)
        losses = F.cross_entropy(logits, targets.to(device).flatten(), reduction="none")
    losses = losses[losses > 0]
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(losses)], device=device))
    longest = int(max(sizes))
    gathered = [torch.zeros(longest, device=device) for _ in range(world_size)]
    dist.all_gather(gathered, F.pad(losses, (0, longest - len(losses))))
    if rank == 0:
        worst = max(part[:size].max().item() for part, size in zip(gathered, sizes, strict=True))
        print(f"highest loss of a token: {worst:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
