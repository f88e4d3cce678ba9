"""Train in several ways, on one rank or two, and add the errors to results/nequip.json.

python case_studies/nequip/record.py             all ways
python case_studies/nequip/record.py 0 7 8 9     these, counted from 0 in RUNS
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

COMPILED = "+training_module.model.compile_mode=compile"  # needs a C++ compiler
ODD = "data.val_file_path={folder}/val23.xyz"
# what is run -> the options of nequip-train; {folder} has the data and, by its number, each run
RUNS = {
    "1 rank": [],
    "2 ranks": ["trainer.devices=2"],
    "2 ranks, batch not divided": ["trainer.devices=2", "per_rank_batch_size=8"],
    "1 rank, without the strategy": ["~trainer.strategy"],
    "2 ranks, Lightning's own DDP": ["trainer.devices=2", "~trainer.strategy"],
    "2 ranks, 23 validation frames": ["trainer.devices=2", ODD],
    "its model, validated on 1 rank": [
        ODD,
        "run=[train,val]",  # nothing is left to train
        "+ckpt_path='{folder}/5/checkpoints/epoch=4-step=30.ckpt'",
    ],
    "1 rank, compiled": [COMPILED],
    "2 ranks, compiled": ["trainer.devices=2", COMPILED],
    "2 ranks, compiled, Lightning's own DDP": ["trainer.devices=2", COMPILED, "~trainer.strategy"],
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
    trained = [int(row["step"]) for row in rows if row.get("train_loss_step/weighted_sum")]
    return {"steps": 1 + max(trained, default=-1), "epochs": errors}


def main():
    nequip_train = Path(sys.executable).with_name("nequip-train")
    path = ROOT / "results" / "nequip.json"
    numbers = [int(word) for word in sys.argv[1:]] or range(len(RUNS))
    record = {"machine": machine.describe(), "runs": {}}
    for package in ("nequip", "e3nn", "ase", "lightning"):
        record["machine"][package] = version(package)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, HERE / "make_data.py", folder], check=True)
        frames = Path(folder, "val.xyz").read_text().splitlines(keepends=True)
        Path(folder, "val23.xyz").write_text("".join(frames[: 23 * len(frames) // 24]))
        for number in numbers:
            name, options = list(RUNS.items())[number]
            options = [word.replace("{folder}", folder) for word in options]
            out = f"{folder}/{number}"
            command = [nequip_train, "-cp", HERE, "-cn", "config", f"data_dir={folder}"]
            command += [f"hydra.run.dir={out}", *options]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            record["runs"][name] = read(out)
            print(name, record["runs"][name]["steps"], record["runs"][name]["epochs"][-1])
    records = [*machine.rows(path), machine.sealed(record)]  # what is there stays
    path.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
