"""Make the data: shaken copper cells, with energies and forces of ASE's EMT potential.

Nothing is downloaded, and the seed is fixed: everybody gets the same frames.

    python case_studies/nequip/make_data.py            writes checkpoints/nequip/data
    python case_studies/nequip/make_data.py FOLDER     and data_dir=FOLDER for nequip-train
"""

import sys
from pathlib import Path

import numpy as np

try:
    from ase.build import bulk
    from ase.calculators.emt import EMT
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write
except ImportError:
    sys.exit("make_data.py: needs ase: pip install ase")

# Both numbers split evenly into 1, 2, 3, 4, 6, 8 ... ranks: else some frames would count twice.
FRAMES = {"train": 48, "val": 24}


def frame(random):
    """Return a cell of 4 atoms, stretched and shaken, with its energy and forces."""
    atoms = bulk("Cu", "fcc", a=3.6 * random.uniform(0.97, 1.03), cubic=True)
    atoms.positions += random.normal(scale=0.1, size=atoms.positions.shape)
    atoms.calc = EMT()
    labels = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    atoms.calc = SinglePointCalculator(atoms, **labels)  # write() keeps what this one holds
    return atoms


def main(folder):
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in FRAMES.items():
        path = folder / f"{name}.xyz"
        write(path, [frame(random) for _ in range(frames)], format="extxyz")
        print(f"{path}: {frames} frames of 4 atoms")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints/nequip/data"))
