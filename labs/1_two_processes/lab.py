"""Lab 1: rung 00 becomes rung 01. The same losses and weights, and the rules of labs/check.py."""

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs import starters
from labs.starters import CPU, ROOT, Result, checked, distance, epochs_of, header, patched, run, why

TITLE, MINUTES, LIMIT = "One process to two", 45, 240
FAILS = "only one process has trained"
QUESTIONS = {}
HERE = """sys.path.insert(0, f"{os.path.dirname(__file__)}/../../..")  # the repo's root
import checks
"""
# What must be seen to hold, in the order in which it is worth mending; others may not be broken.
SEEN = "collectives samples order wrapper gradients replicas loss evaluation writers teardown"
SEEN = SEEN.split()
RULES = [*SEEN, "learning-rate", "port"]
SMALL = ["--nproc=2", "--epochs=2", "--dataset=fake:100", "--image-size=8", "--batch-size=32"]

EDITS = [
    (
        header("00_single_gpu.py") + "\n",
        '''"""Lab 1: make two processes of one. Do the TODOs in the order of their numbers.

The task is in labs/1_two_processes/README.md. It is done when two ranks have the losses of one.
"""

import os
import sys
''',
    ),
    ("import checks\n", HERE),
    (
        """def main(args):
    device = common.take_device()
    common.print_start(args, device)
""",
        """\
# TODO 2: each process is told its rank, takes the device of that number and joins the group.
# One of them prints the start line.
def main(args):
    device = common.take_device()
    common.print_start(args, device)
""",
    ),
    (
        "    sampler = RandomSampler(",
        "    # TODO 3: a rank reads its share of the training set; all shares make up the set.\n"
        "    sampler = RandomSampler(",
    ),
    (
        "    test_loader = DataLoader(test_set,",
        "    # TODO 4: a rank tests its share of the test set. No sample may count twice.\n"
        "    test_loader = DataLoader(test_set,",
    ),
    (
        "    for epoch in range(start_epoch",
        "    # TODO 5: the gradients of all ranks must be averaged in backward().\n\n"
        "    for epoch in range(start_epoch",
    ),
    (
        "        sampler.generator.manual",
        "        # TODO 6: the sampler of TODO 3 has another way to be told the epoch.\n"
        "        sampler.generator.manual",
    ),
    (
        "        sums[2:] = common.evaluate(model, test_loader, device)\n",
        "        # TODO 7: evaluate the model itself, not its wrapper. The sums are of one rank:\n"
        "        # they must be those of all. Then one rank saves and prints.\n"
        "        sums[2:] = common.evaluate(model, test_loader, device)\n",
    ),
    (
        """        common.log_epoch(args, epoch, sums, seconds)
""",
        """        common.log_epoch(args, epoch, sums, seconds)
    # TODO 8: leave the group.
""",
    ),
    (
        "    main(common.parse_args())\n",
        """    args = common.parse_args("spawn", nproc=2)  # adds --nproc, and divides the batch
    # TODO 1: tell the processes where they meet (checks.free_port() is a port that nobody
    # has), and start args.nproc of them.
    main(args)
""",
    ),
]
# With the address that 01 has: a spawned process imports this file again, by its path.
DONE = [
    ("import os\nimport time\n", "import os\nimport sys\nimport time\n"),
    ("import checks\n", HERE),
]
HINTS = [
    "Do the TODOs in their order and run the file after each. What may differ between the ranks, "
    "what must not?",
    "python labs/check.py labs/mine/1_two_processes/starter.py -- --nproc 2 --epochs 2 names the "
    "rule that is broken, with the line. python labs/check.py --explain RULE says what it means.",
    "Print, in each process: its rank, the first labels of its first batch, the sum of a weight "
    "after the first step. The labels must differ, the sums must not.",
    "mp.spawn(work, args=(a,), nprocs=2) calls work(0, a) and work(1, a): the number is the rank. "
    "init_process_group() wants it, and the world size. Rank r of n tests the samples r, r + n, "
    "r + 2n ... topics/ddp_by_hand.py shows what DDP does, in three lines.",
]


def files(learner):
    return {"starter.py": patched("00_single_gpu.py", EDITS)}


@cache
def train(script, text, *words):
    """Return what a script does with the digits: (run, epochs, checkpoint, its folder)."""
    folder = TemporaryDirectory(prefix="lab-")
    log, file = Path(folder.name) / "log.json", Path(folder.name) / "checkpoint.pt"
    options = ["--epochs=1", f"--log-json={log}", f"--checkpoint={file}", *words]
    done = run([sys.executable, script.name, *options], script.parent, 80, CPU)
    return done, epochs_of(log), file, folder


def rules(work):
    """Return a Result for each rule of labs/check.py that does not hold, and one for the others."""
    with TemporaryDirectory(prefix="lab-") as folder:
        rows = checked(work, 120, *SMALL, f"--log-json={folder}/log.json")
    if isinstance(rows, Result):
        return [rows]
    said = rows["collectives"]["evidence"]
    alone = rows["replicas"]["evidence"].startswith("no process made a process group")
    if alone or said.startswith("the script failed by itself"):
        done = run([sys.executable, "starter.py", *SMALL], work, 60, CPU)
        text = f"{FAILS}: see TODO 1 and 2" if alone else said
        return [Result("two processes", False, why(done) if done.code else text)]
    bad = [rows[name] for name in RULES if rows[name]["verdict"] == "broken"]
    bad = bad or [rows[name] for name in SEEN if rows[name]["verdict"] != "holds"]
    results = []
    for row in bad:
        file, _, line = (row["where"] or "").rpartition(":")
        place = f" (starter.py line {line})" if file.endswith("/starter.py") else ""
        results.append(Result(row["check"], False, row["evidence"] + place))
    holds = [name for name in SEEN if rows[name]["verdict"] == "holds"]
    if holds:
        text = f"of labs/check.py: {', '.join(holds)}"
        results.append(Result(f"{len(holds)} of {len(SEEN)} rules", True, text))
    return results


def check(work, learner, answers):
    results = rules(work)
    if not all(result.passed for result in results):
        return results
    alone, wanted, reference, _ = train(ROOT / "00_single_gpu.py", "")
    starters.must_end(alone, "00_single_gpu.py")
    script = work / "starter.py"
    done, epochs, file, _ = train(script, script.read_text(), "--nproc=2")
    if done.code != 0 or len(epochs) != len(wanted):
        text = why(done) if done.code != 0 else f"{len(epochs)} lines in --log-json, not 1"
        return [*results, Result("losses", False, text)]
    pairs = [(a["train_loss"], b["train_loss"]) for a, b in zip(epochs, wanted, strict=True)]
    same = all(abs(a - b) < 1e-4 * b for a, b in pairs)
    text = ", ".join(f"{a:.5f} (one process: {b:.5f})" for a, b in pairs)
    text += "" if same else ": is a step made of the same samples, of all ranks together?"
    results.append(Result("losses", same, text))
    tested = [(e["test_accuracy"], e["test_samples"]) for e in (epochs[-1], wanted[-1])]
    text = "{:.1%} of {} (one process: {:.1%} of {})".format(*tested[0], *tested[1])
    text += "" if tested[0] == tested[1] else ": does each test sample count once?"
    results.append(Result("accuracy", tested[0] == tested[1], text))
    far = distance(file, reference) if file.exists() else None
    text = f"largest difference {far:.0e}" if far is not None else "no checkpoint was written"
    if far is None and file.exists():
        text = "not under the names that one process saves: is it the wrapper that you save?"
    results.append(Result("weights", far is not None and far < 1e-4, text))
    return results


def solved(*edits):
    return {"starter.py": patched("01_single_node_multi_gpu.py", [*DONE, *edits])}


def SOLUTION(learner):
    return solved(), {}


REDUCED = "        dist.all_reduce(sums)  # all ranks call this: sums of all ranks, on all ranks\n"
SAVES = "        if rank == 0:\n            common.save"
SHARE = "Subset(test_set, range(rank, len(test_set), world_size))  # each sample once\n"
STEP = "            optimizer.zero_grad()\n"
EARLY = "            if rank == 1:\n                return\n" + STEP
WRAPPED = "    model = DDP(model)  # all ranks: takes the weights of rank 0\n"
WRONG = [
    (
        "all ranks read all",
        solved(
            (" = DistributedSampler(", " = DistributedSampler(num_replicas=1, rank=0, dataset=")
        ),
        {},
        "samples",
    ),
    ("no set_epoch", solved(("        sampler.set_epoch(epoch)\n", "")), {}, "order"),
    ("no DDP", solved((WRAPPED, '    model.__dict__["module"] = model\n')), {}, "gradients"),
    ("the loss of one rank", solved((REDUCED, "")), {}, "loss"),
    (
        "one rank reduces",
        solved((REDUCED, ""), (SAVES, "        if rank == 0:\n    " + REDUCED + SAVES[22:])),
        {},
        "collectives",
    ),
    (
        "the test set is padded",
        solved(
            (SHARE, "DistributedSampler(test_set, shuffle=False)\n"),
            ("(test_shard, batch, ", "(test_set, batch, sampler=test_shard, "),
        ),
        {},
        "evaluation",
    ),
    (
        "the wrapper is saved",
        solved(("model.module, optimizer)", "model, optimizer)")),
        {},
        "names",
    ),
    ("an error of its own", solved((REDUCED, "        loss.nothing\n")), {}, "two processes: Attr"),
    ("rank 1 makes no step", solved((STEP, EARLY)), {}, "as many steps"),
    (
        "the batch is not divided",
        solved(("batch = args.per_rank_batch", "batch = args.batch_size")),
        {},
        "losses",
    ),
]
