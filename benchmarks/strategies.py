"""What does each way to share out the work cost in memory and in time? Two or more ranks of each.

    python benchmarks/strategies.py                    on what this machine has
    python benchmarks/strategies.py --devices 2 --model vit_b_16 --image-size 224 --batch-size 128
    python benchmarks/strategies.py --help             what else

It runs rung 02 and, for the same work, the topics and Lightning's strategies. A row each goes to
results/strategies.csv. The memory is the peak of the rank that took most: of tensors on a GPU, of
the whole process (Python and torch as well) on the CPU.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import scaling  # noqa: E402

import common  # noqa: E402

# script, its options and environment, and the device that it is for (None: any)
WAYS = [
    ("02_torchrun.py", "", None),
    ("topics/ddp_by_hand.py", "", None),
    ("topics/gradient_accumulation.py", "", None),
    ("topics/ddp_tuning.py", "--variant=bucket_view", None),
    ("topics/ddp_tuning.py", "--variant=bf16", None),
    ("topics/ddp_tuning.py", "--variant=powersgd", None),
    ("topics/ddp_tuning.py", "--variant=local_sgd", None),
    ("topics/mixed_precision.py", "--precision=bf16", None),
    ("topics/mixed_precision.py", "--precision=fp16", "cuda"),
    ("topics/zero_optimizer.py", "", None),
    ("topics/fsdp.py", "", None),
    ("topics/lightning_fsdp.py", "", None),
    ("topics/deepspeed_zero.py", "--stage=1", None),
    ("topics/deepspeed_zero.py", "--stage=3", None),
    ("04_lightning.py", "--strategy=ddp", None),
    ("04_lightning.py", "SIGTERM_BROADCAST=off --strategy=ddp", None),  # see observer/
    ("04_lightning.py", "--strategy=ddp_spawn", None),
    ("04_lightning.py", "--strategy=ddp_fork", None),
    ("topics/sync_once.py", "--backend=eager", None),
    ("04_lightning.py", "--strategy=fsdp", "cuda"),
    ("04_lightning.py", "--strategy=deepspeed_stage_2", "cuda"),
    ("topics/sync_once.py", "--strategy=ddp --backend=inductor", "cuda"),
    ("topics/sync_once.py", "--backend=inductor", "cuda"),
    ("topics/compile.py", "--order=inside", "cuda"),
    ("topics/compile.py", "--order=outside", "cuda"),
    ("topics/compile.py", "--order=once", "cuda"),
    ("00b_data_parallel.py", "", "cuda"),
]


def main() -> None:
    options = scaling.parser()
    options.description, options.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    options.set_defaults(devices=[max(2, common.gpu_count())], windows=3)
    options.add_argument("--model", default="wide")
    options.add_argument("--only", nargs="+", help="the ways whose name holds one of these words")
    options.add_argument("--csv", type=Path, default=ROOT / "results" / "strategies.csv")
    args = options.parse_args()
    device = "cuda" if common.gpu_count() else "cpu"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # each way compiles for itself
    works = []
    for devices in args.devices:
        for script, option, where in WAYS:
            name = f"{script} {option}"
            if where not in (None, device) or not any(word in name for word in args.only or [""]):
                continue
            precision = option.partition("--precision=")[2]
            own = {"script": script, "devices": devices, "model": args.model}
            own |= {"precision": precision or ("tf32" if device == "cuda" else "fp32")}
            extra = [*option.split(), *args.extra]
            works.append((scaling.work_of(args, **own), extra, {}))
    if not works:
        options.error(f"nothing to run: --only {' '.join(args.only)}")
    scaling.run_all(works, args)


if __name__ == "__main__":
    main()
