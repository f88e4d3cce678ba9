"""Topic: the forward pass in bfloat16 or float16, the loss scale of float16, and gradient clipping.

Weights, gradients and their all-reduce stay float32. Small gradients would be 0 in float16: so the
loss is multiplied by a scale, and a step whose gradients overflow is skipped. bfloat16 has the
range of float32 and needs no scale. Clipping is for gradients without the scale, so in this order:
scale, backward, unscale_, clip, step, update. The scale is a part of the checkpoint.

Step: autocast is around the forward pass, and backward and step go through the scaler because only
then the scale is there in backward and gone before the step. --precision fp32 has the same lines.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.mixed_precision
One process:                the same with --nproc-per-node=1
In float16, or neither:     the same with --precision fp16, or fp32
All GPUs:                   torchrun --standalone --nproc-per-node=gpu -m topics.mixed_precision \
                                --model resnet50 --dataset fake --image-size 224
What changed:               diff -U0 -w 02_torchrun.py topics/mixed_precision.py
Budget: +43 -3 because precision, scaler, its state and clipping make sense only together.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = common.take_device(rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)
    low = {"dtype": DTYPES[args.precision], "enabled": args.precision != "fp32"}

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
    # Only fp16 needs the scaler. Where it is off, it hands on what it gets.
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    if state and state["optimizer"].get("scaler"):  # all ranks; a file of 02 has none
        scaler.load_state_dict(state["optimizer"]["scaler"])
    optimizer.register_state_dict_post_hook(
        lambda _, saved: saved | {"scaler": scaler.state_dict()}
    )
    applied_steps = []  # grows with each step that is not skipped
    optimizer.register_step_post_hook(lambda *_: applied_steps.append(True))
    largest = torch.zeros((), device=device)  # norm of the gradients before clipping
    model = DDP(model)  # all ranks: takes the weights of rank 0

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
            with torch.autocast(device.type, **low):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # else the norm has the scale in it
            norm = clip_grad_norm_(model.parameters(), args.clip)
            largest = torch.maximum(largest, norm.nan_to_num(nan=0, posinf=0))
            # The gradients are means over the ranks. So all ranks skip this step, or none does.
            scaler.step(optimizer)
            scaler.update()
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
    steps, applied = (args.epochs - start_epoch) * len(train_loader), len(applied_steps)
    memory = torch.cuda.max_memory_allocated()  # of tensors; 0 on the CPU
    print(
        f"rank {rank} | {args.precision} | loss scale {scaler.get_scale()}"
        f" | {steps - applied} of {steps} steps skipped | largest gradient norm {largest:.4f}"
        f" | peak memory {memory} bytes\n",
        end="",
        flush=True,
    )
    forgiven = (
        "some at the start, while the scale is too high" if args.precision == "fp16" else "none"
    )
    checks.conclude(
        f"{steps - applied} of {steps} steps skipped with {args.precision}",
        forgiven,
        f"{'a scaler' if scaler.is_enabled() else 'no scaler'} is needed, and the scale ends at"
        f" {scaler.get_scale():g}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", precision=tuple(DTYPES), clip=1.0)
    if not args.clip > 0:
        checks.fail("--clip must be more than 0 (inf: no clipping)")
    main(args)
