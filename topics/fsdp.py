"""Topic: FSDP2. The weights themselves are sharded, and gathered layer by layer.

A rank keeps 1/N of each layer's weights, gradients and momentum. Before a layer computes, all ranks
gather it, and afterwards they drop it. So memory falls with the number of ranks, for more traffic.
No GPU ever holds the whole model: it is built of shapes alone (the meta device), sharded, and gets
memory for the shards. Rank 0 draws the weights of 02 in the memory of its host, and sends each rank
its shards. A test is a forward pass, so all ranks need equally many batches: some test one sample
once more, which does not count.
The checkpoint is a folder, FILE.shards, to which each rank writes its shard; any number of ranks
can read it. Each epoch has its own, and the last two stay, so a kill corrupts none that was whole.
With --plain FILE rank 0 makes one file of the shards on disk at the end, in its host's memory.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.fsdp \
                                --checkpoint checkpoints/fsdp
One process resumes:        the same with --nproc-per-node=1 --epochs 6
For 00 to resume from:      the same with --plain checkpoints/fsdp.pt
All GPUs:                   the same with --nproc-per-node=gpu
In bfloat16:                the same with --param-dtype bfloat16
What changed:               diff -U0 -w 02_torchrun.py topics/fsdp.py
Budget: +90 -10 because a sharded model is made, tested and saved in another way.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import BatchNorm2d, Sequential
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common


def masked(loader, own):
    """Yield the batches; the samples behind the first own ones get a label that nothing has."""
    for images, labels in loader:
        labels[max(own, 0) :] = -1
        own -= len(labels)
        yield images, labels


def put_together(folder, file):
    """Rank 0: make a file that 00 reads of the shards on disk."""
    file = os.path.realpath(file)  # the file itself, where this is a link to it
    dcp_to_torch_save(folder, half := f"{file}.tmp")
    state = torch.load(half, weights_only=True)
    numbered = state["optimizer"]["state"]  # with numbers that DCP has made strings of
    state["optimizer"]["state"] = {int(number): part for number, part in numbered.items()}
    torch.save(state, half)
    os.replace(half, file)


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
    own = len(range(rank, len(test_set), world_size))  # each sample once
    most = -(-len(test_set) // world_size)  # of any rank
    test_shard = Subset(test_set, [(rank + i * world_size) % len(test_set) for i in range(most)])
    test_loader = DataLoader(test_shard, batch, **options)

    with torch.device("meta"):
        model = common.build_model(args)  # its first layer turns bytes into floats
    dtype = getattr(torch, args.param_dtype)  # of the layers' inputs and gathered weights
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    inner = MixedPrecisionPolicy(dtype, torch.float32)
    for part in model.modules():  # batch norm adds up in float32, and so are its weights
        if isinstance(part, BatchNorm2d) and args.param_dtype != "float32":
            fully_shard(part, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    # Each layer of a Sequential is gathered when it is its turn. The innermost goes first.
    for block in reversed([part for part in model.modules() if type(part) is Sequential]):
        for layer in block:
            if list(layer.parameters()) and not isinstance(layer, FSDPModule):
                fully_shard(layer, mp_policy=inner)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)  # memory for this rank's shards
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for weight in model.parameters():  # as shards too, and before a checkpoint is read into them
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    folder = Path(f"{args.checkpoint}.shards")
    if args.checkpoint and os.path.exists(args.checkpoint):
        checks.fail(f"{args.checkpoint} is one file, and not {folder}: use another --checkpoint")
    state = {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": 0}
    last = max(folder.glob("*/.metadata"), default=None)  # written last: a corrupt one has none
    if args.checkpoint and last:
        settings = dict.fromkeys(("epochs", *checks.RESUME_KEYS))
        try:
            dcp.load(settings, checkpoint_id=last.parent)  # alone: the rest may be of another model
            checks.resumable(settings, args)
            dcp.load(state, checkpoint_id=last.parent)  # all ranks: each reads its shards, in place
        except dcp.CheckpointException as error:  # the same everywhere: it holds what each had
            why, _ = next(iter(error.failures.values()))
            text = f"cannot read {last.parent}: {why!r}. Delete it, or use another --checkpoint"
            checks.fail(text, all_ranks=True)
    else:
        whole = common.build_model(args).state_dict() if rank == 0 else {}
        send = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=send)  # tensor by tensor
        del whole
    start_epoch = state["epochs"]
    checks.same_on_all_ranks(args, start_epoch)  # all ranks: refuses different options or epochs

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
        sums[2:] = common.evaluate(model, masked(test_loader, own), device)
        sums[3] = own
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums, model)
        if args.checkpoint:
            state = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epochs": epoch + 1, "rng": torch.get_rng_state(), "cuda_rng": None}
            state |= {name: getattr(args, name) for name in checks.RESUME_KEYS}
            dcp.save(state, checkpoint_id=folder / f"{epoch + 1:04}")  # every rank writes its shard
            if rank == 0:
                shutil.rmtree(folder / f"{epoch - 1:04}", ignore_errors=True)
        if rank == 0:
            common.log_epoch(args, epoch, sums, seconds)
    if args.plain and rank == 0:
        put_together(max(folder.glob("*/.metadata")).parent, args.plain)
    momentum = [optimizer.state[weight]["momentum_buffer"] for weight in model.parameters()]
    states = [*model.parameters(), *(w.grad for w in model.parameters()), *momentum]
    local = sum(part.to_local().nbytes for part in states if part is not None) / 1e6
    total = sum(part.numel() * part.element_size() for part in states if part is not None) / 1e6
    allocated = f", {torch.cuda.memory_allocated() / 1e6:.1f} MB allocated" * (
        device.type == "cuda"
    )
    checks.conclude(
        f"{local:.2f} of {total:.2f} MB of weights, gradients and momentum on rank 0{allocated}",
        f"1/{world_size} of them",
        f"a rank keeps {local / total:.0%} of the states",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    args = common.parse_args("torchrun", param_dtype=("float32", "bfloat16"), plain="")
    if args.plain and not args.checkpoint:
        checks.fail("--plain is put together of the shards in --checkpoint: give both")
    main(args)
