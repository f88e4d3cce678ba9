# ruff: noqa: E501  the edits of a rung are as long as its lines
"""Lab 6: micro-batches, the rate that belongs to the batch, and a test set that is counted once."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from labs import starters
from labs.starters import (
    CPU,
    ROOT,
    Learner,
    Result,
    distance,
    epochs_of,
    patched,
    run,
    unanswered,
    why,
)

TITLE, MINUTES, LIMIT = "Batch and learning rate", 60, 180
FAILS = "micro-batches"
QUESTIONS = {
    "effective_batch": "of the job in the header of starter.py: samples in a step of all ranks",
    "learning_rate": "the rate for that batch, by the linear rule",
    "steps": "steps of an epoch of 50,000 samples, where the last batch that is not full is dropped",
}
HINTS = [
    "Do the TODOs one by one. Which numbers may change when a batch is cut into micro-batches, and "
    "which may not?",
    "python labs/timeline.py labs/mine/6_batch_and_rate/starter.py -- --accumulation-steps 4 draws "
    "each forward pass, and each all-reduce of a step.",
    "A step of 4 micro-batches shows 4 forward passes, and its all-reduces stand behind the last "
    "backward pass only. 25 test images on 2 ranks are 13 and 12, not 13 and 13.",
    "topics/gradient_accumulation.py: no_sync() around forward and backward of all micro-batches but "
    "the last, and each loss weighted by its share. topics/lr_scaling.py: the rate climbs to its "
    "target. 02_torchrun.py: Subset(range(rank, len(test_set), world_size)).",
]
HERE = Path(__file__).parent
SMALL = ["--dataset=fake:100", "--image-size=8", "--batch-size=32", "--epochs=2", "--lr=0.01"]
SMALL += ["--seed=4"]  # the first with which some test images are right
STEP = """            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
"""
SHARD = """    test_shard = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    test_loader = DataLoader(test_shard, batch, **options)
"""
PADDED = """    # TODO 3: 25 test images on 2 ranks become 26. Count each of them once.
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, batch, sampler=test_sampler, **options)
"""


def job(learner):
    """Return the learner's own job: ranks, samples of a micro-batch, micro-batches a step."""
    names = ("ranks", (4, 6, 8, 12)), ("micro", (8, 16, 24)), ("parts", (2, 3, 4, 5))
    return [learner.pick(name, choices) for name, choices in names]


def files(learner):
    ranks, micro, parts = job(learner)
    head = f'''"""Lab 6: the same training in smaller pieces, with a rate that fits, and an honest test.

The task is in labs/6_batch_and_rate/README.md. The job of answers.toml: {ranks} ranks, micro-batches
of {micro} samples on each, {parts} of them before a step; the rate 0.02 is right for a batch of 64.
"""
'''
    return {"starter.py": starter(head)}


def starter(head):
    text = patched(
        "02_torchrun.py",
        [
            ("import os\nimport time\n", "import os\nimport sys\nimport time\n"),
            (
                "import checks\n",
                'sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/../../..")\n'
                "import checks\n",
            ),
            ("DistributedSampler, Subset\n", "DistributedSampler\n"),
            (SHARD, PADDED),
            (
                "    for epoch in range(start_epoch",
                "    # TODO 2: --lr is right for --base-batch samples. Where --batch-size is k times as\n"
                "    # large, step i of the n in the first epoch has --lr times 1 + (k - 1) * i / n (i\n"
                "    # from 1), and all later ones have k times --lr.\n\n"
                "    for epoch in range(start_epoch",
            ),
            (
                STEP,
                "            # TODO 1: cut the batch into --accumulation-steps micro-batches: as many\n"
                "            # forward and backward passes, one all-reduce, one step, and the same\n"
                "            # gradient and printed loss, also where they are not equally large.\n"
                + STEP,
            ),
            (
                'main(common.parse_args("torchrun"))',
                'main(common.parse_args("torchrun", accumulation_steps=1, base_batch=96))',
            ),
        ],
    )
    return head + text.partition('"""\n')[2]


runs = {}  # (text, options): what train() has returned


def train(script, *words):
    """Return what a script does on two ranks: (run, epochs, what each rank saw, its folder)."""
    key = (script.read_text(), *words)
    if key in runs:
        return runs[key]
    folder = TemporaryDirectory(prefix="lab-")
    log, file = Path(folder.name) / "log.json", Path(folder.name) / "checkpoint.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [HERE / "watched.py", folder.name, script, *SMALL, *words]
    done = run([*command, f"--log-json={log}", f"--checkpoint={file}"], script.parent, 80, CPU)
    seen = [json.loads(p.read_text()) for p in sorted(Path(folder.name).glob("seen.*"))]
    runs[key] = done, epochs_of(log), seen, folder
    return runs[key]


def step_results(seen, plain, far):
    """Return whether a step is cut, sent once, and the same: 16 samples in three parts."""
    most, sent, wanted = max(seen["rows"], default=0), seen["sent"], plain["sent"]
    cut = most <= 6
    text = f"the largest of three micro-batches has {most} of 16 samples"
    results = [Result("micro-batches", cut, text if cut else f"{text}: see TODO 1")]
    if not cut:
        return results
    rows = sum(seen["rows"]) / max(1, len(seen["rates"]))
    if rows != 16:
        text = f"the forward passes of a step have {rows:g} samples together, not 16"
        return [Result("micro-batches", False, text)]
    text = f"{sent} in {len(seen['rates'])} steps"
    more = "" if sent == wanted else ": one a bucket and step are enough, see no_sync()"
    results.append(Result("all-reduces", sent == wanted, text + more))
    text = (
        "no checkpoint that can be read" if far is None else f"largest difference to 02 {far:.0e}"
    )
    same = far is not None and far < 1e-5
    more = "" if same else ": is each micro-batch's loss weighted by its share of the 16?"
    return [*results, Result("weights", same, text + more)]


def check(work, learner, answers):
    return trained(work) + on_paper(learner, answers)


def trained(work):
    script = work / "starter.py"
    three = ("--accumulation-steps=3", "--base-batch=32")
    done, epochs, seen, folder = train(script, *three)
    if done.code != 0 or len(seen) < 2 or len(epochs) != 2:
        return [
            Result("two ranks", False, why(done) if done.code else "no line an epoch in the log")
        ]
    done, wanted, plain, reference = train(ROOT / "02_torchrun.py")
    starters.must_end(done, "02_torchrun.py")
    far = distance(Path(folder.name, "checkpoint.pt"), Path(reference.name, "checkpoint.pt"))
    results = step_results(seen[0], plain[0], far)
    losses, right_losses = ([epoch["train_loss"] for epoch in rows] for rows in (epochs, wanted))
    if results[-1].passed:
        good = all(abs(a - b) < 1e-4 for a, b in zip(losses, right_losses, strict=True))
        text = "train loss " + ", ".join(f"{loss:.4f}" for loss in losses)
        more = f"; 02 prints {', '.join(f'{loss:.4f}' for loss in right_losses)}" * (not good)
        results.append(Result("loss", good, text + more))
    if not all(result.passed for result in results):
        return results

    done, _, seen, _ = train(script, "--accumulation-steps=3", "--base-batch=8")
    if done.code != 0 or len(seen) < 2:
        return [*results, Result("rate", False, why(done))]
    steps = len(seen[0]["rates"]) // 2  # an epoch's
    rates = [0.01 + 0.03 * min(1, n / steps) for n in range(1, 2 * steps + 1)]
    good = all(abs(a - b) < 1e-6 for a, b in zip(seen[0]["rates"], rates, strict=True))
    text = f"{', '.join(f'{rate:.4g}' for rate in seen[0]['rates'])} with --lr 0.01 for a quarter"
    text += " of the batch" + ("" if good else f"; TODO 2 asks for {rates[-1]:.4g} after {steps}")
    results.append(Result("rate", good, text))

    tested, accuracy = epochs[-1]["test_samples"], epochs[-1]["test_accuracy"]
    good = tested == 25 and accuracy == wanted[-1]["test_accuracy"]
    text = f"{tested} of 25 test images counted, accuracy {accuracy:.1%}"
    text += "" if good else f" (one process: {wanted[-1]['test_accuracy']:.1%}): see TODO 3"
    return [*results, Result("evaluation", good, text)]


def on_paper(learner, answers):
    results = []
    for name, value in right(learner).items():
        if (said := answers.get(name)) is None:
            results.append(unanswered(name))
            continue
        good = isinstance(said, int | float) and abs(said - value) < 1e-6
        more = "" if good else " is not it: ranks, micro-batches and their samples all count"
        results.append(Result(name, good, f"{said}{more}"))
    return results


def right(learner):
    ranks, micro, parts = job(learner)
    batch = ranks * micro * parts
    return {"effective_batch": batch, "learning_rate": 0.02 * batch / 64, "steps": 50_000 // batch}


CUT = """            optimizer.zero_grad()
            parts = args.accumulation_steps
            for image_part, label_part in zip(images.chunk(parts), labels.chunk(parts), strict=True):
                last = label_part.data_ptr() == labels.chunk(parts)[-1].data_ptr()
                with nullcontext() if last else model.no_sync():
                    share = len(label_part) / len(labels)
                    loss = F.cross_entropy(model(image_part), label_part) * share
                    loss.backward()
                    sums[0] += loss.detach() * len(labels)
            rate = args.lr * args.batch_size / args.base_batch
            count = min(count + 1, len(train_loader))
            optimizer.param_groups[0]["lr"] = args.lr + (rate - args.lr) * count / len(train_loader)
            optimizer.step()
"""


def solved(*edits):
    text = files(Learner("you"))["starter.py"]
    done = [
        (STEP, CUT),
        (
            "            sums[0] += loss.detach() * len(labels)\n            sums[1]",
            "            sums[1]",
        ),
        (
            "    for epoch in range(",
            "    count = start_epoch * len(train_loader)\n    for epoch in range(",
        ),
        ("DistributedSampler\n\n", "DistributedSampler, Subset\n\n"),
        ("import time\n", "import time\nfrom contextlib import nullcontext\n"),
        (PADDED, SHARD),
    ]
    for old, new in [*done, *edits]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {"starter.py": text}


def SOLUTION(learner):
    return solved(), right(learner)


WITH = "nullcontext() if last else model.no_sync()"
WRONG = [
    ("an all-reduce a micro-batch", solved((WITH, "nullcontext()")), {}, "all-reduces: 18"),
    ("never synchronised", solved((WITH, "model.no_sync()")), {}, "all-reduces: 0"),
    ("a mean of means", solved(("len(label_part) / len(labels)", "1 / parts")), {}, "weights"),
    ("the sum", solved((" * share\n", "\n")), {}, "weights"),
    ("no rule", solved(("args.batch_size / args.base_batch", "1")), {}, "rate"),
    ("no warm-up", solved((" * count / len(train_loader)", "")), {}, "rate"),
    (
        "the loss of the last part",
        solved(
            ("                    sums[0] += loss.detach() * len(labels)\n", ""),
            (
                "            sums[1]",
                "            sums[0] += loss.detach() * len(labels)\n            sums[1]",
            ),
        ),
        {},
        "loss: train loss",
    ),
    (
        "a sample left out",
        solved(
            (
                "images.chunk(parts), labels.chunk(parts)",
                "images[:15].chunk(parts), labels[:15].chunk(parts)",
            ),
            ("labels.chunk(parts)[-1]", "labels[10:]"),
        ),
        {},
        "have 15 samples",
    ),
    (
        "micro-batches counted as steps",
        solved(
            ("loss.backward()\n", "loss.backward()\n                    count += 1\n"),
            ("min(count + 1,", "min(count,"),
        ),
        {},
        "rate: 0.04",
    ),
    ("padded", solved((SHARD, PADDED)), {}, "26 of 25"),
    ("one rank's batch", {}, {"effective_batch": 32}, "32 is not it"),
    ("no answer", {}, {"steps": None}, "steps: not answered yet"),
]
