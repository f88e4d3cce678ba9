"""Topic: 02 with everything on that makes a step faster.

tf32           matrix products of float32 in the GPU's TensorFloat-32 units
bf16           forward in bfloat16 where that is safe; weights and gradients stay float32
channels_last  filters, and so activations, with channels innermost: the fast units read them so
autotune       cuDNN tries its algorithms in the first steps and keeps the quickest
fused          one kernel for the whole optimizer step
prefetch       a thread that sends the next batch while the device computes (topics/feeding.py)
bucket_view    gradients live in DDP's buckets, and are not copied there
static_graph   DDP learns the order of the gradients once
compile        the model as fused kernels, without DDP: one all-reduce after the backward pass. No
               way in benchmarks/compiled_ddp.py is quicker; those with DDP lose 1 to 4 % on two

Step: the model runs under autocast because that is what bf16 means; average() is for compile.
Budget: +50 -7 because each of the nine can be taken away, so that a benchmark can add them singly.

One process:                torchrun --standalone --nproc-per-node=1 -m topics.fast
Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.fast \
                                --without compile
All GPUs:                   torchrun --standalone --nproc-per-node=gpu -m topics.fast \
                                --model resnet50 --dataset fake --image-size 224
What each of them brings:   python benchmarks/ladder_of_speed.py
What changed:               diff -U0 -w 02_torchrun.py topics/fast.py
"""

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
from topics.feeding import Prefetched

PARTS = "tf32 bf16 channels_last autotune fused prefetch bucket_view static_graph compile ddp"


def average(model):
    """All ranks: replace the gradients by their means over the ranks, in one all-reduce."""
    weights = list(model.parameters())
    # As they lie in memory: to put channels_last ones into another order would take a kernel each.
    flat = torch.cat([weight.grad.as_strided([weight.numel()], [1]) for weight in weights])
    dist.all_reduce(flat, dist.ReduceOp.AVG)
    for weight, share in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.grad = share.as_strided(weight.shape, weight.stride())


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)
    on = {name: name not in args.without.split(",") for name in PARTS.split()}
    torch.set_float32_matmul_precision("high" if on["tf32"] else "highest")
    torch.backends.cudnn.conv.fp32_precision = "tf32" if on["tf32"] else "ieee"
    torch.backends.cudnn.benchmark = on["autotune"]

    train_set, test_set = common.load_datasets(args)
    options = common.loader_options(args, device)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    print(f"rank {rank} of {world_size} | {device} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True, **options)
    if on["prefetch"]:
        train_loader = Prefetched(train_set.tensors, batch, sampler, device)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    layout = torch.channels_last if on["channels_last"] else torch.contiguous_format
    model = common.build_model(args).to(device, memory_format=layout)
    momentum, fused = 0.9, on["fused"]
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=momentum, fused=fused)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
    plain = model  # what is evaluated and saved: its names have no prefix
    if on["compile"]:
        model = torch.compile(model)
        for tensor in plain.state_dict().values():  # all ranks: takes the weights of rank 0
            dist.broadcast(tensor, src=0)
    views = {"gradient_as_bucket_view": on["bucket_view"], "static_graph": on["static_graph"]}
    if on["ddp"] and not on["compile"]:
        model = DDP(model, **views)  # all ranks: takes the weights of rank 0
    spent = []  # seconds of each epoch

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
            with torch.autocast(device.type, torch.bfloat16, enabled=on["bf16"]):
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
            if on["ddp"] and on["compile"]:
                average(plain)
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        for buffer in plain.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(plain, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, plain, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
        spent.append(seconds)
    if spent:
        lost = spent[0] - spent[-1]
        checks.conclude(
            f"{spent[0]:.1f} s for the first epoch, {spent[-1]:.1f} s for the last",
            "a slow first one, where much is compiled or tried out",
            (f"{lost:.1f} s have" if lost > 0.05 else "nothing has") + " to be won back here",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", without="")
    off = set(filter(None, args.without.split(",")))
    if not off <= set(PARTS.split()):
        checks.fail(f"--without takes, between commas, names from: {PARTS}")
    if args.world_size > 1 and "ddp" in off:
        checks.fail("--without ddp is for one process: several would not average gradients")
    main(args)
