"""Topic: batch norm on several ranks: statistics of each rank's part, or of the whole batch.

local     what DDP leaves as it is: each rank normalizes with the statistics of its own images
sync      torch's SyncBatchNorm, on GPUs only: statistics of all ranks, as one process has them
by_hand   the same in a few lines, for any device: one all-reduce forward and one backward
group     group norm: statistics of each image alone, so there is nothing to send
Running statistics are buffers, and no gradient makes them equal. Before each forward pass DDP sends
those of rank 0 to the others; after the last one the rungs do it, or each would test another model.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.sync_batchnorm \
                                --norm by_hand
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu --norm sync
What changed:               diff -U0 -w 02_torchrun.py topics/sync_batchnorm.py
Budget: +53 -1 because torch has no synced batch norm for the CPU, so it is written out.
"""

import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


class Sum(torch.autograd.Function):
    """All ranks: a sum over the ranks. Its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return Sum.forward(ctx, gradient)


class BatchNormByHand(nn.BatchNorm2d):
    """Batch norm over the batch of all ranks, which are equal parts. Tests as any other does."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)
        moments = torch.stack([images.mean((0, 2, 3)), images.square().mean((0, 2, 3))])
        mean, square = Sum.apply(moments) / dist.get_world_size()
        variance = square - mean.square()
        with torch.no_grad():
            count = images.numel() // images.shape[1] * dist.get_world_size()
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight / (variance + self.eps).sqrt()
        return images * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


NORMS = {"local": nn.BatchNorm2d, "sync": nn.BatchNorm2d, "by_hand": BatchNormByHand}
NORMS |= {"group": partial(nn.GroupNorm, 8)}


def statistics(model):
    """Return one number for all running statistics."""
    return sum(values.sum().item() for name, values in model.named_buffers() if "running" in name)


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
    if args.model == "small":  # which has none of its own: one after each convolution
        model.insert(2, NORMS[args.norm](16, device=device))
        model.insert(6, NORMS[args.norm](32, device=device))
    if args.norm == "sync":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs
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
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        found = [None] * world_size
        dist.all_gather_object(found, round(statistics(model.module), 6))  # all ranks
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)
    if start_epoch < args.epochs:
        each = "a rank tests another model" if len(set(found)) > 1 else "all ranks test one model"
        checks.conclude(
            f"running statistics that add up to {found} on the ranks",
            "different sums" if args.norm == "local" and world_size > 1 else "equal sums",
            f"{each} unless rank 0's are sent" if len(set(found)) > 1 else each,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", norm=tuple(NORMS))
    if args.norm == "sync" and not common.gpu_count():
        checks.fail("--norm sync (SyncBatchNorm) trains on GPUs only: use by_hand or group")
    if args.model != "small" and args.norm not in ("local", "sync"):
        checks.fail(f"--norm {args.norm} is for --model small: use local or sync")
    if args.model == "wide":
        checks.fail("--model wide has no batch norm: use small, or resnet18")
    main(args)
