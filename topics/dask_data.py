"""Topic: Dask feeds the ranks, from one cluster for all of them.

Every rank runs the whole script, so each that calls LocalCluster() gets a cluster of its own. Here
one rank makes it (--clusters job: rank 0; node: local rank 0 of each node; rank: all do, the
mistake), its address goes to the others, and they connect to it as clients. Dask's workers read the
data and keep it. In each epoch a rank takes its share of it, so the losses are 03's.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.dask_data
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
A cluster in each rank:     the same with --clusters rank
What changed:               diff -U0 -w 03_multinode.py topics/dask_data.py
Budget: +105 -5 because it counts schedulers, workers and bytes, and bounds each wait for Dask.
"""

import os
import socket
import sys
import time
from contextlib import contextmanager
from threading import Timer

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

try:
    import dask
    import dask.array as da
    from distributed import Client, LocalCluster, wait
    from distributed.utils import get_ip
except ImportError:
    checks.fail("needs dask: pip install dask distributed")


@contextmanager
def patience(args, done):
    """Let Dask do something; where it fails or takes too long, end the process with one line."""

    def end(why):
        try:
            checks.fail(f"Dask has not {done}: {why}")
        finally:
            os._exit(2)  # whatever the threads do: Dask's own tidying up might wait again

    # Less than the other ranks wait for this one: it knows the cause.
    seconds = 0.8 * args.timeout.total_seconds()
    timer = Timer(seconds, end, [f"no answer in {seconds:g} s"])
    timer.start()
    try:
        yield
    except Exception as error:
        end(str(error) or repr(error))
    finally:
        timer.cancel()


def read(args, rows):
    """Read these rows of the training set: images and labels. Dask's workers call this."""
    return [tensor[rows].numpy() for tensor in common.load_datasets(args)[0].tensors]


def arrays(args, shape):
    """Return the training set as Dask arrays, images of this shape and labels; nothing is read."""
    lists = [], []
    for first in range(0, args.train_size, 500):
        rows = slice(first, min(first + 500, args.train_size))
        part, n = dask.delayed(read, nout=2)(args, rows), rows.stop - rows.start
        lists[0].append(da.from_delayed(part[0], (n, *shape), np.uint8))
        lists[1].append(da.from_delayed(part[1], (n,), np.int64))
    return [da.concatenate(parts) for parts in lists]


class Share(IterableDataset):
    """What the sampler gives this rank, in its order. Each epoch gets it from Dask at once."""

    def __init__(self, args, client, sampler):
        self.args, self.client, self.sampler = args, client, sampler
        self.bytes = self.seconds = 0

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        start, order = time.perf_counter(), list(self.sampler)
        with patience(self.args, "sent the data of an epoch"):
            whole = [self.client.get_dataset(name) for name in ("images", "labels")]
            futures = self.client.compute([array[order] for array in whole])
            images, labels = self.client.gather(futures)
        self.bytes += images.nbytes + labels.nbytes
        self.seconds += time.perf_counter() - start
        return zip(images, labels, strict=True)


@record  # a rank that fails reports its traceback to torchrun
def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = common.take_device(local_rank)
    backend = dist.get_default_backend_for_device(device)  # nccl on GPUs, gloo on the CPU
    dist.init_process_group(backend, timeout=args.timeout)
    if rank == 0:
        common.print_start(args, device)
    torch.manual_seed(args.seed)

    test_set = common.load_datasets(args)[1]
    # The rank that makes this rank's cluster: itself, or another one.
    maker = {"job": 0, "node": rank - local_rank, "rank": rank}[args.clusters]
    start = time.perf_counter()
    if rank == maker:  # the address is one that all nodes reach
        host = get_ip(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        sizes = {"n_workers": args.workers, "threads_per_worker": 1}
        with patience(args, f"started {args.workers} workers and read the data"):
            cluster = LocalCluster(host=host, processes=True, dashboard_address=":0", **sizes)
            with Client(cluster) as client:
                images, labels = client.persist(arrays(args, test_set.tensors[0].shape[1:]))
                wait([images, labels])  # Dask's workers have read all of it
                client.publish_dataset(images=images, labels=labels)
    addresses = [None] * world_size
    dist.all_gather_object(addresses, cluster.scheduler_address if rank == maker else None)
    with patience(args, f"let a client connect to {addresses[maker]}"):
        client = Client(addresses[maker])  # all ranks; it makes no cluster
    ready = time.perf_counter() - start
    print(f"rank {rank} | scheduler {addresses[maker]} of rank {maker}", flush=True)
    options = common.loader_options(args, device)
    sampler = DistributedSampler(range(args.train_size), seed=args.seed, drop_last=True)
    # All ranks print, each with one write (so the newline is in the text): they share a terminal.
    where = f"local rank {local_rank} on {socket.gethostname()} | {device}"
    print(f"rank {rank} of {world_size} | {where} | {len(sampler)} samples\n", end="", flush=True)
    batch = args.per_rank_batch
    train_loader = DataLoader(Share(args, client, sampler), batch, drop_last=True, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)

    model = common.build_model(args).to(device)  # its first layer turns bytes into floats
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # Rank 0 reads its own disk and tells the others: no rank may start at another epoch.
    state = common.read_checkpoint(args) if rank == 0 else None
    state = checks.from_rank_0(state, model)  # all ranks; the weights are sent by DDP
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

    share, seen = train_loader.dataset, [None] * world_size
    crossed = share.bytes if maker < rank - local_rank else 0  # its cluster is on another node
    with patience(args, "closed a client"):
        local = client.scheduler_info()["id"], len(client.nthreads()), share.bytes, crossed
        client.close()
    dist.all_gather_object(seen, (*local, ready, share.seconds))
    if rank == 0:
        schedulers = {of_a_rank[:2] for of_a_rank in seen}
        _, _, got, over, starts, waits = zip(*seen, strict=True)
        text = f"{args.clusters}: schedulers {len(schedulers)}"
        text += f" | Dask workers {sum(workers for _, workers in schedulers)} | ranks {world_size}"
        text += f" | {sum(got) / 1e6:.2f} MB to ranks, {sum(over) / 1e6:.2f} MB between nodes"
        print(f"{text} | ready in {max(starts):.1f} s | data {max(waits):.2f} s", flush=True)
        copies = {"job": "1", "node": "1 a node", "rank": f"{world_size}, one a rank"}
        checks.conclude(
            f"Dask clusters: {len(schedulers)}, ranks: {world_size}",
            copies[args.clusters],
            f"copies of the data in Dask's workers: {len(schedulers)}",
        )
    dist.barrier()  # all ranks: nobody needs the clusters any more
    if rank == maker:
        with patience(args, "closed the cluster"):
            with Client(cluster) as client:
                client.unpublish_dataset("images")
                client.unpublish_dataset("labels")
            cluster.close()
    del model  # or its end may wait for a thread of Gloo that waits for Python's lock (torch 2.9)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("multinode", clusters=("job", "node", "rank"), workers=2)
    if args.num_workers or args.workers < 1:
        checks.fail("Dask's workers load the data: --workers 1 or more, and no --num-workers")
    main(args)
