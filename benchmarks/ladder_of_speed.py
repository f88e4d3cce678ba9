"""What does each part of topics/fast.py bring? It switches them on one at a time, and keeps them.

    python benchmarks/ladder_of_speed.py --devices 1 4 --model resnet50 --image-size 224 \\
        --batch-size 256 --images 2048 --num-workers 4
    python benchmarks/ladder_of_speed.py --help        what else

The first row has only DDP, in float32. It adds to results/ladder_of_speed.csv, a row at a time.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import scaling  # noqa: E402

import common  # noqa: E402

# On the CPU the parts that are about the GPU change nothing.
PARTS = ["tf32", "bf16", "channels_last", "autotune", "fused", "prefetch", "bucket_view"]
PARTS += ["static_graph", "compile"]
CPU_PARTS = [part for part in PARTS if part not in ("tf32", "autotune")]


def main() -> None:
    options = scaling.parser()
    options.description, options.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    options.add_argument("--model", default="small")
    options.add_argument("--parts", nargs="+", default=PARTS if common.gpu_count() else CPU_PARTS)
    options.add_argument("--csv", type=Path, default=ROOT / "results" / "ladder_of_speed.csv")
    args = options.parse_args()
    works = []
    for devices in args.devices:
        for count in range(len(args.parts) + 1):
            on = args.parts[:count]
            off = ",".join(part for part in PARTS if part not in on)
            own = {"script": "topics/fast.py", "devices": devices, "model": args.model}
            own |= {"precision": next((p for p in ("bf16", "tf32") if p in on), "fp32")}
            extra, added = [f"--without={off}", *args.extra], on[-1] if on else ""
            works.append((scaling.work_of(args, **own), extra, {"added": added}))
    scaling.run_all(works, args)


if __name__ == "__main__":
    main()
