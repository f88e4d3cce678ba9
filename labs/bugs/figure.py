"""Draw how many of the bench's faulty scripts each tool names, notices, or passes.

python labs/bugs/figure.py               writes results/figures/bugs.svg
"""

import argparse
import csv
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
import figures  # noqa: E402  the style of all figures

from labs.bugs import bugs  # noqa: E402

# What bench.py calls a verdict, by its first words; the first kind that fits counts.
KINDS = {"names it": "right|names|traceback", "notices": "hang|crash$|ends|exit|wrong|says"}
KINDS |= {"crashes itself": "crashes", "passes it": ""}


def counts(lines: list[dict[str, str]]) -> pd.DataFrame:
    """Return for each tool how many faulty scripts it names, notices ...: the latest verdicts."""
    found = pd.DataFrame(0, index=bugs.TOOLS, columns=list(KINDS))
    faulty = [line for line in lines if line["check"]]
    for (tool, _), verdict in bugs.verdicts(faulty).items():
        kind = next(kind for kind, words in KINDS.items() if re.match(words, verdict))
        found.loc[tool, kind] += 1
    return found


def draw(found: pd.DataFrame) -> plt.Figure:
    figure = plt.figure(figsize=(8, 2.4), layout="none")
    ax = figure.add_axes((0.1, 0.2, 0.68, 0.75))
    left = found.cumsum(axis=1) - found
    for index, kind in enumerate(found):
        ax.barh(found.index, found[kind], 0.7, left[kind], label=kind, **figures.area(index))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    figures.finish(ax, xlabel=f"of {found.sum(axis=1).max()} faulty scripts")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=bugs.RESULTS)
    parser.add_argument("--out", type=Path, default=figures.RESULTS / "figures")
    args = parser.parse_args()
    plt.switch_backend("svg")
    args.out.mkdir(parents=True, exist_ok=True)
    with args.csv.open() as file:
        figure = draw(counts(list(csv.DictReader(file))))
    figure.savefig(args.out / "bugs.svg", metadata={"Date": None})
    print("wrote bugs.svg")


if __name__ == "__main__":
    main()
