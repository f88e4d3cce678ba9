"""Topic: the settings of DDP, and what travels in a step: how many all-reduces, and how many bytes.

plain         what 02 does; --bucket-mb is the size at which a bucket of gradients is sent
bucket_view   gradients live in the buckets, and are not copied there
static_graph  DDP learns the order of the gradients once
find_unused   before each backward pass DDP looks for weights that get no gradient
fp16, bf16    gradients travel in 16 bits
powersgd      gradients travel as products of two thin matrices, of rank 2, after 20 plain steps
local_sgd     after 20 plain steps each rank steps alone; every 4 steps the weights are averaged
With --unused 1 the model has a layer that nothing uses. All but find_unused and static_graph then
end in the second step: "Expected to have finished reduction in the prior iteration".

The numbers of 02:          torchrun --standalone --nproc-per-node=2 02_torchrun.py \
                                --checkpoint checkpoints/02.pt
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.ddp_tuning \
                                --variant fp16 --compare checkpoints/02.pt
One process, or all GPUs:   the same with --nproc-per-node=1, or =gpu
What changed:               diff -U0 -w 02_torchrun.py topics/ddp_tuning.py
Budget: +69 -2 because it has eight variants in one file, and counts.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

VARIANTS = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    **dict.fromkeys(("fp16", "bf16", "powersgd", "local_sgd"), {}),
}
# A hook averages a bucket in the place of DDP. The default is what DDP does without one.
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
HOOKS |= {"powersgd": powerSGD_hook.powerSGD_hook}
HOOKS |= {"local_sgd": localSGD_hook.post_localSGD_hook}
sent, all_reduce = [], dist.all_reduce  # bytes of each all-reduce


def counted(tensor, *args, **options):
    sent.append(tensor.nbytes)
    return all_reduce(tensor, *args, **options)


dist.all_reduce = counted  # the hooks and the averager call it by this name


def max_divergence(model):
    """All ranks: return the largest difference between the weights of any two ranks."""
    low = parameters_to_vector(model.parameters()).detach()
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return (high - low).max().item()


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)
    other = {}
    if os.path.exists(args.compare):
        with checks.reading(args.compare):
            other = torch.load(args.compare, map_location="cpu", weights_only=True)
    if args.compare and any(other.get(name) != getattr(args, name) for name in checks.RESUME_KEYS):
        checks.fail(f"no such run in --compare {args.compare}: run 02_torchrun.py, as this one")

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
    if args.unused:
        model[0].unused = torch.nn.Linear(2, 2, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    # DDP's own 25 MB, by None, come after a small first bucket. A number would take that away.
    size_mb = None if args.bucket_mb == 25 else args.bucket_mb
    settings = VARIANTS[args.variant] | {"bucket_cap_mb": size_mb}
    model = DDP(model, **settings)  # all ranks: takes the weights of rank 0
    hook_state = None
    if args.variant == "powersgd":
        hook_state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=20)
    elif args.variant == "local_sgd":
        hook_state = localSGD_hook.PostLocalSGDState(None, None, 20, False)
        averager = PeriodicModelAverager(period=4, warmup_steps=20)
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    model.register_comm_hook(hook_state, HOOKS.get(args.variant, default_hooks.allreduce_hook))

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
        steps, calls, size = len(train_loader), len(sent), sum(sent)
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        divergence = max_divergence(model.module)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
            print(
                f"{args.variant} | a step: {seconds / steps * 1e3:.3f} ms, {calls / steps:.2f}"
                f" all-reduces, {size / steps:.0f} bytes | max weight divergence {divergence:.1e}",
                flush=True,
            )
        sent.clear()
    off = None
    if other:
        weights, compared = model.module.state_dict(), other["weights"]
        off = max((weights[name].cpu() - compared[name]).abs().max() for name in compared)
    if start_epoch < args.epochs:
        plain = sum(weight.nbytes for weight in model.parameters())
        far = f", weights {off:.1e} from 02's after {other['epochs']} epochs" if other else ""
        checks.conclude(
            f"{size / steps:.0f} bytes a step with {args.variant}{far}",
            f"{plain} with plain" + ", and no distance" * bool(other),
            f"it sends {size / steps / plain:.0%} of what plain does",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    options = {"variant": tuple(VARIANTS), "bucket_mb": 25.0, "unused": (0, 1), "compare": ""}
    main(common.parse_args("torchrun", **options))
