"""The rows of the bench: a correct script (the twin), a patch that breaks it, and what to expect.

    python labs/bugs/bugs.py NAME         print the faulty script
    python labs/bugs/bugs.py --write      write the tables of the READMEs here and in labs/ again

A patch is kept as pairs (old text, new text) and made on the fly, so that a faulty script can never
lag behind its twin: it fails where the old text is not there exactly once.
"""

import csv
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
READMES = [Path(__file__).with_name("README.md"), ROOT / "labs" / "README.md"]
RESULTS = ROOT / "results" / "bugs.csv"
TOOLS = ("user", "time-out", "info", "detail", "flight", "torchrun", "checker")


@dataclass(frozen=True)
class Twin:
    args: tuple[str, ...] = ()  # {folder} is a new folder of this run
    first: tuple[str, ...] = ()  # for rows about a resume: what is added in the first run
    sharded: bool = False  # the ranks have different weights by design


@dataclass(frozen=True)
class Row:
    name: str
    group: str
    twin: str  # of this folder, or of the repo
    edits: tuple[tuple[str, str], ...]
    check: str | None  # the ID in labs/check.py that must be broken; None for a correct script
    source: str  # owner/repository and number, or course: what learners do
    sees: str
    # What really happens, which the tests hold: see test_bugs.py.
    # replicas, buffers, weights, output, files, unseen, hang, crash; same: of a correct script
    effect: str
    also: tuple[str, ...] = ()  # what is broken as well
    because: str = ""  # why that is true
    args: tuple[str, ...] = ()
    nproc: int = 2
    nodes: int = 1  # pretended
    resumes: bool = False  # it shows in a second run only


SMALL = ("--dataset=fake:96", "--image-size=8", "--epochs=2", "--batch-size=32", "--lr=0.01")
TWINS = {
    "twins/flat.py": Twin(),
    "twins/trainer.py": Twin(("--snapshot={folder}/snapshot.pt",), ("--epochs=1",)),
    "twins/iterable.py": Twin(),
    "twins/accumulate.py": Twin(),
    "twins/amp_clip.py": Twin(),
    "twins/lora.py": Twin(),
    "twins/finetune.py": Twin(),
    "twins/batchnorm.py": Twin(),
    "twins/gan.py": Twin(),
    "twins/multitask.py": Twin(),
    "twins/resume.py": Twin(("--checkpoint={folder}/checkpoint.pt",), ("--max-steps=9",)),
    "twins/spawn.py": Twin(),
    "twins/texts.py": Twin(),
    "twins/schedule_ema.py": Twin(),
    "twins/windows.py": Twin(("--checkpoint={folder}/checkpoint.pt",), ("--max-steps=9",)),
    "twins/augment.py": Twin(),
    "twins/fsdp2.py": Twin(("--save={folder}/weights.pt",), sharded=True),
    "02_torchrun.py": Twin(SMALL),
    "03_multinode.py": Twin((*SMALL, "--checkpoint={folder}/checkpoint.pt")),
    "topics/ddp_by_hand.py": Twin(SMALL),
    "topics/uneven_inputs.py": Twin(SMALL),
    "topics/logging_metrics.py": Twin(SMALL),
}

OWN = {
    "effect": "replicas",
    "also": ("gradients", "replicas"),
    "because": "each rank then applies its own gradient, so the replicas part",
}
RESUMED = {"resumes": True, "effect": "weights"}
LOADER = "    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)\n"
EVALUATION = """\
        counts = evaluate(model.module, test_loader, device)
        dist.all_reduce(counts)
        if rank == 0:
"""
NO_SYNC = """\
            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y)
                (loss / args.accumulate).backward()
"""
AFTER_STEP = "                optimizer.zero_grad()\n                scheduler.step()\n"
BN_EVALUATION = """\
        counts = evaluate(model.module, test_shard, device)
        dist.all_reduce(counts)
        if rank == 0:
"""
ADAPT = """\
    add_lora(network)
    network.head = nn.Linear(48, 4)
    model = DDP(network.to(device))
"""
PREPARED = "        prepare(cache)\n    dist.barrier()\n"

# ---- DDP bypassed --------------------------------------------------------------------------------

BYPASSED = [
    Row(
        "loss-through-module",
        "DDP bypassed",
        "02_torchrun.py",
        (
            (
                "F.cross_entropy(model(images), labels)",
                "F.cross_entropy(model.module(images), labels)",
            ),
        ),
        "wrapper",
        "jingyaogong/minimind #853",
        "It trains, the loss falls, and rank 0 saves what has learned from 1/N of the data.",
        **OWN,
    ),
    Row(
        "other-method-than-forward",
        "DDP bypassed",
        "twins/trainer.py",
        (("loss = self.model(x, y)", "loss = self.model.module.loss(x, y)"),),
        "wrapper",
        "moojink/openvla-oft #160",
        "As above: a method other than forward does not go through DDP.",
        **OWN,
    ),
    Row(
        "unwrapped-handle",
        "DDP bypassed",
        "twins/spawn.py",
        (("outputs = ddp_model(x)", "outputs = model(x)"),),
        "wrapper",
        "kohya-ss/sd-scripts #924",
        "As above: the loop goes on with the name that the model had before it was wrapped.",
        **OWN,
    ),
    Row(
        "never-wrapped",
        "DDP bypassed",
        "twins/texts.py",
        (
            ("model = DDP(model.to(device))", "model = model.to(device)"),
            ("model.module(inputs.to(device))", "model(inputs.to(device))"),
        ),
        "gradients",
        "course: the group is made, the wrap is forgotten",
        "N trainings that do not know of each other; one of them prints.",
        effect="replicas",
        also=("replicas", "wrapper"),
        because="without a wrapper nothing averages the gradients, so the replicas part",
    ),
    Row(
        "one-of-two-wrapped",
        "DDP bypassed",
        "twins/gan.py",
        (("    discriminator = DDP(discriminator)\n", ""),),
        "wrapper",
        "course: the second network of a GAN is forgotten",
        "Both losses look well; every rank has its own discriminator.",
        **OWN,
    ),
    Row(
        "autograd-grad",
        "DDP bypassed",
        "twins/flat.py",
        (
            (
                "            loss.backward()\n",
                "            weights = list(model.parameters())\n"
                "            gradients = torch.autograd.grad(loss, weights)\n"
                "            for weight, gradient in zip(weights, gradients, strict=True):\n"
                "                weight.grad = gradient\n",
            ),
        ),
        "gradients",
        "course: torch.autograd.grad, as for a gradient penalty",
        "As above: DDP hangs on backward(), and autograd.grad does not call it.",
        effect="replicas",
        also=("replicas", "wrapper"),
        because="the wrapper's hooks never fire, and with own gradients the replicas part",
    ),
    Row(
        "moved-after-wrapping",
        "DDP bypassed",
        "twins/flat.py",
        (
            (
                "    model = DDP(model)\n",
                "    model = DDP(model)\n"
                "    model.double()  # exact start values\n"
                "    model.float()\n",
            ),
        ),
        "wrapper",
        "pytorch/pytorch #104336",
        "As above: a cast or a move (.cpu(), .cuda()) after the wrap drops DDP's hooks.",
        **OWN,
    ),
    Row(
        "head-after-wrapping",
        "DDP bypassed",
        "twins/lora.py",
        (
            (
                ADAPT,
                "    add_lora(network)\n"
                "    model = DDP(network.to(device))\n"
                "    model.module.head = nn.Linear(48, 4).to(device)\n",
            ),
        ),
        "wrapper",
        "course: the head is replaced on the wrapped model",
        "It learns, but every rank has its own head, and rank 0's is saved.",
        **OWN,
    ),
    Row(
        "adapters-after-wrapping",
        "DDP bypassed",
        "twins/lora.py",
        (
            (
                ADAPT,
                "    network.head = nn.Linear(48, 4)\n"
                "    model = DDP(network.to(device))\n"
                "    add_lora(model.module)\n"
                "    model.to(device)\n",
            ),
        ),
        "wrapper",
        "hao-ai-lab/FastVideo PR #1666",
        "It learns, but every rank has its own adapters.",
        **OWN,
    ),
    Row(
        "unfrozen-after-wrapping",
        "DDP bypassed",
        "twins/finetune.py",
        (
            (
                "            model = DDP(network)"
                "  # it knows what was trainable when it was made\n",
                "",
            ),
        ),
        "wrapper",
        "Lightning-AI/pytorch-lightning #20340",
        "All is well until the backbone is unfrozen; from then on each rank trains its own.",
        **OWN,
    ),
    Row(
        "no-sync-around-forward-only",
        "DDP bypassed",
        "twins/accumulate.py",
        (
            (
                NO_SYNC,
                "            with model.no_sync():\n"
                "                loss = F.cross_entropy(model(x), y)\n"
                "            (loss / args.accumulate).backward()\n",
            ),
        ),
        "wrapper",
        "karpathy/build-nanogpt ba2554a",
        "Faster than before, and no gradient is ever exchanged.",
        **OWN,
    ),
    Row(
        "no-sync-for-ever",
        "DDP bypassed",
        "twins/accumulate.py",
        (("with nullcontext() if last else model.no_sync():", "with model.no_sync():"),),
        "wrapper",
        "course: no_sync without the last micro-batch",
        "As above.",
        **OWN,
    ),
    Row(
        "no-sync-off-by-one",
        "DDP bypassed",
        "twins/accumulate.py",
        (
            (
                "with nullcontext() if last else model.no_sync():",
                "with nullcontext() if (micro_step + 1) % args.accumulate == 0 "
                "else model.no_sync():",
            ),
        ),
        "wrapper",
        "course: the condition counts from 0, the loop from 1",
        "The gradient is exchanged one micro-batch too early: the last one stays a rank's own.",
        **OWN,
    ),
    Row(
        "unused-head",
        "DDP bypassed",
        "twins/multitask.py",
        (
            (
                "loss = F.cross_entropy(logits, label) + F.mse_loss(guess, size)",
                "loss = F.cross_entropy(logits, label)",
            ),
        ),
        "wrapper",
        "pytorch/pytorch #128949",
        "The first step is not synchronised, in silence; the second forward raises.",
        effect="crash",
        also=("gradients", "replicas", "collectives"),
        because="the bucket of the unused head never leaves: the first step takes a rank's own "
        "gradient, and DDP ends the run at the next forward",
    ),
    Row(
        "biases-forgotten",
        "DDP bypassed",
        "topics/ddp_by_hand.py",
        (
            (
                "[weights.grad for weights in model.parameters()]",
                "[weights.grad for weights in model.parameters() if weights.dim() > 1]",
            ),
        ),
        "gradients",
        "course: an all-reduce by hand that leaves some out",
        "Nearly right: the biases drift apart.",
        effect="replicas",
        also=("replicas",),
        because="what is not averaged drifts apart",
    ),
]

# ---- numbers wrong though synchronised -----------------------------------------------------------

NUMBERS = [
    Row(
        "mean-of-means",
        "numbers wrong",
        "twins/texts.py",
        (("loss = summed * world_size / all_tokens", "loss = summed / tokens"),),
        "gradients",
        "huggingface/transformers #34242",
        "A token of a short text counts more; other weights at every world size.",
        effect="weights",
    ),
    Row(
        "sum-not-mean",
        "numbers wrong",
        "topics/ddp_by_hand.py",
        (
            (
                "vector_to_parameters(flat / world_size, tensors)",
                "vector_to_parameters(flat, tensors)",
            ),
        ),
        "gradients",
        "course: an all-reduce by hand without the division",
        "N times the learning rate: it diverges at more ranks.",
        effect="weights",
        also=("learning-rate",),
        because="a gradient N times too large is a learning rate N times too large",
    ),
    Row(
        "clip-before-the-mean",
        "numbers wrong",
        "topics/ddp_by_hand.py",
        (
            (
                "            loss.backward()\n",
                "            loss.backward()\n"
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            ),
        ),
        "precision",
        "course: clipped where one rank would, before the all-reduce by hand",
        "Each rank's gradient is made smaller by another factor: a mean of other gradients.",
        effect="weights",
    ),
    Row(
        "loss-divided-by-world-size",
        "numbers wrong",
        "twins/flat.py",
        (("            loss.backward()\n", "            (loss / world_size).backward()\n"),),
        "gradients",
        "course: the mean is taken twice, since DDP has taken it",
        "It learns more slowly the more ranks there are.",
        effect="weights",
        also=("learning-rate",),
        because="a gradient N times too small is a learning rate N times too small",
    ),
    Row(
        "clip-norm-reduced-twice",
        "numbers wrong",
        "twins/amp_clip.py",
        (
            (
                "    norm = get_total_norm([p.grad for p in parameters])\n",
                "    norm = get_total_norm([p.grad for p in parameters]) ** 2\n"
                "    dist.all_reduce(norm)\n"
                "    norm = norm.sqrt()\n",
            ),
        ),
        "precision",
        "modelscope/twinkle PR #290",
        "The printed norm grows with the square root of N, and clipping bites too early.",
        effect="weights",
    ),
    Row(
        "clip-on-one-rank",
        "numbers wrong",
        "twins/amp_clip.py",
        (
            (
                "            norm = clip_gradients(model.parameters(), args.max_norm)\n",
                "            if rank == 0:\n"
                "                norm = clip_gradients(model.parameters(), args.max_norm)\n",
            ),
        ),
        "precision",
        "deepspeedai/DeepSpeed PR #1801",
        "All curves look normal, while the replicas drift apart.",
        effect="replicas",
        also=("gradients", "replicas"),
        because="the ranks apply differently scaled gradients, so the replicas part",
    ),
    Row(
        "clip-before-unscale",
        "numbers wrong",
        "twins/amp_clip.py",
        (
            (
                "            scaler.unscale_(optimizer)\n"
                "            norm = clip_gradients(model.parameters(), args.max_norm)\n",
                "            norm = clip_gradients(model.parameters(), args.max_norm)\n",
            ),
        ),
        "precision",
        "pytorch/examples #1196",
        "The norm has the loss scale in it: every step is clipped to almost nothing.",
        effect="weights",
    ),
    Row(
        "clip-each-micro-batch",
        "numbers wrong",
        "twins/accumulate.py",
        (
            ("                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n", ""),
            (
                "                (loss / args.accumulate).backward()\n",
                "                (loss / args.accumulate).backward()\n"
                "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
            ),
        ),
        "precision",
        "huggingface/accelerate #641",
        "The first micro-batches are clipped again and again, each rank's by its own norm.",
        effect="weights",
        also=("gradients", "accumulation"),
        because="clipped within the accumulation, the sum is not that of the micro-batches",
    ),
    Row(
        "accumulation-not-divided",
        "numbers wrong",
        "twins/accumulate.py",
        (("(loss / args.accumulate).backward()", "loss.backward()"),),
        "accumulation",
        "course: the sum of micro-batches is taken for their mean",
        "The gradient is k times too large, as if the learning rate were.",
        effect="weights",
        also=("learning-rate",),
        because="a gradient k times too large is a learning rate k times too large",
    ),
    Row(
        "scheduler-times-world-size",
        "numbers wrong",
        "twins/schedule_ema.py",
        (
            (
                "            scheduler.step()\n",
                "            for _ in range(world_size):\n                scheduler.step()\n",
            ),
        ),
        "scheduler",
        "huggingface/accelerate #2926",
        "The learning rate is down after 1/N of the training.",
        effect="weights",
        also=("learning-rate",),
        because="the rate at each step is another than on one rank",
    ),
    Row(
        "scheduler-each-micro-batch",
        "numbers wrong",
        "twins/accumulate.py",
        (
            (
                AFTER_STEP,
                "                optimizer.zero_grad()\n            scheduler.step()\n",
            ),
        ),
        "scheduler",
        "course: the scheduler counts batches, the optimizer steps",
        "The learning rate swings k times as fast as planned.",
        effect="weights",
        also=("learning-rate",),
        because="the rate at each step is not the planned one",
    ),
    Row(
        "scheduler-before-optimizer",
        "numbers wrong",
        "twins/schedule_ema.py",
        (
            (
                "            optimizer.step()\n            scheduler.step()\n",
                "            scheduler.step()\n            optimizer.step()\n",
            ),
        ),
        "scheduler",
        "course: the order of torch before 1.1",
        "A warning; the first value of the schedule is never used.",
        effect="weights",
    ),
    Row(
        "lr-scaled-twice",
        "numbers wrong",
        "twins/schedule_ema.py",
        (
            (
                "torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)",
                "torch.optim.SGD(model.parameters(), lr=lr * world_size, momentum=0.9)",
            ),
        ),
        "learning-rate",
        "course: the rate is scaled in two places",
        "Well with one rank, worse with two, NaN with eight.",
        effect="weights",
    ),
    Row(
        "step-skipped-on-one-rank",
        "numbers wrong",
        "twins/flat.py",
        (
            (
                "            optimizer.step()\n",
                "            if loss < 1.4:  # leave outliers out\n"
                "                optimizer.step()\n",
            ),
        ),
        "replicas",
        "course: each rank decides by its own loss whether it makes the step",
        "It goes on without an error, with other weights on each rank.",
        effect="replicas",
    ),
    Row(
        "step-on-rank-0-only",
        "numbers wrong",
        "twins/flat.py",
        (
            (
                "            optimizer.step()\n",
                "            if rank == 0:\n                optimizer.step()\n",
            ),
        ),
        "replicas",
        "course: the step is taken for something that one rank does, as printing",
        "Half of the gradient comes from weights that never learn.",
        effect="replicas",
    ),
    Row(
        "batch-not-divided",
        "numbers wrong",
        "02_torchrun.py",
        (("    batch = args.per_rank_batch\n", "    batch = args.batch_size\n"),),
        "learning-rate",
        "course: the option says effective, the loader takes it for a rank's",
        "Fewer steps an epoch, and N times the batch at the same learning rate.",
        effect="weights",
    ),
    Row(
        "loss-of-one-rank",
        "numbers wrong",
        "twins/flat.py",
        (("        dist.all_reduce(losses)\n", ""),),
        "loss",
        "course: rank 0 prints its own loss as the loss",
        "A curve of 1/N of the data, which looks noisier the more ranks there are.",
        effect="output",
    ),
    Row(
        "loss-divided-twice",
        "numbers wrong",
        "twins/flat.py",
        (("losses[0] / losses[1], counts", "losses[0] / losses[1] / world_size, counts"),),
        "loss",
        "pytorch/examples #905",
        "The printed loss is N times too small: a sum over samples needs no second division.",
        effect="output",
    ),
    Row(
        "accuracy-of-one-rank",
        "numbers wrong",
        "twins/flat.py",
        ((EVALUATION, EVALUATION.replace("        dist.all_reduce(counts)\n", "")),),
        "evaluation",
        "pytorch/examples #905",
        "The accuracy is of rank 0's share of the test set only.",
        effect="output",
        also=("loss",),
        because="it is one rank's number, printed without saying so",
    ),
]

# ---- data ----------------------------------------------------------------------------------------

DATA = [
    Row(
        "no-sampler",
        "data",
        "twins/trainer.py",
        (
            ("        self.sampler = DistributedSampler(train_set, drop_last=True)\n", ""),
            (
                "DataLoader(train_set, batch_size, sampler=self.sampler, drop_last=True)",
                "DataLoader(train_set, batch_size, shuffle=True, drop_last=True)",
            ),
            ("        self.sampler.set_epoch(epoch)\n", ""),
        ),
        "samples",
        "coqui-ai/Trainer #144",
        "All ranks read the same batches: N ranks take as long as one, and learn the same.",
        effect="weights",
    ),
    Row(
        "sampler-not-given",
        "data",
        "twins/flat.py",
        ((LOADER, LOADER.replace("sampler=sampler", "shuffle=True")),),
        "samples",
        "openspeech-team/openspeech #149",
        "As above, although there is a sampler, and set_epoch is called.",
        effect="weights",
    ),
    Row(
        "same-order-each-epoch",
        "data",
        "02_torchrun.py",
        (("        sampler.set_epoch(epoch)\n", ""),),
        "order",
        "pytorch/pytorch #31771",
        "The same batches in the same order each epoch.",
        effect="weights",
    ),
    Row(
        "stream-in-same-order",
        "data",
        "twins/iterable.py",
        (("        dataset.epoch = epoch\n", ""),),
        "order",
        "course: the epoch of a streamed data set is never set",
        "As above.",
        effect="weights",
    ),
    Row(
        "sampler-seed-by-rank",
        "data",
        "twins/flat.py",
        (
            (
                "DistributedSampler(train_set, seed=args.seed, drop_last=True)",
                "DistributedSampler(train_set, seed=args.seed + rank, drop_last=True)",
            ),
        ),
        "samples",
        "NVlabs/LongLive #71",
        "The ranks cut their shares from different permutations: some samples twice, others never.",
        effect="weights",
    ),
    Row(
        "one-seed-for-all-windows",
        "data",
        "twins/windows.py",
        (("torch.manual_seed(1337 + rank)", "torch.manual_seed(1337)"),),
        "samples",
        "karpathy/nanoGPT #22",
        "The ranks read the same windows, rank 0 a few steps apart for what it draws to print.",
        effect="weights",
    ),
    Row(
        "one-seed-for-all-changes",
        "data",
        "twins/augment.py",
        (("torch.manual_seed(0 + rank)", "torch.manual_seed(0)"),),
        "samples",
        "huggingface/transformers #37932",
        "Other samples, but flipped and changed in the same way: less variety than it seems.",
        effect="weights",
    ),
    Row(
        "shards-by-local-rank",
        "data",
        "03_multinode.py",
        (
            (
                "    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)\n",
                '    local_size = int(os.environ["LOCAL_WORLD_SIZE"])\n'
                "    which = {'num_replicas': local_size, 'rank': local_rank}\n"
                "    which |= {'seed': args.seed, 'drop_last': True}\n"
                "    sampler = DistributedSampler(train_set, **which)\n",
            ),
        ),
        "sharding",
        "vllm-project/speculators PR #619",
        "Right on one node. On two, each node trains on the same samples.",
        effect="weights",
        also=("samples",),
        because="each sample is read once a node",
        nodes=2,
    ),
    Row(
        "stream-not-sharded",
        "data",
        "twins/iterable.py",
        (
            ("shards = self.world_size * worker.num_workers", "shards = worker.num_workers"),
            ("shard = self.rank * worker.num_workers + worker.id", "shard = worker.id"),
        ),
        "samples",
        "huggingface/datasets #5360",
        "Every rank reads the whole stream.",
        effect="weights",
    ),
    Row(
        "stream-not-sharded-by-worker",
        "data",
        "twins/iterable.py",
        (
            ("shards = self.world_size * worker.num_workers", "shards = self.world_size"),
            ("shard = self.rank * worker.num_workers + worker.id", "shard = self.rank"),
        ),
        "samples",
        "huggingface/datasets #3423",
        "Each sample once for every data loader worker: an epoch is as many times longer.",
        effect="weights",
    ),
    Row(
        "split-by-rank",
        "data",
        "twins/trainer.py",
        (
            ("    torch.manual_seed(0)\n", "    torch.manual_seed(dist.get_rank())\n"),
            ("    generator = torch.Generator().manual_seed(42)\n", ""),
            ("random_split(dataset, [192, 39], generator)", "random_split(dataset, [192, 39])"),
        ),
        "samples",
        "course: a random split with a seed for each rank",
        "One rank trains on what another validates with.",
        effect="weights",
        also=("evaluation",),
        because="with other validation sets some samples are tested twice and others never",
    ),
    Row(
        "padded-evaluation",
        "data",
        "twins/flat.py",
        (
            (
                "    test_shard = Subset(test_set, range(rank, len(test_set), world_size))\n"
                "    test_loader = DataLoader(test_shard, batch_size)\n",
                "    test_sampler = DistributedSampler(test_set, shuffle=False)\n"
                "    test_loader = DataLoader(test_set, batch_size, sampler=test_sampler)\n",
            ),
        ),
        "evaluation",
        "roboflow/rf-detr #1507",
        "51 samples are counted as 52, and the accuracy changes with the number of ranks.",
        effect="output",
    ),
    Row(
        "evaluation-drops-the-tail",
        "data",
        "twins/flat.py",
        (
            (
                "DataLoader(test_shard, batch_size)",
                "DataLoader(test_shard, batch_size, drop_last=True)",
            ),
        ),
        "evaluation",
        "course: the options of the training loader are used again",
        "32 of 51 samples are tested; how many depends on the number of ranks.",
        effect="output",
    ),
    Row(
        "resume-repeats-batches",
        "data",
        "twins/resume.py",
        (("order[batches_done * batch_size :]", "order"),),
        "resume",
        "huggingface/accelerate #2016",
        "After a resume the epoch starts again: its first batches are trained twice.",
        also=("samples",),
        because="in the resumed epoch some samples are read twice",
        **RESUMED,
    ),
    Row(
        "resume-skips-batches",
        "data",
        "twins/resume.py",
        (("order[batches_done * batch_size :]", "order[batches_done * args.batch_size :]"),),
        "resume",
        "huggingface/accelerate #1451",
        "A rank skips as many samples as all ranks together have read: some are never trained.",
        also=("samples",),
        because="in the resumed epoch some samples are never read",
        **RESUMED,
    ),
    Row(
        "shuffle-state-on-one-rank",
        "data",
        "twins/resume.py",
        (
            (
                '        shuffle.set_state(state["shuffle"])',
                '        if rank == 0:\n            shuffle.set_state(state["shuffle"])',
            ),
        ),
        "resume",
        "bghira/SimpleTuner PR #2986",
        "After a resume some samples come twice and some never.",
        also=("samples",),
        because="the ranks cut their shares from different permutations",
        **RESUMED,
    ),
]

# ---- state ---------------------------------------------------------------------------------------

STATE = [
    Row(
        "all-ranks-write",
        "state",
        "twins/trainer.py",
        (
            (
                "            if self.snapshot and self.rank == 0:\n",
                "            if self.snapshot:\n",
            ),
        ),
        "writers",
        "course: the guard around the save is forgotten",
        "Mostly nothing; now and then a snapshot that cannot be read.",
        effect="files",
    ),
    Row(
        "writer-on-each-node",
        "state",
        "twins/trainer.py",
        (("if self.snapshot and self.rank == 0:", "if self.snapshot and self.local_rank == 0:"),),
        "writers",
        "NVIDIA/apex #886",
        "Right on one node. On two, both write the file on the shared disk.",
        effect="files",
        nodes=2,
    ),
    Row(
        "saved-from-wrapper",
        "state",
        "twins/trainer.py",
        (('"model": self.model.module.state_dict()', '"model": self.model.state_dict()'),),
        "checkpoint",
        "course: keys that start with module.",
        "The file does not load into the plain model, nor in the resumed run.",
        effect="files",
        also=("resume",),
        because="the script itself cannot load the file",
    ),
    Row(
        "optimizer-not-saved",
        "state",
        "twins/trainer.py",
        (
            ('            "optimizer": self.optimizer.state_dict(),\n', ""),
            ('        self.optimizer.load_state_dict(state["optimizer"])\n', ""),
        ),
        "checkpoint",
        "wenet-e2e/wenet #2619",
        "A bump in the loss after each resume: the moments start at zero.",
        also=("resume",),
        because="the resumed run has forgotten them",
        **RESUMED,
    ),
    Row(
        "optimizer-not-loaded",
        "state",
        "twins/windows.py",
        (('        optimizer.load_state_dict(state["optimizer"])\n', ""),),
        "resume",
        "course: saved, but not loaded; other samples hide what it changes",
        "A bump in the loss after each resume: the moments start at zero.",
        **RESUMED,
    ),
    Row(
        "epoch-not-saved",
        "state",
        "twins/trainer.py",
        (
            ('            "epochs_run": epoch + 1,\n', ""),
            ('        self.epochs_run = state["epochs_run"]\n', ""),
        ),
        "checkpoint",
        "lorenlugosch/end-to-end-SLU #2",
        "A resumed run starts to count at epoch 0, and trains too long.",
        also=("resume",),
        because="the resumed run repeats epochs",
        **RESUMED,
    ),
    Row(
        "epoch-repeated",
        "state",
        "twins/trainer.py",
        (('"epochs_run": epoch + 1', '"epochs_run": epoch'),),
        "resume",
        "course: the epoch that was saved is trained again",
        "One epoch too many after each resume.",
        **RESUMED,
    ),
    Row(
        "epoch-skipped",
        "state",
        "twins/trainer.py",
        (('self.epochs_run = state["epochs_run"]', 'self.epochs_run = state["epochs_run"] + 1'),),
        "resume",
        "volcengine/verl #7401",
        "After a resume an epoch is missing; the exit code is 0.",
        args=("--epochs=3",),
        **RESUMED,
    ),
    Row(
        "optimizer-loaded-on-one-rank",
        "state",
        "twins/trainer.py",
        (
            (
                '        self.optimizer.load_state_dict(state["optimizer"])\n',
                "        if self.rank == 0:\n"
                '            self.optimizer.load_state_dict(state["optimizer"])\n',
            ),
        ),
        "resume",
        "course: rank 0 loads, DDP sends the weights and nothing else",
        "After a resume the replicas drift apart: DDP sends weights, but not moments.",
        effect="replicas",
        also=("replicas",),
        because="with different moments the replicas part at the first step",
        resumes=True,
    ),
    Row(
        "weights-loaded-on-one-rank",
        "state",
        "twins/trainer.py",
        (
            (
                "        if snapshot and os.path.exists(snapshot):\n"
                "            self.load()\n"
                "        self.model = DDP(self.model)\n",
                "        self.model = DDP(self.model)\n"
                "        if snapshot and os.path.exists(snapshot):\n"
                "            self.load()\n",
            ),
            (
                '        self.model.load_state_dict(state["model"])\n',
                "        if self.rank == 0:\n"
                '            self.model.module.load_state_dict(state["model"])\n',
            ),
        ),
        "replicas",
        "course: rank 0 loads after DDP has sent the weights",
        "After a resume the other ranks average gradients of untrained weights into rank 0's.",
        effect="replicas",
        also=("resume",),
        because="the weights differ from the first resumed step on",
        resumes=True,
    ),
    Row(
        "different-start-weights",
        "state",
        "topics/ddp_by_hand.py",
        (
            ("    torch.manual_seed(args.seed)\n", "    torch.manual_seed(args.seed + rank)\n"),
            (
                "    for tensor in model.state_dict().values():"
                "  # all ranks: takes the weights of rank 0\n"
                "        dist.broadcast(tensor, src=0)\n",
                "",
            ),
        ),
        "replicas",
        "course: a seed for each rank, before the model is made",
        "The mean of gradients of different networks: it learns badly.",
        effect="replicas",
    ),
    Row(
        "optimizer-before-sharding",
        "state",
        "twins/fsdp2.py",
        (
            ("    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n", ""),
            (
                "    for layer in (model[0], model[2], model):\n",
                "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
                "    for layer in (model[0], model[2], model):\n",
            ),
        ),
        "wrapper",
        "huggingface/accelerate #2665",
        "The loss does not move: the optimizer holds the parameters of before.",
        effect="weights",
    ),
    Row(
        "statistics-of-one-rank",
        "state",
        "twins/batchnorm.py",
        (("        average_statistics(model)\n", ""),),
        "buffers",
        "open-mmlab/mmdetection PR #4582",
        "The saved model has one rank's statistics; it is not the one that was evaluated.",
        effect="buffers",
    ),
    Row(
        "broadcast-buffers-off",
        "state",
        "twins/batchnorm.py",
        (
            (
                "DDP(nn.Sequential(*layers, nn.Linear(32, 4)).to(device))",
                "DDP(nn.Sequential(*layers, nn.Linear(32, 4)).to(device), broadcast_buffers=False)",
            ),
        ),
        "buffers",
        "pytorch/pytorch #111138",
        "Random features differ by rank: the option also skips the first synchronisation.",
        effect="buffers",
    ),
]

# ---- hangs ---------------------------------------------------------------------------------------

HANGS = [
    Row(
        "reduce-on-rank-0",
        "hangs",
        "twins/flat.py",
        (
            (
                EVALUATION,
                "        counts = evaluate(model.module, test_loader, device)\n"
                "        if rank == 0:\n"
                "            dist.all_reduce(counts)\n",
            ),
        ),
        "collectives",
        "course: a collective under a rank condition",
        "It stops, or dies of a message about sizes, after the first epoch.",
        effect="crash",
    ),
    Row(
        "evaluation-through-ddp-on-rank-0",
        "hangs",
        "twins/batchnorm.py",
        (
            (
                BN_EVALUATION,
                "        if rank == 0:\n            counts = evaluate(model, test_set, device)\n",
            ),
        ),
        "collectives",
        "pytorch/pytorch #54059",
        "It stops, or dies of a closed connection, but only if the model has buffers.",
        effect="crash",
    ),
    Row(
        "state-dict-on-rank-0",
        "hangs",
        "twins/fsdp2.py",
        (
            (
                "        weights = get_model_state_dict(model, options=whole)\n"
                "        if rank == 0:\n",
                "        if rank == 0:\n"
                "            weights = get_model_state_dict(model, options=whole)\n",
            ),
        ),
        "collectives",
        "pytorch/pytorch #122903",
        "It trains to the end, and stops at the save.",
        effect="hang",
    ),
    Row(
        "early-break-on-one-rank",
        "hangs",
        "twins/trainer.py",
        (
            (
                "            total += self.run_batch(x, y)\n",
                "            loss = self.run_batch(x, y)\n"
                "            total += loss\n"
                "            if loss < 1.3:  # good enough for now\n"
                "                break\n",
            ),
        ),
        "collectives",
        "Lightning-AI/pytorch-lightning #379",
        "It stops, or dies of a message about sizes, as soon as one rank has seen enough.",
        effect="crash",
    ),
    Row(
        "uneven-batches",
        "hangs",
        "twins/iterable.py",
        (
            (
                "self.size = size - size % (world_size * num_workers * batch_size)",
                "self.size = size",
            ),
            ("        # All ranks must have equally many full batches.\n", ""),
        ),
        "collectives",
        "m2lines/Samudra PR #557",
        "It stops, or dies of a message about sizes, at the end of the first epoch.",
        effect="crash",
    ),
    Row(
        "batch-skipped-on-one-rank",
        "hangs",
        "twins/texts.py",
        (
            (
                "            all_tokens = tokens.clone()\n",
                "            if tokens < 56:  # too little to learn from\n"
                "                continue\n"
                "            all_tokens = tokens.clone()\n",
            ),
        ),
        "collectives",
        "NVIDIA-NeMo/Automodel PR #2468",
        "It stops at the first batch that one rank skips alone, or mixes up batches.",
        effect="hang",
    ),
    Row(
        "barrier-in-a-branch",
        "hangs",
        "twins/spawn.py",
        ((PREPARED, "        prepare(cache)\n        dist.barrier()\n"),),
        "collectives",
        "course: a barrier slips into if rank == 0",
        "It stops at the start.",
        effect="hang",
    ),
    Row(
        "order-of-collectives",
        "hangs",
        "twins/spawn.py",
        (
            (
                "        dist.all_reduce(total)\n        dist.all_reduce(correct)\n",
                "        if rank == 0:\n"
                "            dist.barrier()\n"
                "        dist.all_reduce(total)\n"
                "        dist.all_reduce(correct)\n"
                "        if rank != 0:\n"
                "            dist.barrier()\n",
            ),
        ),
        "collectives",
        "course: a barrier before on one rank, after on another",
        "It stops at the end of the first epoch.",
        effect="hang",
    ),
    Row(
        "gather-of-different-shapes",
        "hangs",
        "twins/texts.py",
        (
            (
                "    sizes = [torch.zeros(1, dtype=torch.long, device=device)"
                " for _ in range(world_size)]\n"
                "    dist.all_gather(sizes, torch.tensor([len(losses)], device=device))\n"
                "    longest = int(max(sizes))\n"
                "    gathered = [torch.zeros(longest, device=device) for _ in range(world_size)]\n"
                "    dist.all_gather(gathered, F.pad(losses, (0, longest - len(losses))))\n",
                "    gathered = [torch.zeros_like(losses) for _ in range(world_size)]\n"
                "    dist.all_gather(gathered, losses)\n",
            ),
            (
                "        worst = max(part[:size].max().item() "
                "for part, size in zip(gathered, sizes, strict=True))\n",
                "        worst = max(part.max().item() for part in gathered)\n",
            ),
        ),
        "collectives",
        "deepspeedai/DeepSpeed #5794",
        "It dies of a message about sizes (NCCL: it stops, or the numbers are wrong).",
        effect="crash",
    ),
]

# ---- launch --------------------------------------------------------------------------------------

LAUNCH = [
    Row(
        "fixed-port",
        "launch",
        "twins/spawn.py",
        (
            (
                "mp.spawn(train, args=(args.nproc, free_port(), args)",
                'mp.spawn(train, args=(args.nproc, "12355", args)',
            ),
        ),
        "port",
        "k2-fsa/snowfall #152",
        "The second job on the machine dies: address already in use.",
        effect="unseen",
    ),
    Row(
        "global-rank-as-device",
        "launch",
        "twins/flat.py",
        (('torch.device("cuda", local_rank)', 'torch.device("cuda", int(os.environ["RANK"]))'),),
        "devices",
        "foundation-model-stack/fms-acceleration PR #129",
        "Right on one node. On the second: invalid device ordinal. On a CPU nothing.",
        effect="unseen",
        nodes=2,
    ),
    Row(
        "group-not-destroyed",
        "launch",
        "twins/flat.py",
        (("    dist.destroy_process_group()\n", ""),),
        "teardown",
        "course: the last line is forgotten",
        "With NCCL a warning at the end, or a rank that does not end. With Gloo nothing.",
        effect="unseen",
    ),
]

# ---- correct scripts that look suspicious --------------------------------------------------------

FLAT_SAMPLER = "    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)\n"
CORRECT = [
    Row(
        "checkpointing-inside-ddp",
        "correct",
        "twins/multitask.py",
        (
            (
                "import torch.nn.functional as F\n",
                "import torch.nn.functional as F\nimport torch.utils.checkpoint\n",
            ),
            (
                "features = self.trunk(x)",
                "features = torch.utils.checkpoint.checkpoint(self.trunk, x, use_reentrant=False)",
            ),
        ),
        None,
        "pytorch/pytorch #109191",
        "Activations are computed twice; the gradients are synchronised (old torch: not).",
        effect="same",
    ),
    Row(
        "no-sync-around-backward-only",
        "correct",
        "twins/accumulate.py",
        (
            (
                NO_SYNC,
                "            loss = F.cross_entropy(model(x), y)\n"
                "            with nullcontext() if last else model.no_sync():\n"
                "                (loss / args.accumulate).backward()\n",
            ),
        ),
        None,
        "facebookresearch/ClassyVision PR #706",
        "It saves no traffic, but the numbers are right: the forward decides.",
        effect="same",
    ),
    Row(
        "loss-reduced-before-backward",
        "correct",
        "twins/multitask.py",
        (
            (
                "            loss.backward()\n",
                "            dist.all_reduce(loss)\n            loss.backward()\n",
            ),
            (
                "sums += torch.stack([loss.detach(),",
                "sums += torch.stack([loss.detach() / world_size,",
            ),
        ),
        None,
        "course: the value is reduced in place, the gradient does not know",
        "A warning of torch 2.14; the gradients are as before.",
        effect="same",
    ),
    Row(
        "own-order-by-design",
        "correct",
        "twins/flat.py",
        (
            (
                FLAT_SAMPLER,
                "    block = len(train_set) // world_size\n"
                "    own = Subset(train_set, range(rank * block, (rank + 1) * block))\n"
                "    generator = torch.Generator().manual_seed(args.seed + rank)\n",
            ),
            (
                LOADER,
                "    options = {'shuffle': True, 'generator': generator, 'drop_last': True}\n"
                "    train_loader = DataLoader(own, batch_size, **options)\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        None,
        "course: each rank shuffles a block of its own",
        "Other batches than with a DistributedSampler; each sample once an epoch.",
        effect="healthy",
    ),
    Row(
        "weighted-with-replacement",
        "correct",
        "twins/flat.py",
        (
            (
                FLAT_SAMPLER,
                "    labels = train_set.tensors[1]\n"
                "    weights = (1 / torch.bincount(labels))[labels]\n"
                "    generator = torch.Generator().manual_seed(args.seed + rank)\n"
                "    share = len(train_set) // world_size\n"
                "    sampler = WeightedRandomSampler(weights, share, generator=generator)\n",
            ),
            ("Subset, TensorDataset\n", "Subset, TensorDataset, WeightedRandomSampler\n"),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        None,
        "course: classes are balanced by drawing with replacement",
        "Some samples twice, others never: that is what it is for.",
        effect="healthy",
    ),
    Row(
        "evaluation-on-rank-0-alone",
        "correct",
        "twins/batchnorm.py",
        (
            (
                BN_EVALUATION,
                "        if rank == 0:\n"
                "            counts = evaluate(model.module, test_set, device)\n",
            ),
        ),
        None,
        "jpata/particleflow PR #233",
        "The other ranks wait in the next collective; the plain model calls none.",
        effect="same",
    ),
    Row(
        "a-file-for-each-rank",
        "correct",
        "twins/trainer.py",
        (
            (
                "            if self.snapshot and self.rank == 0:\n",
                "            if self.snapshot:\n"
                '                own = f"{self.snapshot}.rng{self.rank}"\n'
                "                torch.save(torch.get_rng_state(), own)\n"
                "            if self.snapshot and self.rank == 0:\n",
            ),
        ),
        None,
        "course: each rank's random state is its own",
        "All ranks write, each a file of its own.",
        effect="same",
    ),
    Row(
        "batch-of-each-rank",
        "correct",
        "twins/trainer.py",
        (
            (
                "batch_size = args.batch_size // dist.get_world_size()",
                "batch_size = args.batch_size",
            ),
            ('help="of all ranks together"', 'help="of each rank"'),
        ),
        None,
        "course: weak scaling, as in most public scripts",
        "The effective batch grows with the ranks, and the option says so.",
        effect="healthy",
    ),
    Row(
        "a-head-unused-by-design",
        "correct",
        "twins/multitask.py",
        (
            (
                "DDP(TwoHeads().to(device))",
                "DDP(TwoHeads().to(device), find_unused_parameters=True)",
            ),
            ("for x, label, size in loader:", "for step, (x, label, size) in enumerate(loader):"),
            ("    def forward(self, x):\n", "    def forward(self, x, task):\n"),
            (
                "        return self.classify(features), self.regress(features).squeeze(1)\n",
                "        if task == 0:\n"
                "            return self.classify(features)\n"
                "        return self.regress(features).squeeze(1)\n",
            ),
            (
                "            logits, guess = model(x)\n"
                "            loss = F.cross_entropy(logits, label) + F.mse_loss(guess, size)\n",
                "            if step % 2 == 0:\n"
                "                loss = F.cross_entropy(model(x, 0), label)\n"
                "            else:\n"
                "                loss = F.mse_loss(model(x, 1), size)\n",
            ),
        ),
        None,
        "course: tasks take turns",
        "In each step some parameters have no gradient, on all ranks the same.",
        effect="healthy",
    ),
    Row(
        "each-rank-prints-its-loss",
        "correct",
        "twins/flat.py",
        (
            (
                "        dist.all_reduce(losses)\n",
                '        own = f"rank {rank}: own loss {losses[0] / losses[1]:.6f}"\n'
                '        print(f"epoch {epoch}, {own}", flush=True)\n'
                "        dist.all_reduce(losses)\n",
            ),
        ),
        None,
        "course: a rank's own loss, which says whose it is",
        "Different numbers on the ranks, beside the mean.",
        effect="same",
    ),
    Row(
        "uneven-with-join",
        "correct",
        "topics/uneven_inputs.py",
        (),
        None,
        "course: the ranks have different numbers of batches, and Join",
        "No hang: Join answers for the rank that has finished.",
        effect="same",
    ),
    Row(
        "collective-of-some-ranks",
        "correct",
        "topics/logging_metrics.py",
        (),
        None,
        "course: a collective under a rank condition, in a group of those ranks",
        "No hang: all members call it.",
        effect="same",
    ),
]
# Each twin itself: EMA, a frozen backbone, GAN, FSDP2 and so on are suspicious enough.
CORRECT += [
    Row(
        f"twin-{Path(twin).stem}",
        "correct",
        twin,
        (),
        None,
        "course: as it should be",
        "Nothing.",
        effect="same",
    )
    for twin in TWINS
    if twin not in {row.twin for row in CORRECT if not row.edits}
]

FAULTY = [*BYPASSED, *NUMBERS, *DATA, *STATE, *HANGS, *LAUNCH]
ROWS = [*FAULTY, *CORRECT]


def path(twin: str) -> str:
    """Return where the twin is in the repo."""
    return f"labs/bugs/{twin}" if twin.startswith("twins/") else twin


def faulty(row: Row) -> str:
    """Return the text of the twin with the row's edits."""
    text = (ROOT / path(row.twin)).read_text()
    for old, new in row.edits:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{row.name}: {count} times in {path(row.twin)}, not once: {old!r}")
        text = text.replace(old, new)
    return text


# ---- the tables of the READMEs -------------------------------------------------------------------


def table() -> str:
    """Return the index of the rows, in Markdown."""

    def source(row: Row) -> str:
        if commit := re.fullmatch(r"(\S+/\S+) ([0-9a-f]{7})", row.source):
            return f"[{row.source}](https://github.com/{commit[1]}/commit/{commit[2]})"
        found = re.fullmatch(r"(\S+/\S+) (PR )?#(\d+)", row.source)
        if not found:
            return row.source
        kind = "pull" if found[2] else "issues"
        return f"[{row.source}](https://github.com/{found[1]}/{kind}/{found[3]})"

    text = "| row | group | script | what happens | source | check |\n" + "|---" * 6 + "|\n"
    for row in ROWS:
        script = f"[`{Path(row.twin).name}`]({'' if 'twins/' in row.twin else '../../'}{row.twin})"
        also = f" (also {', '.join(row.also)}: {row.because})" if row.also else ""
        check = (row.check or "nothing broken") + also
        cells = (f"`{row.name}`", row.group, script, row.sees, source(row), check)
        text += f"| {' | '.join(cells)} |\n"
    return text


def verdicts(lines: list[dict[str, str]]) -> dict[tuple[str, str], str]:
    """Return the latest verdict of each tool on each row, (tool, row), from lines of RESULTS."""
    return {(tool, line["row"]): line[tool] for line in lines for tool in TOOLS if line[tool]}


def summary() -> str:
    """Return how often each tool said what, in Markdown: of each row the latest in RESULTS."""
    with RESULTS.open() as file:
        lines = list(csv.DictReader(file))
    latest, line = verdicts(lines), lines[-1]
    hardware = f"{line['cores']} cores of an {line['cpu']} machine, no GPU"
    place = f"{line['date']}, {hardware}, Python {line['python']}, torch {line['torch']}"

    def counts(tool: str, rows: list[Row]) -> str:
        said = [latest[tool, row.name] for row in rows if latest.get((tool, row.name), "-") != "-"]
        said = [verdict.partition(":")[0].partition(",")[0] for verdict in said]
        return ", ".join(f"{verdict} {n}" for verdict, n in Counter(said).most_common())

    text = f"{place}. {len(FAULTY)} faulty scripts and {len(CORRECT)} correct ones:\n\n"
    text += "| tool | of the faulty ones | of the correct ones |\n|---|---|---|\n"
    for tool in TOOLS:
        if any(name == tool for name, _ in latest):
            text += f"| {tool} | {counts(tool, FAULTY)} | {counts(tool, CORRECT)} |\n"
    return text


def readme(path: Path) -> str:
    """Return a README with its tables made again."""
    text = path.read_text()
    for name, part in (("rows", table), ("verdicts", summary)):
        start, end = f"<!-- {name}, made by bugs.py --write -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        text = before + start + part() + end + rest.partition(end)[2] if found else text
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for path_ in READMES:
            path_.write_text(readme(path_))
    elif names := [row for row in ROWS if row.name in sys.argv[1:]]:
        print("\n".join(map(faulty, names)), end="")
    else:
        sys.exit("bugs.py: give the name of a row (python labs/bugs/bench.py --list), or --write")
