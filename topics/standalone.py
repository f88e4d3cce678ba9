"""Topic: the whole of rung 03 in one file, to copy: your data, model, loss and metric go in EDIT.

Standalone: it needs no common.py, and below EDIT nothing knows of images. Its losses are 03's.
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 topics/standalone.py
All GPUs, save and resume:  the same with --nproc-per-node=gpu, with --checkpoint FILE
"""

import os
from argparse import ArgumentParser
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  imported later, it would keep the group alive
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# ---- EDIT: your job ------------------------------------------------------------------------------
mean_loss = nn.functional.cross_entropy  # of (outputs, targets): the mean over a batch's samples


def metric_sum(outputs, targets):  # a sum over samples can be added up over ranks, a mean cannot
    return (outputs.argmax(dim=1) == targets).sum()


def load_datasets():  # to train and to test; a sample is (inputs, targets)
    file = np.load(f"{os.path.dirname(__file__)}/../data/digits.npz")
    for part in ("train", "test"):
        images = torch.from_numpy(file[f"{part}_images"]).float()[:, None]
        yield TensorDataset(images, torch.from_numpy(file[f"{part}_labels"]).long())


def build_model():
    layers = [nn.LayerNorm((1, 28, 28), elementwise_affine=False), nn.Conv2d(1, 16, 5, padding=2)]
    layers += [nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(16, 32, 5, padding=2), nn.GELU()]
    head = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head)


# ---- end of EDIT ---------------------------------------------------------------------------------
@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch, rest = divmod(args.batch_size, world_size)
    if rest or not batch:
        raise SystemExit(f"--batch-size {args.batch_size} does not split into {world_size} shares")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=timedelta(minutes=5))  # nccl on GPUs, gloo on the CPU
    torch.manual_seed(args.seed)
    train_set, test_set = load_datasets()
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    found = rank == 0 and os.path.exists(args.checkpoint)
    state = [torch.load(args.checkpoint, "cpu", weights_only=True) if found else {"epochs": 0}]
    dist.broadcast_object_list(state)  # all ranks: they start where rank 0's file ends
    if state[0]["epochs"]:
        model.load_state_dict(state[0]["weights"])
        optimizer.load_state_dict(state[0]["optimizer"])
        optimizer.param_groups[0]["lr"] = args.lr  # not that of the first part
        torch.set_rng_state(state[0]["rng"])
    model = DDP(model)  # all ranks: takes the weights of rank 0
    for epoch in range(state[0]["epochs"], args.epochs):
        sampler.set_epoch(epoch)  # a new order each epoch
        sums = torch.zeros(4, device=device)  # loss, samples, metric, tested
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = mean_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach() * len(targets)
            sums[1] += len(targets)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        model.eval()
        for inputs, targets in test_loader:
            with torch.no_grad():
                sums[2] += metric_sum(model.module(inputs.to(device)), targets.to(device))
            sums[3] += len(targets)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        loss, metric = (sums[::2] / sums[1::2]).tolist()
        if not (loss < float("inf") and all(p.isfinite().all() for p in model.parameters())):
            raise SystemExit(f"loss {loss} (no full batch? --lr too large?): nothing is saved")
        if rank == 0 and args.checkpoint:  # under another name first: a kill leaves a whole file
            save = {"epochs": epoch + 1, "weights": model.module.state_dict()}
            save |= {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            with open(f"{os.path.realpath(args.checkpoint)}.tmp", "wb", buffering=0) as file:
                torch.save(save, file)
                os.fsync(file.fileno())  # on the disk, before it gets the name
            os.replace(file.name, file.name[:-4])  # where this is a link: the file behind it
        if rank == 0:
            print(f"epoch {epoch + 1} | train loss {loss:.4f} | test metric {metric:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"epochs": 5, "batch-size": 96, "lr": 0.05, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--checkpoint", default="", help="save here; resume where it exists")
    args = parser.parse_args()
    main(args) if os.environ.get("RANK") else parser.error("start it with torchrun --standalone")
