"""Lab 4: predict how fast two, four and eight ranks are, from what measure.py found.

The task is in labs/4_scale_it/README.md. Run me: python starter.py
"""

import json
import sys
from pathlib import Path


def serial_part(whole, half):
    """Return the seconds of a step that do not shrink with the batch.

    whole, half: the seconds of a step with a batch, and with half of it. What shrinks, shrinks in
    proportion.
    """
    raise NotImplementedError("TODO 1")


def alpha_and_beta(small_bytes, small, large_bytes, large, ranks):
    """Return alpha (seconds) and beta (seconds a byte) from two all-reduces of these sizes.

    In a ring of n ranks an all-reduce has 2 (n - 1) rounds. In each a rank sends 1/n of the bytes:
    seconds = 2 (n - 1) (alpha + beta * bytes / n)
    """
    raise NotImplementedError("TODO 2")


def ring(size, ranks, alpha, beta):
    """Return the seconds of an all-reduce of size bytes."""
    raise NotImplementedError("TODO 3")


def step(ranks, whole, half, size, alpha, beta):
    """Return the seconds of a step in which the ranks share the batch, and nothing is hidden."""
    raise NotImplementedError("TODO 4")


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "small"
    try:
        rows = json.loads(Path("measured.json").read_text())[model]
        one, two = rows["1"], rows["2"]
    except (OSError, KeyError):
        sys.exit(f"first run measure.py --model {model}, on one process and on two")
    net = (two[name] for name in ("small_bytes", "small", "large_bytes", "large"))
    alpha, beta = alpha_and_beta(*net, 2)
    print(f"alpha {alpha * 1e6:.1f} microseconds | {1 / beta / 1e9:.2f} GB/s")
    serial = serial_part(one["whole"], one["half"])
    if serial > 0:
        print(f"never faster than {one['whole'] / serial:.1f} times")
    else:
        print("half a batch took less than half of the time: something else ran; measure again")
    for ranks in (2, 4, 8):
        seconds = step(ranks, one["whole"], one["half"], one["bytes"], alpha, beta)
        print(f"{ranks} ranks: predicted speedup {one['whole'] / seconds:.2f}")
    print(f"2 ranks: measured speedup {one['whole'] / two['together']:.2f}")
