"""Topic: two checkpoint files of a Lightning run: one that 00 to 03 read, and a crash-safe one.

--checkpoint FILE   Lightning's own file, to resume from. As it is, Lightning writes it to the
                    folder for temporary files and moves it: to another disk that is a copy, which
                    a crash cuts short. Here a CheckpointIO writes beside FILE, has the disk confirm
                    it (fsync), and renames it
--plain FILE        what 00 to 03 save and resume from: a callback writes it on rank 0

Standalone (no diff to show): it gives rung 04 a callback and a plugin.

Two processes on the CPU:   python -m topics.lightning_checkpoint --epochs 2 \
                                --checkpoint checkpoints/run.ckpt --plain checkpoints/run.pt
All GPUs:                   the same command
Resume it without ranks:    python 00_single_gpu.py --checkpoint checkpoints/run.pt
"""

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

sys.path.insert(0, f"{os.path.dirname(__file__)}/..")  # common.py is in the repo's root
import checks
import common

rung = importlib.import_module("04_lightning")  # no name that an import statement takes


class PlainCheckpoint(L.pytorch.callbacks.Checkpoint):  # so it comes after the Classifier's hooks
    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:  # with ddp each rank has all weights and momentum
            args = Namespace(**vars(module.args) | {"checkpoint": module.args.plain})
            optimizer = module.optimizers().optimizer  # without Lightning's wrapper
            common.save_checkpoint(args, trainer.current_epoch + 1, module.model, optimizer)


class AtomicCheckpointIO(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):  # rank 0 only
        path = Path(path).resolve()  # the file itself, where this is a link to it
        temporary = path.with_name(f"{path.name}.tmp")  # on the same disk, for os.replace
        with checks.writing(temporary, "--checkpoint"), open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def main(args):
    if not args.plain and not args.checkpoint:
        checks.fail("is about files: give --checkpoint, --plain or both")
    if args.plain and os.path.realpath(args.plain) == os.path.realpath(args.checkpoint or ""):
        checks.fail(f"{args.plain} cannot be both files: use another --plain")
    plugins = [*checks.lightning_trainer(args).get("plugins", []), AtomicCheckpointIO()]
    callbacks = [PlainCheckpoint()] if args.plain else []
    trainer = rung.main(args, callbacks=callbacks, plugins=plugins, enable_checkpointing=True)
    if trainer.is_global_zero:
        files = [path for path in (args.checkpoint, args.plain) if path and os.path.exists(path)]
        halves = [path for path in files if os.path.exists(f"{path}.tmp")]
        checks.conclude(
            f"files: {len(files)}, unfinished: {len(halves)}",
            "0 unfinished, at any moment",
            f"00 resumes from {args.plain}" if args.plain else f"04 resumes from {args.checkpoint}",
        )


if __name__ == "__main__":
    options = checks.lightning_options()
    options["strategy"] = ("ddp", *checks.MULTIPROCESSING_STRATEGIES)
    rung.record(main)(common.parse_args("lightning", **options, plain=""))
