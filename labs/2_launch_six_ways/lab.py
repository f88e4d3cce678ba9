"""Lab 2: six ways to start a script. The check runs each and compares with what you said."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from labs.starters import ROOT, Result, run, shown

TITLE, MINUTES, LIMIT = "Six ways to launch a script", 40, 200
FAILS = "no prediction yet"
WHO = '''"""Lab 2: says who it is, as far as its launcher has told it."""

import os
import sys


def say(*arguments):
    names = {"rank": "RANK", "local rank": "LOCAL_RANK", "world size": "WORLD_SIZE"}
    slurm = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS"}
    told = [os.environ.get(n) or os.environ.get(f"SLURM_{slurm[n]}") or "-" for n in slurm]
    who = ", ".join(f"{name} {value}" for name, value in zip(names, told, strict=True))
    pids = f"pid {os.getpid()}, started by {os.getppid()}"
    print(f"{who} | arguments {arguments} | {pids}\\n", end="", flush=True)  # one write


if __name__ == "__main__":
    if sys.argv[1:]:
        import torch.multiprocessing as mp

        mp.spawn(say, nprocs=int(sys.argv[1]))
    else:
        say()
'''
WAYS = {
    "python": "python starter.py\n",
    "spawn": "python starter.py {spawn}\n",
    "torchrun": "torchrun --standalone --nproc-per-node={torchrun} starter.py\n",
    "two_launchers": """\
# In two terminals, or on two machines: the same command, and a place where they meet.
free='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
port=$(python -c "$free")
meet="--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:$port"
torchrun --nnodes=2 --nproc-per-node={two_launchers} $meet starter.py &
torchrun --nnodes=2 --nproc-per-node={two_launchers} $meet starter.py &
wait
""",
    "by_hand": """\
# Two machines, {by_hand} processes on each, all of them here.
export WORLD_SIZE=$((2 * {by_hand}))
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
  RANK=$rank LOCAL_RANK=$((rank % {by_hand})) python starter.py &
done
wait
""",
    "slurm": "srun --nodes=2 --ntasks-per-node={slurm} python starter.py\n",
}
LINES = 'lines as "rank local-rank world-size", with - for what is not told'
QUESTIONS = {way: f'{way}.sh: its {LINES}, as ["0 0 1"]' for way in WAYS}
QUESTIONS["parents"] = 'two_launchers.sh: how many different numbers stand after "started by"?'
HINTS = [
    "A launcher talks to its processes by environment variables. Which launchers set RANK, "
    "LOCAL_RANK and WORLD_SIZE?",
    "Run one: bash labs/mine/2_launch_six_ways/torchrun.sh. Then print what is new in the "
    "environment: env | sort in a script that you start in the same way.",
    "The part 'arguments' shows what a process was called with. Compare spawn.sh and torchrun.sh: "
    "one of them tells by arguments, the other by the environment.",
    "rank counts all processes of the job, local rank those of one launcher (or node), and world "
    "size is the number of ranks. mp.spawn sets none of them: it passes an index.",
]


def sizes(learner):
    choices = {"spawn": (2, 3), "torchrun": (2, 3, 4), "two_launchers": (2, 3)}
    choices |= {"by_hand": (2, 3), "slurm": (2, 3)}
    return {way: learner.pick(way, some) for way, some in choices.items()}


def files(learner):
    ways = {f"{way}.sh": text.format(**sizes(learner)) for way, text in WAYS.items()}
    here = 'cd "$(dirname "$0")"\n'
    return {"starter.py": WHO} | {name: f"{here}{text}" for name, text in ways.items()}


@cache
def printed(way, learner):
    """Run it; return the lines that it prints, or None, the parents, and what went wrong."""
    with TemporaryDirectory(prefix="lab-") as folder:
        for name, text in files(learner).items():
            (Path(folder) / name).write_text(text)
        command = ["bash", f"{folder}/{way}.sh"]
        if way == "slurm":
            laptop = [str(ROOT / "slurm" / "laptop_cluster.sh"), "exec"]
            if run(["sinfo"], ROOT, 10).code == 0:
                laptop = []
            elif run([*laptop, "sinfo"], ROOT, 10).code != 0:
                return None, 0, "no Slurm answers; slurm/laptop_cluster.sh start"
            command = laptop + command
        done = run(command, ROOT, 60)
    lines = re.findall(r"^rank (\S+), local rank (\S+), world size (\S+) \|", done.out, re.M)
    parents = set(re.findall(r"started by (\d+)$", done.out, re.M))
    said = (done.err.strip().splitlines() or ["nothing"])[-1]
    return [" ".join(line) for line in lines] or None, len(parents), f"it said: {said}"


def check(work, learner, answers):
    missing = [name for name in QUESTIONS if name not in answers and name != "slurm"]
    if missing:
        return [Result(name, False, f"{FAILS}: write it into answers.toml") for name in missing]
    results = []
    for way in WAYS:
        lines, parents, error = printed(way, learner)
        said = answers.get(way, [])
        said = said if isinstance(said, list) else [said]
        if lines is None:
            slurm = way == "slurm"  # its fault is not the learner's
            text = f"not tried here: {error}" if slurm else f"no line was printed; {error}"
            results.append(Result(way, None if slurm else False, text))
            continue
        right = (Counter(lines) & Counter(" ".join(str(line).split()) for line in said)).total()
        text = f"printed lines: {len(lines)}, yours: {len(said)}, the same: {right}"
        passed = right == len(lines) == len(said)
        text += "" if passed else f". Look: bash {shown(work / f'{way}.sh')}"
        results.append(Result(way, passed, text))
        if way == "two_launchers":
            passed = str(answers["parents"]).strip() == str(parents)
            again = "" if passed else ". Look again"
            results.append(Result("parents", passed, f"you said {answers['parents']}{again}"))
    return results


def SOLUTION(learner):
    seen = {way: printed(way, learner) for way in WAYS}
    answers = {way: lines for way, (lines, _, _) in seen.items() if lines}
    return {}, answers | {"parents": seen["two_launchers"][1]}


def WRONG(learner):
    n = sizes(learner)
    ranks = {way: [f"{rank} {rank} {n[way]}" for rank in range(n[way])] for way in n}
    by_hand = [f"{rank} {rank} {2 * n['by_hand']}" for rank in range(2 * n["by_hand"])]
    return [
        ("spawn sets variables", {}, {"spawn": ranks["spawn"]}, "the same: 0"),
        ("only rank 0 prints", {}, {"torchrun": ranks["torchrun"][:1]}, "the same: 1"),
        ("two jobs", {}, {"two_launchers": 2 * ranks["two_launchers"]}, "two_launchers: "),
        ("local rank is rank", {}, {"by_hand": by_hand}, f"the same: {n['by_hand']}"),
        ("one launcher", {}, {"parents": 1}, "parents: you said 1. Look again"),
    ]
