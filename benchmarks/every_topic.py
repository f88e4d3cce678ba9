"""Do the topics work on this machine? It runs each, and keeps the line that it ends with.

    python benchmarks/every_topic.py                   all of them, as their headers say
    python benchmarks/every_topic.py --only fsdp compile --processes 4
    python benchmarks/every_topic.py --help            what else

It takes the header's first command, on GPUs that of "All GPUs". Each run adds a row, with its
seconds, to results/topics.jsonl. It exits with 1 if a topic has failed. Left out is what waits for
a person (lightning_debugging). With --jobs several run at a time: then times in their lines are
not to be quoted.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import tour  # noqa: E402

import common  # noqa: E402
import pairs  # noqa: E402

LEFT_OUT = {"lightning_debugging"}
TOPICS = [p.stem for p in sorted(ROOT.glob("topics/[!_]*.py")) if p.stem not in LEFT_OUT]
LABEL = re.compile(r"^(\S.*?): +(\S.*)$")


def labelled(doc: str) -> list[tuple[str, str]]:
    """Return the (label, command) of a header; a deeper line goes on with the one above it."""
    found: list[list[str]] = []
    for line in doc.splitlines():
        if match := LABEL.match(line):
            found.append([*match.groups()])
        elif found and line.startswith(" " * 8):
            found[-1][1] += f" {line.strip()}"
    return [(label, command.replace("\\", " ")) for label, command in found]


def command(topic: str, processes: int, gpus: bool) -> list[str]:
    """Return the words that start a topic: the header's, with another number of processes."""
    doc = pairs.header((ROOT / "topics" / f"{topic}.py").read_text())
    lines = [(a, b) for a, b in labelled(doc) if re.search(r"torchrun|python|the same", b)]
    first = next(text for label, text in lines if re.match("Two|Four|All|Shared", label))
    more = next((text for label, text in lines if "All GPUs" in label), "") if gpus else ""
    if more.startswith(("torchrun", "python")):
        first, more = more, ""
    # What stands before the launcher, or after a first command, is for a reader's shell.
    first = re.search(r"(torchrun|python) [^&]*?(?= python |&|$)", first)[0]
    options = more.partition("the same with ")[2].split(",")[0].split()
    words = [word for word in [*shlex.split(first), *options] if "--nproc-per-node" not in word]
    if words[0] == "torchrun":
        words[:1] = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        if topic == "device_mesh" and processes % 4:
            words += ["--tensor", "1", "--shard", str(processes)]  # its grid is of four or more
        return words
    return [*words[1:], "--nproc" if topic == "shared_dataset" else "--devices", str(processes)]


def run(topic: str, args: argparse.Namespace) -> dict:
    """Run a topic in a folder of its own; return its row."""
    words = [*command(topic, args.processes, common.gpu_count() > 0), *args.extra]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for path in (ROOT / "topics", ROOT / "data", *ROOT.glob("*.py")):
            os.symlink(path, Path(folder, path.name))
        Path(folder, "checkpoints").mkdir()
        if "--compare" in words:  # with the weights of 02
            subprocess.run(
                [sys.executable, *tour.commands("02_torchrun.py", args.processes, 1)[0][1:]]
                + ["--checkpoint=checkpoints/02.pt"],
                cwd=folder,
                capture_output=True,
                check=True,
                timeout=args.timeout,
            )
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),  # of crash.py
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, code = process.communicate(timeout=args.timeout)[0], process.returncode
        except subprocess.TimeoutExpired:
            out, code = "", f"has not ended after {args.timeout} s"
        finally:
            tour.stop(process)
    lines = out.splitlines()
    said = [line for line in lines if line.startswith(("measured ", "epoch "))]
    last = next((line for line in said if line.startswith("measured ")), "".join(said[-1:]))
    if code or not last:
        print(f"---- {topic}", *lines[-12:], sep="\n", file=sys.stderr, flush=True)
    print(f"{topic}: exit code {code} | {last}", flush=True)
    row = {"topic": topic, "command": shlex.join(["python", *words]), "processes": args.processes}
    row |= {"exit_code": code, "seconds": round(time.perf_counter() - start, 1)}
    return row | {"jobs": args.jobs, "last_line": last} | machine.describe()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=TOPICS, choices=TOPICS, metavar="TOPIC")
    parser.add_argument("--processes", type=int, default=common.gpu_count() or 2)
    parser.add_argument("--extra", action="append", default=[], help="one option more")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "topics.jsonl")
    args = parser.parse_args()
    tour.end_like_ctrl_c()
    with ThreadPoolExecutor(args.jobs) as pool, args.out.open("a") as file:
        rows = []
        for row in pool.map(lambda topic: run(topic, args), args.only):
            rows.append(row)
            print(json.dumps(machine.sealed(row)), file=file, flush=True)
    sys.exit(any(row["exit_code"] or not row["last_line"] for row in rows))


if __name__ == "__main__":
    main()
