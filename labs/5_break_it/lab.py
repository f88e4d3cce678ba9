"""Lab 5: kill a rank, spoil the checkpoint, stop and requeue. The end is the same, bit for bit."""

import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import CPU, ROOT, Result, distance, header, must_end, patched, run, why

TITLE, MINUTES, LIMIT = "Break it", 60, 300
FAILS = "no checkpoint: see TODO 1"
QUESTIONS = {}
EPOCHS = 12
OPTIONS = ["--dataset=fake:960", "--image-size=16", f"--epochs={EPOCHS}", "--lr=0.01"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENV = CPU | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see topics/crash.py

IMPORTS = ("import os\nimport time\n", "import os\nimport signal\nimport sys\nimport time\n")
HERE = (
    "import checks\n",
    'sys.path.insert(0, f"{os.path.dirname(__file__)}/../../..")\nimport checks\n',
)
PID = (
    " | {device} | {len(sampler)} samples",
    " | pid {os.getpid()}",
)
READ = """\
    state = common.read_checkpoint(args)
    start_epoch = common.resume(state, args, model, optimizer) if state else 0
"""
SAVE = "            common.save_checkpoint(args, epoch + 1, model.module, optimizer)\n"
LOG = "            common.log_epoch(args, epoch, sums, seconds)\n"
JOIN = "    dist.init_process_group(backend, timeout=args.timeout)\n"
EDITS = [
    ("import os\nimport time\n", "import os\nimport sys\nimport time\n"),
    HERE,
    PID,
    (
        header("02_torchrun.py"),
        '''"""Lab 5: a training that survives a dead rank, a spoilt file and the end of its time.

The task is in labs/5_break_it/README.md. Each rank prints its process id: that is for kill.
"""
''',
    ),
    (
        JOIN,
        JOIN + "    # TODO 4: SIGTERM asks to stop. Only note it: it comes at any moment.\n",
    ),
    (
        READ,
        "    # TODO 2: go on from the checkpoint where there is one.\n"
        "    # TODO 3: and from the one before, where the last cannot be read.\n"
        "    start_epoch = 0\n",
    ),
    (
        SAVE + LOG,
        "            # TODO 1: save what a resume needs. TODO 3: keep the one before, too.\n"
        + LOG
        + "        # TODO 4: was any rank asked to stop? Then all leave here, with exit code 75.\n"
        "        # Ignore SIGTERM then: torchrun sends one to the rank that leaves last.\n",
    ),
]
NEWEST = '''
def newest_whole(path):
    """Return the state of the newest checkpoint that can be read, and its file."""
    for file in (path, f"{path}.previous"):
        try:
            return torch.load(file, map_location="cpu", weights_only=True), file
        except Exception as error:
            print(f"cannot read {file}: {type(error).__name__}\\n", end="", flush=True)
    return None, path


@record'''
DONE = [
    IMPORTS,
    HERE,
    PID,
    ("\n@record", NEWEST),
    (
        JOIN,
        JOIN
        + "    stop_requested = []\n"
        + "    signal.signal(signal.SIGTERM, lambda *_: stop_requested.append(True))\n",
    ),
    ("state = common.read_checkpoint(args)", "state, file = newest_whole(args.checkpoint)"),
    (
        SAVE + LOG,
        "            if os.path.exists(file):  # only a whole one becomes the one before\n"
        '                os.replace(file, f"{args.checkpoint}.previous")\n'
        "            file = args.checkpoint\n"
        + SAVE
        + LOG
        + "        stop = torch.tensor(len(stop_requested))\n"
        "        dist.all_reduce(stop)  # all ranks: a request to one stops them all\n"
        "        if stop:\n"
        "            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's\n"
        "            dist.destroy_process_group()\n"
        "            sys.exit(75)\n",
    ),
]
HINTS = [
    "Do the TODOs in their order. What do you need after a restart, besides the weights? Which "
    "rank writes, which ranks read?",
    "torchrun --max-restarts=1 starts all ranks again when one has died; kill -9 PID kills one. "
    "common.save_checkpoint, common.read_checkpoint and common.resume do the work of TODO 1 and 2.",
    "common.read_checkpoint ends the script where the file is spoilt: head -c 1000 FILE > SHORT "
    "makes such a file. torch.load raises an exception, which you can catch. A signal comes to one "
    "rank, at any moment; the ranks may only part where they all are.",
    "The signal handler sets a flag; after each epoch the flags are summed over the ranks "
    "(dist.all_reduce), and all leave if the sum is not 0. Before a save, os.replace the last "
    "whole file by another name. topics/preemption.py does it in the middle of an epoch.",
]


def files(learner):
    return {"starter.py": patched("02_torchrun.py", EDITS)}


@cache
def whole():
    """Train with rung 02, which nobody disturbs; return its checkpoint and the folder of that."""
    folder = TemporaryDirectory(prefix="lab-")
    file = Path(folder.name) / "whole.pt"
    command = [*TORCHRUN, ROOT / "02_torchrun.py", *OPTIONS, f"--checkpoint={file}"]
    must_end(run(command, ROOT, 60, ENV), "02_torchrun.py")
    return file, folder


def train(work, file, *restarts, rank=None, number=None):
    """Run the learner's script; after epoch 3, send this rank the signal of this number."""
    sent = []

    def watch(text):
        pids = dict(re.findall(r"rank (\d) of 2 \| pid (\d+)", text))
        if number and not sent and f"epoch 3/{EPOCHS} |" in text and str(rank) in pids:
            sent.append(os.kill(int(pids[str(rank)]), number))

    command = [*TORCHRUN, *restarts, "starter.py", *OPTIONS, f"--checkpoint={file}"]
    done = run(command, work, 60, ENV, watch)
    return done, [int(epoch) for epoch in re.findall(r"^epoch (\d+)/", done.out, re.M)], bool(sent)


def verdict(name, done, epochs, file, what):
    """Judge a run that should have come to its end with the weights of the undisturbed one."""
    if done.code != 0:
        return Result(name, False, f"{what}: {why(done)}")
    if not file.exists():
        return Result(name, False, f"{what}: {FAILS}")
    if again := sorted({epoch for epoch in epochs if epochs.count(epoch) > 1}):
        return Result(name, False, f"{what}, and these epochs were trained again: {again}")
    far = distance(file, whole()[0])
    if far is None:
        return Result(name, False, f"{what}: the file is not one of common.save_checkpoint")
    text = f"{what}, and the weights are " + ("the same bit for bit" if far == 0 else "others")
    text += f": the largest difference to a run without faults is {far:.0e}" if far else ""
    return Result(name, far == 0, text)


def spoilt(work, file, what):
    """Cut the file in half, and judge the run that starts from it: one epoch is to be trained."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    done, epochs, _ = train(work, file)
    result = verdict("spoilt file", done, epochs, file, what)
    if result.passed and len(epochs) != 1:
        text = f"{what}: the epoch before was there, but these were trained again: {epochs}"
        return Result(result.name, False, text)
    return result


def check(work, learner, answers):
    victim, asked = learner.pick("victim", range(2)), 1  # rank 0's flag alone must not do
    with TemporaryDirectory(prefix="lab-") as folder:
        file, other = Path(folder) / "killed.pt", Path(folder) / "stopped.pt"
        done, epochs, sent = train(
            work, file, "--max-restarts=1", rank=victim, number=signal.SIGKILL
        )
        if not sent:
            return [Result("kill", False, f"nobody could be killed after epoch 3: {why(done)}")]
        results = [verdict("kill", done, epochs, file, f"rank {victim} was killed")]
        if not file.exists():
            return results
        results.append(spoilt(work, file, "the file was cut in half"))
        if results[-1].passed:
            results[-1] = twice = spoilt(work, file, "the file was cut in half twice")
            twice.text += "" if twice.passed else ": has a spoilt file become the one before?"
        done, first, sent = train(work, other, rank=asked, number=signal.SIGTERM)
        codes = re.findall(r"exitcode +: (-?\d+)", done.err)
        right = codes.count("75")
        if not sent or right != 2 or done.timed_out:
            text = f"SIGTERM to rank {asked}: {right} of 2 ranks ended with exit code 75"
            text += ", one with -15, which is SIGTERM" if "-15" in codes else ""
            return [*results, Result("stop", False, f"{text}: all must, after the same epoch")]
        done, second, _ = train(work, other)
        what = f"stopped after epoch {first[-1]} and put back into the queue"
        results.append(verdict("requeue", done, first + second, other, what))
    return results


def solved(*edits):
    text = patched("02_torchrun.py", DONE)
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {"starter.py": text}


def SOLUTION(learner):
    return solved(), {}


WRONG = [
    (
        "no resume",
        solved(
            (
                "    start_epoch = common.resume(state, args, model, optimizer) if state else 0\n",
                "    start_epoch = 0\n",
            )
        ),
        {},
        "were trained again",
    ),
    (
        "no momentum",
        solved(("if state else 0\n", "if state else 0\n    optimizer.state.clear()\n")),
        {},
        "the weights are others",
    ),
    (
        "no other file",
        solved(("newest_whole(args.checkpoint)", "common.read_checkpoint(args), args.checkpoint")),
        {},
        "spoilt file",
    ),
    (
        "a spoilt one kept",
        solved(
            ("if os.path.exists(file)", "if os.path.exists(args.checkpoint)"),
            ("os.replace(file,", "os.replace(args.checkpoint,"),
        ),
        {},
        "has a spoilt file become",
    ),
    (
        "no word to the others",
        solved(
            ("        dist.all_reduce(stop)  # all ranks: a request to one stops them all\n", "")
        ),
        {},
        "1 of 2 ranks",
    ),
    (
        "rank 0's word",
        solved(("dist.all_reduce(stop)", "dist.broadcast(stop, 0)")),
        {},
        "0 of 2 ranks",
    ),
]
