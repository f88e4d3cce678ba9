"""Topic: torch's own debug pages: in which line does each rank wait, seen from one place?

The last rank sleeps before its first step, and the others wait for its gradients. Rank 0 starts a
small web server, and asks it for the stacks of all ranks (a browser would open the same page,
http://localhost:PORT, and find the flight recorder and a profiler there). No rank has to be
attached to, and no node visited. For a hang of your own: the two lines with debug_server.

It needs tabulate and torch.distributed.debug (tried with torch 2.14); rank 0 alone may call
stop_debug_server(). Whoever reaches the ports can read the pages. After kill -9 of rank 0 its
server stays, where Python forks it (up to 3.13) under the name of the script: here
pkill -f debug_server ends it.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.debug_server
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/debug_server.py
Budget: +50 -1 because it looks at the page itself, where you would take a browser.
"""

import contextlib
import html
import linecache
import os
import re
import sys
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

try:
    import tabulate  # noqa: F401  the pages are made with it
    from torch.distributed.debug import start_debug_server, stop_debug_server
except ImportError:
    checks.fail("needs tabulate, and a torch with torch.distributed.debug: pip install tabulate")


def stacks(port):
    """Return (line of this file, its text, innermost function) of each rank's main thread."""
    page = urllib.request.urlopen(f"http://localhost:{port}/stacks", timeout=60).read().decode()
    for text in re.findall("<pre>(.*?)</pre>", page, re.DOTALL):
        main_thread = html.unescape(text).strip().split("\n\n")[-1]
        frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
        line = next(int(line) for file, line, _ in frames if file.endswith("debug_server.py"))
        yield line, linecache.getline(__file__, line).strip(), frames[0][2]


def look(port, found):
    """Ask until two answers are equal: then it is a hang."""
    before = None
    while not found or found != before:
        before = list(found)
        time.sleep(1)
        with contextlib.suppress(OSError):  # the server may still be starting
            found[:] = stacks(port)


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
    model = DDP(model)  # all ranks: takes the weights of rank 0

    port, found = int(checks.free_port()), []
    start_debug_server(port)  # all ranks call this: each answers, rank 0 has the pages
    looker = threading.Thread(target=look, args=(port, found), daemon=True)
    if rank == 0:
        looker.start()
    if rank == world_size - 1:
        time.sleep(args.sleep)

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
    if rank == 0:
        looker.join(args.timeout.total_seconds() / 2)  # less than the others wait
        stop_debug_server()
        for other, (line, text, function) in enumerate(found):
            print(f"rank {other} | line {line}: {text} | in {function}\n", end="", flush=True)
    dist.barrier()  # all ranks: none may end while it is asked
    lines = [line for line, *_ in found]
    therefore = "no rank waits for another" if lines else "nothing was seen"
    if lines and "time.sleep" in found[-1][1] and len(set(lines)) > 1:
        therefore = "the rank that stands elsewhere is the one to look at"
    checks.conclude(
        f"stacks by one request: {len(lines)}, in lines {lines}",
        "the last rank in sleep, all others where they wait for it",
        therefore,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", sleep=8))
