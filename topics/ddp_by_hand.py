"""Topic: what DDP does, done by hand: average the gradients after the backward pass.

DDP does two things more: it sends the gradients in buckets, and it does so while the backward pass
still computes. So this has the same numbers, and exposes the whole all-reduce.

Step: average() comes between backward and step because that is what DDP hides in backward.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.ddp_by_hand
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/ddp_by_hand.py
Budget: +22 -4 because it also shows that the replicas stay equal.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def average(tensors, world_size):
    """All ranks: replace the tensors by their means over the ranks, in one all-reduce."""
    flat = parameters_to_vector(tensors)
    dist.all_reduce(flat)
    vector_to_parameters(flat / world_size, tensors)


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
    for tensor in model.state_dict().values():  # all ranks: takes the weights of rank 0
        dist.broadcast(tensor, src=0)

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
            average([weights.grad for weights in model.parameters()], world_size)
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    flat = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(of_rank_0 := flat.clone(), src=0)
    off = (flat - of_rank_0).abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX)  # all ranks
    steps = (args.epochs - start_epoch) * len(train_loader)
    checks.conclude(
        f"{off:.1e} between the ranks' weights after {steps} all-reduces of {flat.nbytes} bytes",
        "0, one all-reduce a step",
        "averaging is all that replicas need" if off == 0 else "the replicas have drifted apart",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun"))
