"""Topic: activation checkpointing. Keep less for the backward pass, and compute it again there.

Most memory of training is what layers keep of the forward pass for the backward pass. Checkpointing
cuts the model into segments, keeps what goes into each, and runs its forward pass again when its
backward pass comes: less memory, the same numbers, and a forward pass more, a third of a step.
DDP does not notice: gradients come in the order in which they came before.

A torchvision model is cut at its blocks, ours in three. Batch norm sees each batch twice, so its
running statistics move twice a step. Before the training both ways are measured on one batch: bytes
kept when the forward pass ends, time of a step and, on GPUs, the peak memory of a step.

Step: the loop's is 02's; it stands twice more in cost() because both ways are measured there.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 \
                                -m topics.activation_checkpointing
One process:                the same with --nproc-per-node=1
All GPUs, a real model:     the same with --nproc-per-node=gpu --model resnet50 --dataset fake
                                --image-size 224 --batch-size 256
What changed:               diff -U0 -w 02_torchrun.py topics/activation_checkpointing.py
Budget: +60 -1 because most of it measures memory and time of both ways.
"""

import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def checkpoint_segments(model):
    """Keep only the inputs of the model's segments for the backward pass. Names of weights stay."""
    parts = [part for part in model[1].modules() if isinstance(part, torch.nn.Sequential)]
    blocks = [block for part in parts for block in part if len(list(block.children())) > 1]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if not blocks:
        layers, segments = list(model), 3
        model.forward = partial(checkpoint_sequential, layers, segments, use_reentrant=False)


def cost(model, images, labels, steps=5):
    """All ranks: return MB kept after a forward pass, ms of a step, peak MB (GPUs only)."""
    kept, weights = {}, {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(steps):
        F.cross_entropy(model(images), labels).backward()
    milliseconds = common.seconds_since(start, images.device) / steps * 1e3
    model.zero_grad()
    size = sum(size for address, size in kept.items() if address not in weights)
    return size / 1e6, milliseconds, torch.cuda.max_memory_allocated() / 1e6


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
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    model = DDP(model)  # all ranks: takes the weights of rank 0
    images, labels = (part.to(device) for part in next(iter(train_loader)))
    plain = cost(model, images, labels)
    checkpoint_segments(model.module)
    less = cost(model, images, labels)

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
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if rank == 0:
        share, longer = less[0] / plain[0], less[1] / plain[1]
        peak = f" (peak {plain[2]:.0f} to {less[2]:.0f} MB)" if less[2] else ""
        found = f"{plain[0]:.2f} to {less[0]:.2f} MB kept{peak}, time x {longer:.2f}"
        verdict = f"{1 - share:.0%} of the memory is free" if share < 0.9 else "it is not worth it"
        checks.conclude(found, "less, time x 1.33", verdict)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun"))
