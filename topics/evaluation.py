"""Topic: three ways to test on several ranks, and which of them is right.

padded     DistributedSampler repeats samples, so that all ranks have equally many: wrong count
one rank   rank 0 tests all, the others wait: right, and as slow as one process
exact      each rank tests its shard, and the *sums* are added: right, and quick
The test set here has 997 samples, so it does not divide.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.evaluation
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/evaluation.py
Budget: +22 -0 because it has all three ways and compares them.
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
    test_set = Subset(test_set, range(len(test_set))[:997])
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
        for buffer in model.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(model.module, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, model.module, optimizer)
            common.log_epoch(args, epoch, sums, seconds)

    padded = DistributedSampler(test_set, shuffle=False)
    padded_loader = DataLoader(test_set, batch, sampler=padded)
    variants = {"padded": common.evaluate(model.module, padded_loader, device)}
    variants["one rank"] = torch.zeros(2, device=device)
    if rank == 0:  # the plain model: DDP's forward may send buffers, and the others are not there
        variants["one rank"] = common.evaluate(model.module, DataLoader(test_set, batch), device)
    variants["exact"] = common.evaluate(model.module, test_loader, device)
    for variant, correct_tested in variants.items():
        dist.all_reduce(correct_tested)  # all ranks
        if rank == 0:
            correct, tested = correct_tested.tolist()
            print(f"{variant:8} {correct:.0f} of {tested:.0f} = {correct / tested:.4%}", flush=True)
    padded, exact = (int(variants[name][1]) for name in ("padded", "exact"))
    once = "count each once" if exact == len(test_set) else "do not count each once"
    checks.conclude(
        f"{padded} samples tested with padding and {exact} with exact",
        f"{len(test_set)}",
        f"padding counts {padded - len(test_set)} twice, and sums over shards {once}",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun"))
