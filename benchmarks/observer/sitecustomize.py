"""Watches a script from outside. scaling.py puts this folder on PYTHONPATH and sets OBSERVE=FOLDER.

Python imports sitecustomize when it starts: in the ranks of torchrun, mp.spawn and Lightning too.
Each rank that calls common.seconds_since(), which is once an epoch, appends a line to
FOLDER/RANK.jsonl:

seconds          what the call returned: of the epoch's training
before_backward  seconds from the end of a step to the next backward pass (data, forward), summed
                 over the epoch's steps but the first. In the backward pass ranks wait for each
                 other: only before it does a slow one differ. By the CPU's clock; on CUDA by events
                 in the stream, read after the epoch, so that no step waits for them.
peak_memory      bytes: of tensors on a GPU, of the whole process on the CPU
backend          of the default process group, or "none"

SIGTERM_BROADCAST=off takes a collective out of Lightning; see without_broadcast().
"""

import importlib.machinery
import os
import sys


def watch(common):
    """Wrap what a step and an epoch call. Only here: torch is imported by now."""
    import json
    import time

    import torch
    from torch import distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    backward, seconds_since = torch.Tensor.backward, common.seconds_since
    spans, last, on_cuda = [], None, False  # last: when the last step or backward pass ended

    def now():
        if not on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(start, end):
        return start.elapsed_time(end) / 1e3 if on_cuda else end - start

    def observed_backward(self, *args, **options):
        nonlocal last, on_cuda
        on_cuda = self.is_cuda
        if last is not None:
            spans.append((last, now()))
        backward(self, *args, **options)
        last = now()  # gradients are accumulated: the next backward pass comes before the step

    def step_ended(*_):
        nonlocal last
        last = now()

    def observed_seconds_since(start, device):
        nonlocal last
        result = seconds_since(start, device)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            from resource import RUSAGE_SELF, getrusage  # not on Windows

            memory = getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        entry = {"seconds": result, "before_backward": sum(seconds(*span) for span in spans)}
        backend = dist.get_backend() if dist.is_initialized() else "none"
        entry |= {"peak_memory": memory, "backend": backend}
        with open(
            os.path.join(os.environ["OBSERVE"], f"{common.checks.rank()}.jsonl"), "a"
        ) as file:
            print(json.dumps(entry), file=file)
        spans.clear()
        last = None  # the evaluation comes before the next epoch's first step
        return result

    torch.Tensor.backward, common.seconds_since = observed_backward, observed_seconds_since
    register_optimizer_step_post_hook(step_ended)


def without_broadcast(loop):
    """Let Lightning not ask before each batch whether rank 0 has had SIGTERM.

    Its training loop broadcasts that before each batch and waits for the answer, so that no rank
    steps on alone (Lightning's pull request 20825); there is no public way to do without it
    (its issue 21487 asks for one).
    """
    loop._TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: None


AFTER = {"common": watch} if "OBSERVE" in os.environ else {}
if os.environ.get("SIGTERM_BROADCAST") == "off":
    AFTER["lightning.pytorch.loops.training_epoch_loop"] = without_broadcast


class AfterImport:
    """Lets a module be found and loaded as always, and calls its function of AFTER then."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in AFTER else None
        if spec:
            load, then = spec.loader.exec_module, AFTER.pop(name)
            spec.loader.exec_module = lambda module: (load(module), then(module))
        return spec


sys.meta_path.insert(0, AfterImport)
