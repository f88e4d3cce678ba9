"""What labs/check.py concludes from the events that observer/hooks/watch.py wrote down.

Each check is a function of the trace that returns (verdict, evidence, file:line). "not seen" means
that the evidence is missing, or that another check names the cause.
"""

from dataclasses import dataclass

from judge.collectives import collectives, last_line, same_call, short, waits
from judge.data import order, samples, sharding
from judge.evaluation import evaluation
from judge.launch import devices, port, resume, teardown
from judge.output import checkpoint, goes_on, loss, writers
from judge.schedule import learning_rate, precision, scheduler
from judge.trace import BROKEN, HOLDS, NOT_SEEN, events_of, rank_of, read
from judge.weights import accumulation, buffers, gradients, replicas, wrapper

__all__ = ["BROKEN", "CHECKS", "HOLDS", "NOT_SEEN", "events_of", "goes_on", "judge", "last_line"]
__all__ += ["rank_of", "read", "same_call", "short", "waits"]


@dataclass
class Check:
    """A check, what to read about it, and what --explain says."""

    name: str
    judge: object
    read: str
    text: str


# fmt: off
CHECKS = [
    Check("samples", samples, "topics/seeds_and_augmentation.py",
          "Each training sample is read once an epoch, over all ranks. Seen from the indices that "
          "each DataLoader draws, or from the rows themselves. The usual faults are a missing "
          "DistributedSampler, and one seed for all ranks where samples are drawn or changed."),
    Check("order", order, "02_torchrun.py",
          "A DistributedSampler gives the same order until set_epoch() tells it the epoch."),
    Check("replicas", replicas, "topics/debugging.py",
          "A checksum of the weights is compared between ranks before each step and at the end. "
          "Unequal replicas mean that each rank trains a model of its own."),
    Check("gradients", gradients, "topics/ddp_by_hand.py",
          "Each rank's own gradient is projected on fixed random vectors before any communication, "
          "and so is the gradient that the optimizer gets: it must be the mean of the first."),
    Check("wrapper", wrapper, "topics/sync_once.py",
          "DDP synchronises what it knew when it was made, and only where its own forward() was "
          "called: not model.module(x), not a layer added later, not under no_sync()."),
    Check("accumulation", accumulation, "topics/gradient_accumulation.py",
          "backward() adds gradients up; k micro-batches need a loss divided by k."),
    Check("buffers", buffers, "topics/sync_batchnorm.py",
          "Buffers, as BatchNorm's statistics, are not parameters: they differ between ranks where "
          "DDP is told not to send rank 0's."),
    Check("loss", loss, "topics/logging_metrics.py",
          "The printed number is compared with the losses of the backward passes: this rank's own, "
          "or the mean over ranks? One rank's may be printed, but must say so."),
    Check("evaluation", evaluation, "topics/evaluation.py",
          "A DistributedSampler pads, so that some samples are counted twice; and a metric of one "
          "rank's shard is no metric of the test set."),
    Check("writers", writers, "topics/logging_metrics.py",
          "Two ranks that write one file destroy each other's work."),
    Check("checkpoint", checkpoint, "common.py",
          "To go on after a stop needs weights, optimizer and epoch; keys that begin with module. "
          "or _orig_mod. fit only a wrapped model."),
    Check("resume", resume, "topics/preemption.py",
          "The script is killed after a checkpoint and started again: weights, samples, learning "
          "rate and number of steps must be those of a run that was not stopped."),
    Check("sharding", sharding, "03_multinode.py",
          "With --nodes 2 the ranks believe in two nodes: data cut by local rank are read twice."),
    Check("devices", devices, "03_multinode.py",
          "With --nodes 2: a GPU is chosen by local rank, for the global one counts all nodes. "
          "Read from the source, because no GPU is needed here."),
    Check("collectives", collectives, "docs/troubleshooting.md",
          "All ranks must make the same calls in the same order. A hang is ended and named: which "
          "rank waits where, and where the others are."),
    Check("learning-rate", learning_rate, "topics/lr_scaling.py",
          "The first steps are repeated on one rank. The learning rate may stay, or grow as the "
          "effective batch or its root; anything else was scaled twice."),
    Check("scheduler", scheduler, "topics/lr_scaling.py",
          "One scheduler step an epoch or an optimizer step, after the optimizer's."),
    Check("precision", precision, "topics/mixed_precision.py",
          "Clip after unscale_(), on all ranks, once a step, by the norm of the reduced gradient."),
    Check("teardown", teardown, "docs/troubleshooting.md",
          "destroy_process_group() at the end, and no process that goes on."),
    Check("port", port, "topics/manual_launch.sh",
          "A port in the source is taken as soon as two runs share a machine: the launcher's job."),
]
# fmt: on


def judge(trace):
    """Return one dictionary a check."""
    results = []
    for check in CHECKS:
        try:
            if not trace.ranks:
                verdict = NOT_SEEN, "no process made a process group that could be watched", None
            elif trace.world < 2 and check.name not in ("teardown", "port", "collectives"):
                verdict = NOT_SEEN, "one rank: there is nothing to compare", None
            else:
                verdict = check.judge(trace)
        except Exception as error:  # a bug of ours is no fault of the script
            verdict = NOT_SEEN, f"the checker failed: {type(error).__name__}: {error}", None
        entry = dict(zip(("verdict", "evidence", "where"), verdict, strict=True))
        results.append({"check": check.name} | entry | {"read": check.read})
    return results
