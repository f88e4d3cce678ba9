"""Run anybody's training script in a few processes, watch it, and say what is wrong with it.

Example:     python labs/check.py my_script.py --nproc 2 -- --epochs 2
Two nodes:   python labs/check.py my_script.py --nproc 4 --nodes 2
What it is:  python labs/check.py --explain gradients

The script is not edited. observer/ is on its PYTHONPATH and writes down what each rank does;
judge/ draws the conclusions. A script that starts its ranks itself (mp.spawn, Lightning) is run
by python, any other with the environment that torchrun makes.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import judge

OBSERVER = Path(__file__).resolve().parent / "observer"
IDLE = 5  # seconds without a line in a log or a tick of CPU time, before the ranks are asked
MORE = 20  # seconds that further runs get beside twice the time of the first one
GRACE = 6  # seconds that other ranks get after one has failed, to fail as well
STARTS_RANKS = r"\bmp\.spawn\(|multiprocessing\.spawn\(|start_processes\(|notebook_launcher\("
LIGHTNING = r"^\s*(import|from) (lightning|pytorch_lightning)\b"


def parse_args(words=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", nargs="?", help="the training script")
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start; default 2")
    parser.add_argument("--nodes", type=int, default=1, help="nodes to pretend; default 1")
    parser.add_argument("--gpus", action="store_true", help="let it use GPUs; default: the CPU")
    parser.add_argument("--timeout", type=float, default=600, help="seconds in all; default 600")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")
    parser.add_argument("--explain", metavar="CHECK", choices=[c.name for c in judge.CHECKS])
    parser.add_argument("arguments", nargs="*", help="after --: those of the script")
    words = list(sys.argv[1:] if words is None else words)
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.arguments += words[at + 1 :]
    if not args.explain:
        if not args.script:
            fail("which script? python labs/check.py SCRIPT")
        if not Path(args.script).is_file():
            fail(f"{args.script} is not a file")
        if args.nproc < 1 or args.nodes < 1 or args.nproc % args.nodes:
            fail(f"--nproc {args.nproc} ranks cannot be shared by --nodes {args.nodes}")
        if args.timeout <= 0:
            fail("--timeout must be more than 0 seconds")
        if args.json and not Path(args.json).resolve().parent.is_dir():
            fail(f"the folder of --json {args.json} does not exist")
    return args


def fail(message):
    print(f"check.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- processes -----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def starts_ranks(script):
    """Return whether the script starts its ranks itself, so that nobody else has to."""
    source = Path(script).read_text(errors="replace")
    return bool(re.search(STARTS_RANKS, source) or re.search(LIGHTNING, source, re.M))


def environment(folder, rank, world, nodes, port, started):
    """Return what a rank finds in os.environ: what torchrun would set, and the observer."""
    known = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC", "SLURM")
    env = {k: v for k, v in os.environ.items() if not k.startswith(known)}
    paths = [str(OBSERVER), os.environ.get("PYTHONPATH")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CHECK_DIR": str(folder)}
    env |= {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "200"}
    if started:
        local = max(1, world // nodes)
        names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local}
        names |= {"LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local, "ROLE_RANK": rank}
        names |= {"GROUP_WORLD_SIZE": nodes, "ROLE_WORLD_SIZE": world, "ROLE_NAME": "default"}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CHECK_PORT": port}
        names |= {"TORCHELASTIC_RUN_ID": "check", "TORCHELASTIC_RESTART_COUNT": 0}
        names |= {"TORCHELASTIC_MAX_RESTARTS": 0}
        env |= {k: str(v) for k, v in names.items()}
    return env


def start(script, words, env, out, err):
    """Start a process; return its id. (The bench replaces this by a fork, which is faster.)"""
    command = [sys.executable, str(script), *words]
    with open(out, "wb") as o, open(err, "wb") as e:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=o, stderr=e, start_new_session=True
        )
    process.returncode = 0  # wait() below asks the system itself
    return process.pid


def adopt_orphans():
    """Become the parent of what the script leaves behind (Linux), so that it can be ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def marked(folder, pids=()):
    """Return {pid: (state, ticks)} of all processes of this run; {} without /proc."""
    found, mark = {}, f"CHECK_DIR={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) in pids or mark in (path / "environ").read_bytes() + b"\0":
                stat = (path / "stat").read_text().rpartition(")")[2].split()
                if stat[0] not in "ZX":
                    found[int(path.name)] = (stat[0], int(stat[11]) + int(stat[12]))
        except OSError:
            continue
    return found


def end_all(folder, pids):
    """Kill every process of this run, until there is none."""
    for _ in range(50):
        alive = set(marked(folder)) | set(pids)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if not alive - set(pids):
            break
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)


def answers(folder, number, wanted):
    """Ask all ranks where they are; return {rank: answer} of those that answer within 3 s."""
    with open(folder / "question", "a") as file:
        file.write("?")
    found, deadline = {}, time.monotonic() + 3
    while time.monotonic() < deadline and len(found) < wanted:
        time.sleep(0.2)
        for file in folder.glob("*.jsonl"):
            text = file.read_text(errors="replace")
            for line in text.splitlines()[-3:]:
                if f'"asked": {number},' in line and line.endswith("}"):
                    found[int(file.stem)] = json.loads(line)
    return found


def rank_files(folder):
    """Return {pid: rank} of the processes that have joined a group, or try to."""
    ranks = {}
    for file in folder.glob("*.jsonl"):
        number = judge.rank_of(judge.events_of(file))
        if number is not None:
            ranks[int(file.stem)] = number
    return ranks


def run(script, words, ranks, nodes, timeout, started, stop=0, starter=start):
    """Run the script and return its trace. started: we start the ranks, not the script itself."""
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as folder:
        folder, begun, port, pids, codes = Path(folder), time.monotonic(), free_port(), {}, {}
        try:
            for rank in range(ranks if started else 1):
                env = environment(folder, rank, ranks, nodes, port, started)
                env |= {"CHECK_STOP": str(stop)} if stop else {}
                out, err = folder / f"out.{rank}", folder / f"err.{rank}"
                pids[rank] = starter(script, words, env, out, err)
            hang, timed_out = watch(folder, pids, codes, begun + timeout)
            left = left_behind(folder) if len(codes) == len(pids) else []
        finally:
            end_all(folder, [pid for rank, pid in pids.items() if rank not in codes])
        errors = {rank: (folder / f"err.{rank}").read_text(errors="replace") for rank in pids}
        trace = judge.read(folder, Path(script).resolve(), nodes=nodes, codes=codes, errors=errors)
        trace.hang, trace.left, trace.timed_out = hang, left, timed_out
        trace.seconds = time.monotonic() - begun
        return trace


def watch(folder, pids, codes, deadline):
    """Wait for the processes, and fill codes; return (answers of a hang or None, timed out?)."""
    sign, moved, looked, asked, grace = None, time.monotonic(), 0.0, 0, None
    calls, same = None, 0
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(done[1])
        now = time.monotonic()
        if any(codes.values()):
            grace = grace or now + GRACE
        if now > deadline:
            return where_they_are(folder, asked + 1, pids, certain=False), True
        if grace and now > grace:
            return None, False
        if now - looked > 0.5:
            looked, alive = now, marked(folder, pids.values())
            logs = sum(file.stat().st_size for file in folder.iterdir())
            ticks = sum(ticks for _, ticks in alive.values())
            working = any(state in "RD" for state, _ in alive.values())
            few = 1 + 2 * (now - moved)  # our own threads wake up, too
            if sign is None or working or logs != sign[0] or abs(ticks - sign[1]) > few:
                sign, moved = (logs, ticks), now
        if now - moved > IDLE:
            asked += 1
            if hang := where_they_are(folder, asked, pids):
                before, calls = calls, [a and judge.waits(a) for a in hang.values()]
                same = same + 1 if calls == before else 1
                if same == 3 or not judge.same_call(calls):  # one call of all may be slow
                    return hang, False
            moved = time.monotonic()
        time.sleep(0.05)
    return None, False


def left_behind(folder):
    """Return the commands of processes that go on 10 s after the script has ended."""
    deadline = time.monotonic() + 10
    while (alive := marked(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [command_of(pid) or str(pid) for pid in alive]


def where_they_are(folder, number, pids, certain=True):
    """Return {rank: answer} of a hang; None while a rank works or sleeps outside a collective."""
    ranks = rank_files(folder)
    alive = marked(folder, {*ranks, *pids.values()})
    found = answers(folder, number, sum(pid in alive for pid in ranks))
    result = {rank: found.get(pid) for pid, rank in ranks.items()}
    silent = any(pid in alive and pid not in found for pid in ranks)
    late = [r for r, pid in pids.items() if pid in alive and pid not in ranks and len(pids) > 1]
    result |= dict.fromkeys(late, {"frames": [], "entries": [], "status": {}})
    stuck = [judge.waits(a) for a in result.values() if a]
    if silent or not any(stuck) or (certain and not all(stuck)):
        return None
    return result


def command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


# ---- further runs --------------------------------------------------------------------------------


class Stash:
    """The files that the first run wrote: out of the way while others run, then put back."""

    def __init__(self, trace):
        self.folder = tempfile.TemporaryDirectory(prefix="check-files-")
        self.existed, self.made, self.kept = self.written(trace), self.folders(trace), {}
        for number, path in enumerate(filter(os.path.isfile, self.existed)):
            self.kept[path] = shutil.copy2(path, f"{self.folder.name}/{number}")

    @staticmethod
    def written(trace):
        """Return {path: was it there before}."""
        events = [e for rank in trace.ranks for e in rank.all("write")]
        return {e["path"]: e["existed"] for e in reversed(events)}

    @staticmethod
    def folders(trace):
        return {e["path"] for rank in trace.ranks for e in rank.all("mkdir")}

    def was_there(self, path):
        """Say whether there was such a file before the first run, or one in such a folder."""
        return any(old and f"{p}/".startswith(f"{path}/") for p, old in self.existed.items())

    def __enter__(self):
        self.clear(self.existed, self.made)
        return self

    def clear(self, paths, folders):
        for path, existed in paths.items():
            if not existed:
                Path(path).unlink(missing_ok=True)
        for path in sorted(folders, reverse=True):  # the inner ones first
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def __exit__(self, *_):
        for path in sorted(self.made):
            os.makedirs(path, exist_ok=True)
        for path, copy in self.kept.items():
            shutil.copy2(copy, path)
        self.folder.cleanup()


def more_runs(trace, args, started, limit, starter):
    """Run the first steps on one rank; kill the script after a checkpoint and start it again."""
    healthy = trace.ranks and trace.ranks[0].steps and not trace.hang and not trace.timed_out
    if not healthy or any(trace.codes.values()) or trace.world < 2:
        trace.resumed = "the first run did not end well"
        return
    begun, limit = time.monotonic(), min(limit, 2 * trace.seconds + MORE)

    def again(ranks, stop=0):
        seconds = max(1, limit - (time.monotonic() - begun))
        options = (ranks, args.nodes if ranks > 1 else 1, seconds, started, stop, starter)
        return run(args.script, args.arguments, *options)

    total = len(trace.ranks[0].steps)
    saves = [e for e in trace.ranks[0].all("save") if 0 < e["steps"] < total]
    loads = [e for rank in trace.ranks for e in rank.all("load")]
    with Stash(trace) as stash:
        if started:
            trace.alone = again(1, stop=3)
            stash.clear(stash.written(trace.alone), stash.folders(trace.alone))
        if not re.search(r"load|resume|restore|checkpoint", trace.source):
            trace.resumed = "nothing in the script reads a checkpoint"
        elif not saves:
            trace.resumed = "no checkpoint was saved before the last step"
        elif any(stash.was_there(e["path"]) for e in [*saves, *loads]):
            trace.resumed = "the checkpoint was there before: the first run went on from it"
        else:
            early = [e for e in saves if e["steps"] + 2 <= total]  # epoch 1 hides what is forgotten
            saved = early[-2] if len(early) > 2 else (early or saves)[-1]  # and so does the last
            later = [e["steps"] for e in saves if e["steps"] > saved["steps"]]
            killed = again(args.nproc, stop=min([saved["steps"] + 2, total, *later]))
            second = again(args.nproc)
            trace.resumed = {"whole": trace, "killed": killed, "again": second, "saved": saved}
            if not (killed.timed_out or second.timed_out):
                trace.goes_on = judge.goes_on(trace, second)
            if trace.goes_on is False:
                trace.resumed = "the second run did not start from what the first one had saved"
            for other in (killed, second):
                new = {path: path in stash.existed for path in stash.written(other)}
                stash.clear(new, stash.folders(other) - stash.made)


def check(args, starter=start, more=True):
    """Run the script as often as it takes; return the trace of the first run and the results."""
    begun, started = time.monotonic(), not starts_ranks(args.script)
    if not args.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    trace = run(
        args.script, args.arguments, args.nproc, args.nodes, args.timeout, started, starter=starter
    )
    if more:
        more_runs(trace, args, started, args.timeout - (time.monotonic() - begun), starter)
    return trace, judge.judge(trace)


def main():
    args = parse_args()
    if args.explain:
        chosen = next(c for c in judge.CHECKS if c.name == args.explain)
        print(textwrap.fill(f"{chosen.name}: {chosen.text}", 88), f"Read: {chosen.read}", sep="\n")
        return 0
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # run() ends what it has started
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    begun = time.monotonic()
    trace, results = check(args)
    for r in results:
        place = f"({judge.short(r['where'])})  " if r["where"] else ""
        print(f"{r['verdict']:8}  {r['check']:13}  {r['evidence']}  {place}read: {r['read']}")
    broken = any(r["verdict"] == judge.BROKEN for r in results)
    if args.json:
        result = {"version": 1, "script": args.script, "nproc": args.nproc}
        result |= {"exit_codes": [trace.codes.get(rank) for rank in range(len(trace.errors))]}
        result |= {"timed_out": trace.timed_out, "seconds": round(time.monotonic() - begun, 1)}
        result |= {"checks": results}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if trace.timed_out:
        text = f"the run did not end in --timeout {args.timeout:g} s, so the end of it was not seen"
        print(f"check.py: {text}: take fewer epochs or data, or a longer time", file=sys.stderr)
    elif any(trace.codes.values()) and not broken:
        print(f"check.py: the script failed: {judge.last_line(trace)}", file=sys.stderr)
    if broken:
        return 1
    return 2 if trace.timed_out or any(trace.codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
