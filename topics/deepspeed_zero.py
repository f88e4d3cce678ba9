"""Topic: DeepSpeed ZeRO. What each rank keeps of momentum, gradients and weights, stage by stage.

Stage 0 shards nothing, 1 the momentum, 2 the gradients too, 3 the weights too; the numbers stay
those of 02. From stage 1 on, a rank also steps a copy of its shard of the weights, even in fp32.
--checkpoint FILE is one that 00 to 03 read, and FILE.shards a folder beside it, from which a run of
the same stage and number of ranks resumes. Needs: pip install deepspeed
Budget: +68 -8 because sharded state is counted, gathered for test and file, and saved in shards.
Step: model.backward and model.step because that is where the engine shards and gathers.

Two processes on the CPU:   torchrun --standalone --nproc-per-node=2 -m topics.deepspeed_zero
Another stage:              the same with --stage 3
One process:                the same with --nproc-per-node=1
All GPUs:                   the same with --nproc-per-node=gpu
What changed:               diff -U0 -w 02_torchrun.py topics/deepspeed_zero.py
"""

import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

try:
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if common.gpu_count() else "cpu")
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state
except ImportError:
    checks.fail("needs deepspeed: pip install deepspeed")
# Compile no extension: the one for collectives on the CPU takes a minute, and Gloo will do.
deepspeed.ops.__compatible_ops__ = {}
# DeepSpeed calls torch.distributed by older names, thousands of times.
warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)


def count(tensors):
    """Return how many numbers these tensors have on this rank."""
    return sum(tensor.numel() for tensor in tensors if tensor is not None)


def count_gradients(model, optimizer):
    """Return a dict that will have the numbers of gradients: the most at a time, for the step."""
    kept = {"most": 0, "step": 0}

    def in_backward(_):
        kept["most"] = max(kept["most"], count(part.grad for part in model.parameters()))

    def before_step(*_):
        (group,) = optimizer.param_groups  # the engine has put its own shards there
        kept["step"] = count(part.grad for part in group["params"])

    for part in model.parameters():
        part.register_post_accumulate_grad_hook(in_backward)
    optimizer.register_step_pre_hook(before_step)
    return kept


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
    gradients = count_gradients(model, optimizer)
    plain = common.build_model(args).to(device)  # a whole one, to evaluate and to save
    momentum = torch.optim.SGD(plain.parameters(), lr=args.lr, momentum=0.9)  # its optimizer
    zero = {"stage": args.stage, "reduce_bucket_size": 10_000}  # small, as the model is
    zero |= {"stage3_param_persistence_threshold": 0}  # else small layers stay whole
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": batch}
    config |= {"zero_allow_untested_optimizer": True}  # SGD is one
    config |= {"gradient_clipping": 0.0}  # else it clips to a norm of 1
    # all ranks: takes the weights of rank 0
    model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    folder, shape = Path(f"{args.checkpoint}.shards"), f"stage{args.stage}_ranks{world_size}"
    if state:
        tag = f"{shape}_epoch{start_epoch}"
        if not (folder / tag).is_dir():
            checks.fail(f"cannot resume without {folder / tag}: use another --checkpoint")
        model.load_checkpoint(folder, tag)  # all ranks: each reads its own shard
        for group in optimizer.param_groups:
            group["lr"] = args.lr

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
            model.backward(loss)
            model.step()
            # Summed on the device: to read the loss at every step would stop the GPU each time.
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        seconds = common.seconds_since(start, device)
        with deepspeed.zero.GatheredParameters(model.parameters()):  # all ranks
            plain.load_state_dict(model.module.state_dict())
        for whole, part in zip(plain.parameters(), model.parameters(), strict=True):
            buffer = safe_get_full_optimizer_state(part, "momentum_buffer")  # all ranks
            momentum.state[whole] = optimizer.state.get(part) or {"momentum_buffer": buffer}
        for buffer in plain.buffers():  # batch norm's: evaluate what rank 0 saves
            dist.broadcast(buffer, src=0)
        sums[2:] = common.evaluate(plain, test_loader, device)
        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks
        checks.loss_is_finite(args, epoch, sums)
        if args.checkpoint:  # all ranks: each writes its own shard
            model.save_checkpoint(folder, f"{shape}_epoch{epoch + 1}")
        if rank == 0:
            common.save_checkpoint(args, epoch + 1, plain, momentum)
            common.log_epoch(args, epoch, sums, seconds)
    whole = list(model.parameters())  # in name: at stage 3 they are empty, and ds_tensor is a shard
    weights = count(whole) + count(getattr(part, "ds_tensor", None) for part in whole)
    copied = count(set(optimizer.state) - set(whole))  # what the optimizer steps
    numbers = sum(count(part.values()) for part in optimizer.state.values())
    line = f"rank {rank} | stage {args.stage} | momentum {numbers} | gradients {gradients['most']}"
    line += f", for the step {gradients['step']} | weights {weights}, copy {copied}"
    print(f"{line} | of {count(plain.parameters())}\n", end="", flush=True)
    share, split = numbers / count(plain.parameters()), args.stage and world_size
    checks.conclude(
        f"{share:.0%} of the momentum on rank 0 at stage {args.stage}",
        f"1/{split}" if split else "all of it",
        f"a rank keeps {numbers} of {count(plain.parameters())} numbers of momentum",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(common.parse_args("torchrun", stage=(2, 0, 1, 3)))
