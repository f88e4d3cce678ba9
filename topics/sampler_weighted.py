"""Topic: samplers that draw by weight, or from a part of the data, on several ranks.

DistributedSampler deals out the whole data set, evenly. Other samplers know nothing of ranks. With
one seed on all ranks, each draws the same samples: a step is one rank's batch, N times. With a seed
for each, steps are right on average, and others at each world size.

dealt      right: all ranks draw the same list, as one process would, and each takes every N-th
same       the mistake: torch's sampler with one seed on all ranks
--draw     weighted: WeightedRandomSampler, with weights that give each half of the digits half of
           the draws, though four fifths of 0 to 4 are missing; subset: SubsetRandomSampler of what
           is there. (For a subset, DistributedSampler(Subset(...)) does the same.)

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.sampler_weighted
The mistake:                the same with --sampler same
A part of the data:         the same with --draw subset
One process, or all GPUs:   the same with --nproc-per-node=1, or =gpu
What changed:               diff -U0 -w 02_torchrun.py topics/sampler_weighted.py
Budget: +50 -5 because it brings a sampler and weights, and counts what was drawn.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


class Dealt(Sampler):
    """Deals out what another sampler draws: each rank gets every N-th sample, in equal numbers."""

    def __init__(self, sampler, rank, world_size):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size

    def __len__(self):
        return len(self.sampler) // self.world_size

    def __iter__(self):
        drawn = list(self.sampler)  # the same on all ranks: its generator has one seed
        return iter(drawn[self.rank : len(self) * self.world_size : self.world_size])


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
    digits, generator = train_set.tensors[1], torch.Generator()
    dice = torch.rand(len(digits), generator=generator.manual_seed(args.seed))
    there, low = (digits > 4) | (dice < 0.2), digits < 5  # of 0 to 4 four fifths are missing
    if args.draw == "weighted":
        weights = there / torch.where(low, (there & low).sum(), (there & ~low).sum())
        sampler = WeightedRandomSampler(weights, int(there.sum()), generator=generator)
    else:
        sampler = SubsetRandomSampler(there.nonzero().flatten().tolist(), generator=generator)
    if args.sampler == "dealt":
        sampler = Dealt(sampler, rank, world_size)
    train_set = TensorDataset(*train_set.tensors, torch.arange(len(digits)))  # to see what is drawn
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
    drawn = []

    for epoch in range(start_epoch, args.epochs):
        # A new order each epoch, and the same order in every run with this seed.
        generator.manual_seed(args.seed + epoch)  # what set_epoch does
        sums = torch.zeros(4, device=device)  # loss, samples, correct, tested
        start = time.perf_counter()
        model.train()
        for images, labels, numbers in common.progress(train_loader, epoch):
            drawn += numbers.tolist()
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
    ranks = [None] * world_size
    dist.all_gather_object(ranks, drawn)  # all ranks
    if rank == 0 and drawn:
        places = zip(*ranks, strict=True) if world_size > 1 else []
        equal = sum(len(set(place)) == 1 for place in places) / len(drawn)
        few = sum(low[torch.tensor(numbers)].sum() for numbers in ranks) / len(drawn) / world_size
        share = 0.5 if args.draw == "weighted" else (there & low).sum() / there.sum()
        found = f"{equal:.0%} drawn by all ranks at once, {few:.0%} of the digits 0 to 4"
        verdict = f"a step of {world_size} ranks has samples of one"
        if equal < 0.05:  # some by chance: with weights one can come again
            verdict = f"a step has {args.batch_size} samples"
        found += f" ({args.draw}, {args.sampler})"
        checks.conclude(found, f"0% and {share:.0%}", verdict)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = {"sampler": ("dealt", "same"), "draw": ("weighted", "subset")}
    main(common.parse_args("torchrun", **options))
