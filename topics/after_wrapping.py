"""Topic: what DDP does not see. Change a model after DDP(model), and each rank has its own.

DDP hangs a hook on the gradient of each weight that it finds, once, when it wraps. What comes later
has no hook: each rank trains it alone, no error comes, and the loss still falls.

added      a layer more, given to the optimizer as well
replaced   a new last layer, as in fine-tuning; find_unused_parameters=True is what hides the error
unfrozen   a layer that was frozen when DDP came
cast       model.double() and back: a weight of another type gets a new gradient, without the hook
moved      model.cpu() and back, to make room on the GPU: the same (there has to be a GPU)
method     the loss through model.module, where DDP does not hear of the forward pass
grad       torch.autograd.grad, which calls no hooks of weights
--wrap late makes the change first and wraps then: one model again. The last two are no change of
the model: there the remedy is model(images) and loss.backward(), which is --variant none.

Step: the loss and its gradient go other ways because that is what two of the variants are about.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.after_wrapping \
                                --epochs 1 --variant unfrozen
The cure:                   the same with --wrap late
One process, or all GPUs:   the same with --nproc-per-node=1, or =gpu
What changed:               diff -U0 -w 02_torchrun.py topics/after_wrapping.py
Budget: +60 -5 because it has eight variants in one file, and compares the ranks.
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
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

VARIANTS = ("none", "added", "replaced", "unfrozen", "cast", "moved", "method", "grad")


def change(model, variant, device, optimizer):
    """Make the change that DDP should have seen. Ranks have one seed: new layers are equal."""
    if variant == "added":
        model.append(torch.nn.Linear(10, 10, device=device))
        optimizer.add_param_group({"params": model[-1].parameters()})
    elif variant == "replaced":
        model[-1] = torch.nn.Linear(model[-1].in_features, 10, device=device)
        optimizer.add_param_group({"params": model[-1].parameters()})
    elif variant == "unfrozen":
        model[-1].requires_grad_(True)
    elif variant == "cast":
        model.double().float()
    elif variant == "moved":
        model.cpu().to(device)


def not_equal(model):
    """All ranks: return the names of the weights that are not the same on all ranks."""
    prints = {
        name: hashlib.sha256(weight.detach().cpu().numpy().tobytes()).hexdigest()
        for name, weight in model.named_parameters()
    }
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, prints)
    return [name for name in prints if len({other[name] for other in found}) > 1]


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
    if args.variant == "unfrozen":
        model[-1].requires_grad_(False)
    if args.wrap == "late":
        change(model, args.variant, device, optimizer)
    # all ranks: takes the weights of rank 0
    model = DDP(model, find_unused_parameters=args.variant == "replaced")
    if args.wrap == "early":
        change(model.module, args.variant, device, optimizer)
    forward = model.module if args.variant == "method" else model

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
            loss = F.cross_entropy(forward(images), labels)
            if args.variant == "grad":
                weights = list(model.parameters())
                for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    weight.grad = grad
            else:
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
    names, total = not_equal(model.module), len(list(model.parameters()))
    if rank == 0:
        found = f"{len(names)} of {total} weights differ between ranks {' '.join(names)}".rstrip()
        verdict = f"{world_size} ranks train {world_size} models" if names else "it is one model"
        checks.conclude(found, "0", f"{verdict} ({args.variant}, wrapped {args.wrap})")
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", variant=VARIANTS, wrap=("early", "late"))
    if args.checkpoint:
        checks.fail("saves nothing, because there is not one model: leave out --checkpoint")
    if args.model not in ("small", "wide"):
        checks.fail("changes the last layer of --model small or wide")
    if args.variant == "moved" and not common.gpu_count():
        checks.fail("--variant moved needs a GPU to move from")
    main(args)
