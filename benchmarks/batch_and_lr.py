"""What a growing effective batch does to the accuracy, under three rules for the learning rate.

    python benchmarks/batch_and_lr.py

Runs topics/lr_scaling.py at 1, 4 and 16 times its batch, with several seeds, and adds every epoch
to results/batch_and_lr.csv. All runs see each sample equally often.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import machine  # noqa: E402
import scaling  # noqa: E402
import tour  # noqa: E402

BASE, LR = 24, 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rules", nargs="+", default=["none", "sqrt", "linear"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "batch_and_lr.csv")
    args = parser.parse_args()
    tour.end_like_ctrl_c()
    for factor in args.factors:
        for rule in args.rules[: 1 if factor == 1 else None]:  # at 1 all rules are one
            for seed in args.seeds:
                print(f"batch {factor} x {BASE}, {rule}, seed {seed}:", end=" ", flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    options = [f"--batch-size={factor * BASE}", f"--rule={rule}", f"--lr={LR}"]
                    options += [f"--epochs={args.epochs}", f"--warmup-epochs={args.warmup_epochs}"]
                    options += [f"--base-batch={BASE}", f"--seed={seed}"]
                    command = tour.commands("topics/lr_scaling.py", args.processes, 1)[0]
                    log = Path(folder, "log")
                    env = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
                    wrong = scaling.run([*command, *options, f"--log-json={log}"], env, 600)
                    if wrong:
                        sys.exit(wrong)
                    entries = [json.loads(line) for line in log.read_text().splitlines()]
                for entry in entries:
                    row = {"rule": rule, "factor": factor, "effective_batch": factor * BASE}
                    row |= {"lr": LR, "warmup_epochs": args.warmup_epochs}
                    for name in ("epoch", "train_loss", "test_accuracy", "seed"):
                        row[name] = entry[name]
                    scaling.append(args.csv, row | machine.describe())
                print(f"{entries[-1]['test_accuracy']:.1%}", flush=True)


if __name__ == "__main__":
    main()
