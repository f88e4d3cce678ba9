"""The tour: run every rung on this machine and compare what they print.

    python benchmarks/tour.py          on all GPUs; without one, 2 processes on the CPU
    python benchmarks/tour.py --help   what else

Any option it does not know goes to the rungs: --epochs 10, --seed 3 ... It exits with 1 if a rung
failed or its numbers are not those of 00.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
import machine  # noqa: E402

import checks  # noqa: E402
import common  # noqa: E402
import pairs  # noqa: E402

LOSS_TOLERANCE = 5e-5  # equal to 4 decimals


def commands(rung: str, processes: int, nodes: int) -> list[list[str]]:
    """Return the commands that start this rung or topic, one for each node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if rung.startswith("01"):
        return [[sys.executable, rung, f"--nproc={processes}"]]
    if rung.startswith("02"):
        return [[*torchrun, "--standalone", f"--nproc-per-node={processes}", rung]]
    if rung.startswith("03"):
        address = f"127.0.0.1:{checks.free_port()}"
        torchrun += [f"--nnodes={nodes}", f"--nproc-per-node={processes // nodes}"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}"]
        return [[*torchrun, rung] for _ in range(nodes)]
    if rung.startswith("04"):
        return [[sys.executable, rung, f"--devices={processes}"]]
    if rung.startswith("topics/"):
        module = rung.removesuffix(".py").replace("/", ".")
        return [[*torchrun, "--standalone", f"--nproc-per-node={processes}", "-m", module]]
    return [[sys.executable, rung]]


def stop(process: subprocess.Popen) -> None:
    """End a launcher, which leads a process group, and its ranks, if it has not ended by itself.

    torchrun puts each rank in a group of its own, so SIGKILL would leave them behind. It passes
    SIGTERM on, and kills a rank that is still there after 30 s.
    """
    for number, seconds in ((signal.SIGTERM, 45), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def end_like_ctrl_c() -> None:
    """Let SIGTERM, or a terminal that closes, end this program as Ctrl-C does: after its ranks.

    They would go on, and share the devices with whatever is measured next.
    """
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # not on Windows
        if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, as under nohup
            signal.signal(number, signal.default_int_handler)
    sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Who has interrupted a benchmark needs no traceback. Python still ends by SIGINT."""
    if kind is KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def run(rung: str, processes: int, options: list[str]) -> tuple[list[dict], float]:
    """Run a rung to its end; return its --log-json, [] if it failed, and its seconds."""
    env = dict(os.environ, OMP_NUM_THREADS="1", NVIDIA_TF32_OVERRIDE="0", PYTHONUNBUFFERED="1")
    nodes = 2 if processes % 2 == 0 else 1  # of 03: two launchers on this machine play two nodes
    gpus = common.gpu_count()
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "log", Path(folder) / "out"
        options = [*options, f"--log-json={log}"]
        start, started = time.perf_counter(), []
        with out.open("w") as file:
            for node, command in enumerate(commands(rung, processes, nodes)):
                if gpus and nodes == 2 and rung.startswith("03"):  # half of the GPUs each
                    half = range(node * processes // 2, (node + 1) * processes // 2)
                    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, half))
                process = subprocess.Popen(
                    [*command, *options],
                    cwd=ROOT,
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                started.append(process)
            try:
                codes = [process.wait(timeout=600) for process in started]
                failed = any(codes)
            except subprocess.TimeoutExpired:
                failed = True
            finally:
                for process in started:
                    stop(process)
        if failed:
            print(out.read_text(), file=sys.stderr)
            return [], time.perf_counter() - start
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        return entries, time.perf_counter() - start


def same(entries: list[dict], reference: list[dict]) -> bool:
    """Are these the numbers of 00? On GPUs one test sample more or less may be right."""
    slack = 1.5 / reference[0]["test_samples"] if common.gpu_count() else 0
    return len(entries) == len(reference) and all(
        abs(a["train_loss"] - b["train_loss"]) < LOSS_TOLERANCE
        and abs(a["test_accuracy"] - b["test_accuracy"]) <= slack
        and a["test_samples"] == b["test_samples"]
        for a, b in zip(entries, reference, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=common.gpu_count() or 2)
    parser.add_argument("--json", metavar="FILE", help="write what was measured to FILE")
    args, options = parser.parse_known_args()
    end_like_ctrl_c()
    rungs = sorted(path.name for path in ROOT.glob("[0-9]*.py"))
    if sys.platform == "win32":
        print("torchrun does not work on native Windows: 02 and 03 are left out (use WSL for them)")
        rungs = [rung for rung in rungs if not rung.startswith(("02", "03"))]
    before = {after.name: before for before, after in pairs.pairs()}

    begin, rows, record = time.perf_counter(), [], []
    for number, rung in enumerate(rungs, 1):
        print(f"[{number}/{len(rungs)}] {rung} ...", end=" ", flush=True)
        entries, seconds = run(rung, args.processes, options)
        print(f"{seconds:.0f} s" if entries else "FAILED", flush=True)
        if number == 1:
            reference = entries
        equal = bool(entries and reference) and same(entries, reference)
        numbers = [""] * 4
        if entries:
            last = entries[-1]
            # the first epoch warms up
            speed = statistics.median(e["samples_per_second"] for e in entries[1:] or entries)
            numbers = [str(last["world_size"]), f"{last['train_loss']:.4f}"]
            numbers += [f"{last['test_accuracy']:.1%}", f"{speed:.0f}"]
        # Lightning's header names no diff: its shape is another one
        neighbour = before.get(rung, ROOT / rungs[number - 2])
        diff = "+{} -{}".format(*pairs.changed(neighbour, ROOT / rung)) if number > 1 else ""
        verdict = ("yes" if equal else "NO") if entries else "FAILED"
        rows.append([rung, *numbers, f"{seconds:.0f}", diff, verdict])
        record.append(
            {"rung": rung, "seconds": round(seconds, 1), "same": equal, "epochs": entries}
        )

    titles = ["rung", "processes", "train loss", "test accuracy", "samples/s", "seconds"]
    titles += ["diff", "same numbers as 00?"]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    print()
    for row in [titles, ["-" * width for width in widths], *rows]:
        print(" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    print(f"\n{time.perf_counter() - begin:.0f} s in all")
    if args.json:
        table = {"machine": machine.describe(), "rungs": record}
        Path(args.json).write_text(json.dumps(machine.sealed(table), indent=1) + "\n")
    return 0 if all(row[-1] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
