"""Topic: three ways to split a model at once, on a grid of ranks: the step towards large models.

--tensor T    groups of T ranks compute each wide layer together: a rank has 1/T of its weights, and
              all T take the same batch
--shard S     S such groups keep 1/S of every weight each, and gather a layer when it is its turn
--replicate   the rest: copies of all that, which average their gradients as DDP does
A DeviceMesh names the axes of the grid, so that each library finds its own group of ranks. Tensor
parallel goes inside one machine, because it talks in each layer; the replicas may be far apart.

The numbers are those of 02, whatever the grid. The sampler counts *data ranks*, S times the copies:
ranks of one tensor group must have the same images, so their batches are larger than the start line
says. Nothing is saved: see fsdp.py.

Four processes on the CPU:  torchrun --standalone --nproc-per-node=4 -m topics.device_mesh
Other grids:                the same with --tensor 1, or --shard 1, or both
One process:                the same with --nproc-per-node=1 --tensor 1 --shard 1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/device_mesh.py
Budget: +61 -16 because three ways to split meet here, and a sharded model is evaluated whole.
"""

import logging
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import Linear
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # none of ours writes into its output
logging.getLogger("torch.distributed.tensor").setLevel("ERROR")  # of gathers that could be quicker


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
    grid = (world_size // (args.shard * args.tensor), args.shard, args.tensor)
    mesh = init_device_mesh(device.type, grid, mesh_dim_names=("replicate", "shard", "tensor"))
    for group in mesh.get_all_groups():
        group.set_timeout(args.timeout)  # not 30 minutes
    data_ranks, data_rank = world_size // args.tensor, rank // args.tensor
    share = {"num_replicas": data_ranks, "rank": data_rank}
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True, **share)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.batch_size // data_ranks
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    plain = common.build_model(args).to(device)  # a whole one, to evaluate
    checks.same_on_all_ranks(args, 0)  # all ranks: refuses different options or epochs
    # The first layer of a pair makes columns, which the second adds up: no talk between them.
    first, second = [name for name, part in model.named_children() if type(part) is Linear][-2:]
    plan = {first: ColwiseParallel(), second: RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    # Unlike DDP it sends no weights: they are equal because all ranks have the same seed.
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
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
        whole = StateDictOptions(full_state_dict=True)
        plain.load_state_dict(get_model_state_dict(model, options=whole))  # all ranks gather it
        sums[2:] = common.evaluate(plain, test_loader, device)
        sums[:2] /= args.tensor  # each sample was seen by all ranks of a tensor group
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.log_epoch(args, epoch, sums, seconds)
    kept = torch.tensor(sum(part.to_local().numel() for part in model.parameters()), device=device)
    dist.all_reduce(kept)
    if rank == 0:
        sizes = {name: weight.numel() for name, weight in plain.named_parameters()}
        split = sum(
            sizes[name] for name in (f"{first}.weight", f"{first}.bias", f"{second}.weight")
        )
        wanted = grid[0] * (split + (sum(sizes.values()) - split) * args.tensor)
        ways = " x ".join(map(str, grid))
        found = f"{kept} weights on all {ways} ranks, batches of {batch}"
        verdict = f"a rank keeps {kept / world_size / sum(sizes.values()):.0%} of the model"
        checks.conclude(found, f"{wanted}", verdict)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", shard=2, tensor=2)
    if args.checkpoint:
        checks.fail("saves nothing: leave out --checkpoint, and see topics/fsdp.py")
    if args.model not in ("small", "wide"):
        checks.fail("splits the linear layers of --model small or wide")
    if min(args.shard, args.tensor) < 1 or args.world_size % (args.shard * args.tensor):
        checks.fail(
            f"{args.world_size} ranks are no grid of --shard {args.shard} x --tensor {args.tensor}"
        )
    if (64 if args.model == "small" else 4096) % args.tensor:
        checks.fail(f"--tensor {args.tensor} does not divide the layers of --model {args.model}")
    main(args)
