"""Topic: torch.compile and DDP: which goes around which, where the graph is cut, and why.

inside     DDP(torch.compile(model)): torch's DDPOptimizer cuts the graph at DDP's buckets. Each
           bucket leaves while the rest of the backward pass computes; no kernel spans a cut
whole      the same with torch._dynamo.config.optimize_ddp = False: one graph, so one call hands
           over all gradients at its end, and nothing hides the all-reduces
outside    torch.compile(DDP(model)): cut at the buckets as well, and broken in DDP's own code.
           What is called behind a break is compiled where it is the user's code: nn.Sequential is
           torch's, so nothing of the small and the wide model is, and no word is said of it
once       no DDP: one graph, and one all-reduce after the whole backward pass
Cuts are counted where the backend gets the graphs: Dynamo's own counter is read before them. The
small model fits into one bucket, so only a larger one is cut. With --backend aot_eager it takes a
second to compile, and brings no speed; inductor takes longer.

Step: average() comes between backward and step because once has no DDP to do it.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.compile \
                                --order inside --backend aot_eager --model wide --epochs 1
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu --backend inductor
What changed:               diff -U0 -w 02_torchrun.py topics/compile.py
Budget: +47 -5 because it has four orders in one file, and counts.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

ORDERS = {
    "inside": "a cut at each of DDP's buckets (1 MiB, then 25 each)",
    "whole": "one graph",
    "outside": "graph breaks, and cuts at the buckets",
    "once": "one graph",
}


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
    plain, graphs = model, []  # plain is evaluated and saved: its names have no prefix

    def count_and_compile(graph, inputs):
        graphs.append(sum(x.nbytes for x in inputs if isinstance(x, torch.nn.Parameter)) / 2**20)
        return lookup_backend(args.backend)(graph, inputs)

    torch._dynamo.config.optimize_ddp = args.order != "whole"
    if args.order == "outside":
        model = torch.compile(DDP(plain), backend=count_and_compile)
    elif args.order == "once":
        model = torch.compile(plain, backend=count_and_compile)
        for tensor in plain.state_dict().values():  # all ranks: takes the weights of rank 0
            dist.broadcast(tensor, src=0)
    else:
        model = DDP(torch.compile(plain, backend=count_and_compile))

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
            if args.order == "once":
                average([weights.grad for weights in plain.parameters()], world_size)
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
    weights, breaks = sum(graphs), sum(counters["graph_break"].values())
    total = sum(part.nbytes for part in plain.parameters()) / 2**20
    therefore = "all gradients come at once, at the end of the backward pass"
    if weights < total:
        therefore = "a part of the model is not compiled"
    elif len(graphs) > 1:
        therefore = "a bucket leaves after each piece of the backward pass"
    pieces = " + ".join(f"{size:.1f}" for size in graphs)
    checks.conclude(
        f"{pieces} of {total:.1f} MiB of weights, graphs: {len(graphs)}, graph breaks: {breaks}",
        ORDERS[args.order],
        therefore,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", order=tuple(ORDERS), backend="inductor"))
