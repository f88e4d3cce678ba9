"""Hooks that note when a rank computes and when it communicates; labs/timeline.py draws it.

Each event is one line of JSON, written at once, in a file of this process in CHECK_DIR. On a GPU
the times are those of events in its stream, read after the last step that is drawn. The clock is
the machine's monotonic one, which all processes of a machine share.
"""

import functools
import itertools
import json
import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FOLDER, STEPS = os.environ["CHECK_DIR"], int(os.environ["TIMELINE_STEPS"])
HERE, STDLIB = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.__file__)
OPS = ["all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather"]
OPS += ["all_gather_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"]
OPS += ["scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"]
OPS += ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"]

compiling = torch.compiler.is_compiling
inside = threading.local()  # a collective: those that it calls are no further ones
calls = itertools.count()
hooked = weakref.WeakSet()  # DDP modules whose communication is watched


class State:
    pid = file = zero = None  # zero: (an event in the stream, the clock when it happened)
    forward = backward = stepping = started = None
    steps, waiting = 0, []  # waiting: events whose times a GPU still has to tell


def write(event):
    if State.pid != os.getpid():  # a fork inherits the file of its parent
        State.pid = os.getpid()
        State.file = os.open(f"{FOLDER}/{State.pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(State.file, f"{json.dumps(event)}\n".encode())


def note(kind, /, **fields):
    if State.zero:
        State.waiting.append({"e": kind} | fields)
    else:
        write({"e": kind} | fields)


def now():
    """Return the time; on a GPU an event, which its stream will reach later."""
    if not State.zero:
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def follow_gpu():
    torch.cuda.synchronize()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    event.synchronize()
    State.zero = event, time.monotonic()


def read_gpu():
    torch.cuda.synchronize()
    first, clock = State.zero
    for event in State.waiting:
        for key, value in event.items():
            if isinstance(value, torch.cuda.Event):
                event[key] = clock + first.elapsed_time(value) / 1e3
        write(event)
    State.waiting, State.zero = [], None


def where():
    """Return file:line of the nearest caller that is neither Python's, a package's nor ours."""
    frame = sys._getframe(1)
    while frame and (
        frame.f_code.co_filename.startswith((STDLIB, HERE, "<"))
        or "-packages/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return frame and f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# ---- communication -------------------------------------------------------------------------------


def collective(op, original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        if compiling() or getattr(inside, "call", False):
            return original(*args, **kwargs)
        inside.call, number = True, next(calls)
        group = kwargs.get("group") or next(
            (arg for arg in args if isinstance(arg, dist.ProcessGroup)), None
        )
        world = group is None or group is dist.group.WORLD
        note("call", id=number, op=op, start=now(), where=where(), world=world, sync=True)
        try:
            result = original(*args, **kwargs)
        finally:
            inside.call = False
        if isinstance(result, dist.Work):  # async_op=True
            note("async", id=number)
            result.get_future().then(lambda _: note("done", id=number, end=now()))
        else:
            note("done", id=number, end=now())
        return result

    return call


def watched(hook):
    """Return DDP's way to average a bucket, with a look at the clock before and after."""

    @functools.wraps(hook)
    def call(state, bucket):
        number, size = next(calls), bucket.buffer().nbytes
        note("call", id=number, op="bucket", start=now(), bytes=size, world=True, sync=False)
        inside.call = True
        try:
            future = hook(state, bucket)
        finally:
            inside.call = False

        def arrived(future):
            note("done", id=number, end=now())
            return future.value()

        return future.then(arrived)

    return call


def group_made(original):
    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        result = original(*args, **kwargs)
        write({"e": "rank", "rank": dist.get_rank(), "world": dist.get_world_size()})
        return result

    return init_process_group


def ddp_forward(original):
    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if not compiling() and self not in hooked:  # the script has no way of its own
            self.register_comm_hook(None, allreduce_hook)
        return original(self, *args, **kwargs)

    return forward


def comm_hook(original):
    @functools.wraps(original)
    def register_comm_hook(self, state, hook):
        hooked.add(self)
        return original(self, state, watched(hook))

    return register_comm_hook


# ---- computation ---------------------------------------------------------------------------------


def module_called(module, inputs):
    if State.forward is None and not State.backward and torch.is_grad_enabled() and not compiling():
        State.forward = now()


def observed_backward(original):
    @functools.wraps(original)
    def backward(tensors, *args, **kwargs):
        if compiling() or State.backward:
            return original(tensors, *args, **kwargs)
        first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        if first.is_cuda and not State.zero and State.steps < STEPS:
            follow_gpu()
            State.forward = None  # that time is of the other clock
        start = State.backward = now()
        if State.forward is not None:
            note("span", kind="forward", start=State.forward, end=start)
        try:
            result = original(tensors, *args, **kwargs)
        finally:
            State.forward = State.backward = None
        State.started = now()  # of the optimizer's own work, where it has called us
        note("span", kind="backward", start=start, end=State.started)
        return result

    return backward


def before_step(optimizer, args, kwargs):
    if not State.stepping and not compiling():
        State.stepping, State.started = optimizer, now()


def after_step(optimizer, args, kwargs):
    if State.stepping is optimizer:
        end = now()
        note("span", kind="optimizer", start=State.started, end=end)
        note("step", end=end)
        State.stepping = State.forward = None
        State.steps += 1
        if State.zero and State.steps == STEPS:
            read_gpu()


def next_batch(original):
    @functools.wraps(original)
    def __next__(self):
        start = now()
        data = original(self)
        State.forward = None
        note("span", kind="data", start=start, end=now())
        return data

    return __next__


def install():
    c10d = dist.distributed_c10d
    new = {"init_process_group": group_made(c10d.init_process_group)}
    new |= {op: collective(op, getattr(c10d, op)) for op in OPS if hasattr(c10d, op)}
    old = {name: getattr(c10d, name) for name in new}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed"):
            for word, original in old.items():
                if module.__dict__.get(word) is original:
                    setattr(module, word, new[word])
    DDP.register_comm_hook = comm_hook(DDP.register_comm_hook)
    DDP.forward = ddp_forward(DDP.forward)
    nn.modules.module.register_module_forward_pre_hook(module_called)
    torch.autograd.backward = observed_backward(torch.autograd.backward)
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    data = torch.utils.data.dataloader._BaseDataLoaderIter
    data.__next__ = next_batch(data.__next__)


install()
