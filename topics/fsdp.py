"""Topic: FSDP2. The weights themselves are sharded, and gathered layer by layer.

A rank keeps 1/N of each layer's weights, gradients and momentum. Before a layer computes, all ranks
gather it, and afterwards they drop it. So memory falls with the number of ranks, for more traffic.
The checkpoint is a folder, FILE.shards, to which each rank writes its shard; any number of ranks
can read it. Each epoch has its own, and the last two stay, so a kill corrupts none that was whole.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.fsdp \
                                --checkpoint checkpoints/fsdp
One process resumes:        the same with --nproc-per-node=1 --epochs 6
All GPUs:                   the same with --nproc-per-node=gpu
In bfloat16:                the same with --param-dtype bfloat16
What changed:               diff -U0 -w 02_torchrun.py topics/fsdp.py
Budget: +51 -8 because a sharded model needs another checkpoint and a whole copy to evaluate.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Sequential
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    plain = common.build_model(args).to(device)  # a whole one, to evaluate
    dtype = getattr(torch, args.param_dtype)  # of the layers' inputs and gathered weights
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Each layer of a Sequential is gathered when it is its turn. The innermost goes first.
    for block in reversed([part for part in model.modules() if type(part) is Sequential]):
        for layer in block:
            if list(layer.parameters()):
                fully_shard(layer, mp_policy=policy)
    # Unlike DDP it sends no weights: they are equal because all ranks have the same seed.
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    folder = Path(f"{args.checkpoint}.shards")
    if args.checkpoint and os.path.exists(args.checkpoint):
        checks.fail(f"{args.checkpoint} is one file, and not {folder}: use another --checkpoint")
    weights, momentum = get_state_dict(model, optimizer)
    state = {"weights": weights, "optimizer": momentum, "epochs": 0}
    last = max(folder.glob("*/.metadata"), default=None)  # written last: a corrupt one has none
    if args.checkpoint and last:
        settings = dict.fromkeys(("epochs", *checks.RESUME_KEYS))
        dcp.load(settings, checkpoint_id=last.parent)  # alone: the rest may be of another model
        checks.resumable(settings, args)
        dcp.load(state, checkpoint_id=last.parent)  # all ranks: each reads its own shard
        loaded = {"model_state_dict": state["weights"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **loaded)
        optimizer.param_groups[0]["lr"] = args.lr  # not that of the first part
    start_epoch = state["epochs"]
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs

    whole = StateDictOptions(full_state_dict=True)
    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels in common.progress(train_loader, epoch):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        plain.load_state_dict(get_model_state_dict(model, options=whole))  # all ranks gather it
        for buffer in plain.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(plain, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if args.checkpoint:
            weights, momentum = get_state_dict(model, optimizer)
            state = {"weights": weights, "optimizer": momentum, "epochs": epoch + 1}
            state |= {name: getattr(args, name) for name in checks.RESUME_KEYS}
            dcp.save(state, checkpoint_id=folder / f"{epoch + 1:04}")  # every rank writes its shard
            if rank == 0:
                shutil.rmtree(folder / f"{epoch - 1:04}", ignore_errors=True)
        if rank == 0:
            common.log_epoch(args, epoch, sums, seconds)
    local = sum(part.to_local().numel() for part in model.parameters())
    total = sum(part.numel() for part in plain.parameters())
    print(f"rank {rank} | {local} of {total} weights\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", param_dtype=("float32", "bfloat16")))
