"""Topic: a mean of means is not the mean, where ranks and micro-batches have different counts.

A loss per token is a mean over the tokens that count, and sentences differ in length. Each micro-
batch has another number of tokens, each rank too, but DDP takes the plain mean over the ranks. So a
token in short company weighs more: it trains, on another loss, and another one at each world size.

tokens   right: sums of losses, divided once by the number of tokens in the whole batch (all ranks
         add up their counts), and times the world size, because DDP will divide by that
means    the mistake: each micro-batch its own mean, each rank the mean of its micro-batches

Here a token is an image, and ignored (-100, as tokenizers mark padding) are most of the images of
digits above 4. In the first step the gradient that DDP has made is held against the gradient of the
whole batch in one piece.

Step: each backward pass is of one micro-batch because only so their counts can differ.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.mean_of_means
The mistake:                the same with --weighting means
One process, or all GPUs:   the same with --nproc-per-node=1, or =gpu
What changed:               diff -U0 -w 02_torchrun.py topics/mean_of_means.py
Budget: +48 -4 because it splits batches, and checks a gradient.
"""

import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def whole_batch_gradient(model, images, labels):
    """All ranks: return the gradient of the mean over all tokens of all ranks, in one piece."""
    parts = []
    for own in (images, labels):
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        parts.append(torch.cat(found))
    loss = F.cross_entropy(model(parts[0]), parts[1])
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


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
    labels = train_set.tensors[1]
    dice = torch.rand(len(labels), generator=torch.Generator().manual_seed(args.seed))
    labels[(labels > 4) & (dice > 0.2)] = -100  # cross_entropy leaves these out
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
    steps, off = args.accumulation_steps, None

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
            tokens = (labels != -100).sum().float()
            dist.all_reduce(tokens)  # all ranks: how many there are in the whole batch
            micro = list(zip(images.chunk(steps), labels.chunk(steps), strict=True))
            for inputs, targets in micro:
                with nullcontext() if targets is micro[-1][1] else model.no_sync():
                    total = F.cross_entropy(model(inputs), targets, reduction="sum")
                    if args.weighting == "tokens":
                        loss = total / tokens * world_size  # DDP divides by world_size
                    else:
                        loss = total / (targets != -100).sum() / len(micro)
                    loss.backward()
                    sums[0] += total.detach()
            if off is None:  # the first step
                right = whole_batch_gradient(model.module, images, labels)
                made = parameters_to_vector([weight.grad for weight in model.parameters()])
                off = ((made - right).norm() / right.norm()).item()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[1] += (labels != -100).sum()
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if rank == 0 and off is not None:
        verdict = "the whole batch is trained on" if off < 1e-4 else "it trains on another loss"
        found = f"by {args.weighting} a gradient {off:.1e} (relative) from that of the whole batch"
        checks.conclude(found, "only rounding (below 1e-4)", verdict)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", weighting=("tokens", "means"), accumulation_steps=4))
