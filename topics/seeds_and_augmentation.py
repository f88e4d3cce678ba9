"""Topic: what must be equal on all ranks, and what must differ.

Equal: the sampler's seed, or ranks get the same sample twice and others never; and the weights,
which DDP takes from rank 0. Different: the random shifts of the images, and a model's dropout. With
one seed for all, each rank draws the same at the same step: --seed-per-rank 0 shows it, and nothing
warns of it.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 \
                                -m topics.seeds_and_augmentation
The mistake:                the same with --seed-per-rank 0
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/seeds_and_augmentation.py
Budget: +28 -1 because it compares draws and weights over the ranks.
"""

import hashlib
import os
import sys
import time

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


def fingerprint(model):
    """Return eight letters that are equal on two ranks only if all weights are."""
    weights = parameters_to_vector(model.parameters()).detach().cpu().numpy()
    return hashlib.sha256(weights.tobytes()).hexdigest()[:8]


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
    before = fingerprint(model)
    model = DDP(model)  # all ranks: takes the weights of rank 0
    draws = []

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        sampler.set_epoch(epoch)
        # What is drawn from here on is a rank's own, and in a resumed run what it would have been.
        torch.manual_seed(args.seed + epoch * world_size + rank * args.seed_per_rank)
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels in common.progress(train_loader, epoch):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            down, right = torch.randint(-2, 3, (2,)).tolist()  # this rank's augmentation
            images = images.roll((down, right), dims=(2, 3))
            draws.append((down, right))
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
    after = fingerprint(model)
    text = f"first shifts {draws[:4]} | weights {before}, at the end {after}"
    print(f"rank {rank} | {text}\n", end="", flush=True)
    found = [None] * world_size
    dist.all_gather_object(found, (after, draws))  # all ranks
    weights, shifts = zip(*found, strict=True)
    same = sum(len(set(step)) == 1 for step in zip(*shifts, strict=True))
    own = args.seed_per_rank and world_size > 1
    variety = "each rank draws its own" if same < len(draws) else "more ranks bring no more variety"
    checks.conclude(
        f"equal shifts on all ranks in {same} of {len(draws)} steps, models: {len(set(weights))}",
        f"{len(draws) / 25 ** (world_size - 1):.0f} by chance, and 1" if own else "all, and 1",
        variety if world_size > 1 else "one rank has no other to draw the same",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", seed_per_rank=(1, 0)))
