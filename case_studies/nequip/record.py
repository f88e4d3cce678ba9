"""Train in four ways, on one rank or two, and record the errors in results/nequip.json.

python case_studies/nequip/record.py
"""

import csv
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import machine  # noqa: E402

# what is run -> the options of nequip-train
RUNS = {
    "1 rank": [],
    "2 ranks": ["trainer.devices=2"],
    "2 ranks, batch not divided": ["trainer.devices=2", "per_rank_batch_size=8"],
    "1 rank, without the strategy": ["~trainer.strategy"],
}


def read(folder):
    """Return the optimizer steps of a run and, for each epoch, its validation errors."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors = [
        {"forces_mae": float(row["val0_epoch/forces_mae"])}
        | {"total_energy_mae": float(row["val0_epoch/total_energy_mae"])}
        for row in rows
        if row["val0_epoch/forces_mae"]
    ]
    return {"steps": 1 + max(int(row["step"]) for row in rows), "epochs": errors}


def main():
    nequip_train = Path(sys.executable).with_name("nequip-train")
    record = {"machine": machine.describe(), "runs": {}}
    for package in ("nequip", "e3nn", "ase", "lightning"):
        record["machine"][package] = version(package)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "make_data.py", folder], check=True)
        for number, (name, options) in enumerate(RUNS.items()):
            out = f"{folder}/{number}"
            command = [nequip_train, "-cp", HERE, "-cn", "config", f"data_dir={folder}"]
            command += [f"hydra.run.dir={out}", *options]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            record["runs"][name] = read(out)
            print(name, record["runs"][name]["steps"], record["runs"][name]["epochs"][-1])
    text = json.dumps(machine.sealed(record), indent=1)
    (ROOT / "results" / "nequip.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
