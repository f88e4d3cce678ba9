"""Hooks that write down what a training process does; labs/check.py judges it afterwards.

Each event is one line of JSON, written at once, in a file of this process in CHECK_DIR. Nothing
here communicates, touches the random state or stops the script: a hook that fails says so and ends.
"""

import atexit
import builtins
import collections
import contextlib
import functools
import io
import json
import logging
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import traceback
import weakref
import zlib

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

FOLDER, STOP = os.environ["CHECK_DIR"], int(os.environ.get("CHECK_STOP", 0))
HERE, STDLIB = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.__file__)
SKETCHED = 200  # steps whose gradients are sketched; after them one of ten
FETCHED = 20  # batches of a process whose random numbers are noted

busy = threading.local()
since = collections.Counter()  # what happened since the last optimizer step
places = {}  # file:line of those
compiling = torch.compiler.is_compiling


# ---- the log -------------------------------------------------------------------------------------


class Log:
    pid = file = None

    def __call__(self, event, **fields):
        busy.now = True  # the audit hook must not see this open()
        try:
            if self.pid != os.getpid():  # a fork inherits the file of its parent
                self.pid = os.getpid()
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self.file = os.open(f"{FOLDER}/{self.pid}.jsonl", flags)
            line = json.dumps({"e": event, "t": time.monotonic()} | fields, default=str)
            os.write(self.file, f"{line}\n".encode())
        finally:
            busy.now = False


log = Log()


@functools.cache
def of_learner(filename):
    return not (filename.startswith((STDLIB, HERE, "<")) or "-packages/" in filename)


def where():
    """Return file:line of the nearest caller that is neither Python's, a package's nor ours."""
    frame = sys._getframe(1)
    while frame and not of_learner(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"


def caller():
    """Return the file that called a function of torch."""
    frame = sys._getframe(2)
    while frame.f_back and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename


def quiet(function):
    """Our own failure must never become the script's."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        except Exception:
            log("internal", text=traceback.format_exc())

    return call


def patch(owner, name, before=None, after=None):
    """Replace owner.name by one that calls before(*args) and after(result, *args) around it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args, **kwargs):
        if compiling():
            return original(*args, **kwargs)
        if before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, call)
    return original, call


# ---- numbers that stand for tensors --------------------------------------------------------------


def plain(tensor):
    """Return this rank's part of the tensor, which may be sparse or sharded."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def crc(tensors):
    """Return one checksum of the bits of these tensors."""
    value = 0
    for tensor in tensors:
        bits = plain(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(bits.numpy(), value)
    return value


@functools.cache
def directions(size):
    """Return fixed random vectors, the same on all ranks for all parameters of this size."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(4 if size <= 65536 else 1, size, generator=generator, dtype=torch.float32)


def sketch(tensor):
    """Return a few numbers that are linear in the tensor. (No matmul: autocast would round it.)"""
    flat = plain(tensor).cpu().reshape(-1).to(torch.float32)
    return (directions(len(flat)) * flat).sum(dim=1, dtype=torch.float64).tolist()


def first_tensor(data):
    """Return the first tensor with rows in a batch of any structure."""
    if isinstance(data, torch.Tensor):
        return data if data.dim() and data.device.type != "meta" else None
    values = data.values() if isinstance(data, dict) else data
    if isinstance(values, (list, tuple, type({}.values()))):
        return next((x for x in map(first_tensor, values) if x is not None), None)


@functools.cache
def row_weights(size):
    """Return fixed random numbers; of a row that is padded with zeros, the first ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def fingerprints(data):
    """Return one number for each row of the batch's first tensor."""
    tensor = first_tensor(data)
    if tensor is None or not len(tensor):
        return None
    rows = plain(tensor).cpu().reshape(len(tensor), -1).to(torch.float64)
    weights = row_weights(1 << max(16, rows.shape[1].bit_length()))[: rows.shape[1]]
    return [f"{x:.9e}" for x in (rows * weights).sum(dim=1).tolist()]


# ---- model and optimizer -------------------------------------------------------------------------

numbers = weakref.WeakKeyDictionary()  # optimizer, scheduler: which of its kind
optimizers, wrappers = [], []
names, hooked, frozen = {}, set(), []
local = {}  # id of a parameter: sketch of its gradient before any communication
wrapped, inner, roots = weakref.WeakSet(), weakref.WeakSet(), weakref.WeakSet()
inside = collections.Counter()
steps = collections.Counter()
shards = {}  # number of an optimizer: does it step a part of the weights?


def number(thing, kind):
    if thing not in numbers:
        numbers[thing] = places[kind] = places.get(kind, -1) + 1
    return numbers[thing]


@quiet
def own_gradient(parameter):
    if steps["all"] < SKETCHED or steps["all"] % 10 == 0:
        local[id(parameter)] = sketch(parameter.grad)


def follow(parameters):
    """Sketch each parameter's gradient as backward() leaves it; DDP reduces it after that."""
    for parameter in parameters:
        if id(parameter) not in hooked and parameter.requires_grad and parameter.is_leaf:
            hooked.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(own_gradient)
        elif id(parameter) not in hooked:
            frozen.append(parameter)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@quiet
def group_added(result, optimizer, *args, **kwargs):
    if number(optimizer, "optimizer") >= len(optimizers):
        optimizers.append(optimizer)  # final() needs it when the function that made it has ended
        log("optimizer", number=numbers[optimizer], kind=type(optimizer).__name__, where=where())
    follow(parameters_of(optimizer))
    follow_folders()


def steps_a_shard(parameters):
    """Say whether these are a part of the model's weights: by FSDP, or copied as by DeepSpeed."""
    if any(hasattr(p, "_local_tensor") for p in parameters):
        return True
    sizes = {id(p): p.numel() for module in roots for p in module.parameters()}
    copied = not any(id(p) in sizes or id(p) in local for p in parameters)
    got = any(p.grad is not None for p in parameters)
    return copied and got and sum(p.numel() for p in parameters) != sum(sizes.values())


def state_of(optimizer):
    """Return the tensors that the optimizer keeps beside the weights: moments, for instance."""
    states = [optimizer.state.get(p) or {} for p in parameters_of(optimizer)]
    return [x for s in states for _, x in sorted(s.items()) if isinstance(x, torch.Tensor)]


def only_fills(optimizer):
    """Say whether this step changes nothing: torch fills an optimizer's state so, to load it."""
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    still = all(group.get("lr", 1) == 0 for group in optimizer.param_groups)
    return still and not any(plain(g).any() for g in gradients)


@quiet
def before_step(optimizer, args, kwargs):
    if only_fills(optimizer):
        return
    # A resumed run's first step is compared with one of the stopped run. Of ZeRO it is the inner
    # optimizer, called last, whose state is kept.
    if STOP or number(optimizer, "optimizer") not in shards:
        places["state"] = crc(state_of(optimizer))
    if inside["step"] not in (0, id(optimizer)):  # of ZeRO, say: the outer one counts
        return
    inside["step"] = id(optimizer)
    places["weights"] = crc(parameters_of(optimizer))


@quiet
def after_step(optimizer, args, kwargs):
    if inside["step"] != id(optimizer):
        return
    inside["step"] = 0
    parameters = parameters_of(optimizer)
    event = {"optimizer": number(optimizer, "optimizer"), "weights": places.pop("weights", None)}
    groups = [group for group in optimizer.param_groups if "lr" in group]
    event["state"] = places.pop("state", None)
    event["lr"] = [float(group["lr"]) for group in groups]
    event["base"] = [float(group.get("initial_lr", group["lr"])) for group in groups]
    event |= {"since": dict(since), "where": where()}
    event |= {"places": {k: v for k, v in places.items() if k in since}}
    if event["optimizer"] not in shards:
        shards[event["optimizer"]] = steps_a_shard(parameters)
    event["sharded"] = shards[event["optimizer"]]
    event["layouts"] = len({str(getattr(p, "placements", None)) for p in parameters})
    if steps["all"] < SKETCHED or steps["all"] % 10 == 0:
        got = [p.grad for p in parameters]
        now = crc([torch.get_rng_state()])
        event["random"] = places.get("random") != now  # since the forward pass
        event["rounded"] = "autocast" in since or any(p.element_size() < 4 for p in parameters)
        buffers = [name for module in roots for name, _ in module.named_buffers()]
        event["norms"] = any(name.endswith("running_mean") for name in buffers)
        event["own"] = [local.get(id(p)) for p in parameters]
        event["applied"] = [None if g is None else sketch(g) for g in got]
        event["norm"] = sum(float(plain(g).double().norm()) ** 2 for g in got if g is not None)
        event["norm"] **= 0.5
    known = {id(p) for w in wrappers for p in w["trainable"]}
    if known:
        event["unknown"] = [i for i, p in enumerate(parameters) if id(p) not in known]
        event["trained"] = [i for i, p in enumerate(parameters) if p.requires_grad]
    event["names"] = [names.get(id(p)) for p in parameters] if steps["all"] < 2 else None
    log("step", **event)
    follow_folders()
    local.clear()
    since.clear()
    steps["all"] += 1
    if STOP and steps["all"] >= STOP:
        os.kill(os.getpid(), signal.SIGKILL)


def statistics(module):
    return [b for b in module.buffers() if b is not None]


@quiet
def wrapper_made(result, wrapper, *args, **kwargs):
    module = wrapper.module
    names.update({id(p): n for n, p in module.named_parameters()})
    wrappers.append({"module": weakref.ref(module), "trainable": []})
    wrappers[-1]["trainable"] += [p for p in module.parameters() if p.requires_grad]
    wrapped.add(module)
    follow(module.parameters())
    synced = getattr(wrapper, "broadcast_buffers", getattr(wrapper, "forward_sync_buffers", True))
    buffers = crc(statistics(module)) if statistics(module) else None
    log("wrapper", buffers=buffers, synced=bool(synced), where=where())


def forward_of_wrapper(original):
    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if compiling():
            return original(self, *args, **kwargs)
        if torch.is_grad_enabled():
            kind = "synced" if self.require_backward_grad_sync else "no_sync"
            since[kind] += 1
            places[kind] = where()
            places["last"] = kind
        inside["wrapper"] += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            inside["wrapper"] -= 1

    return forward


@quiet
def before_forward(module, args, grad):
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        since["autocast"] += 1
    if grad and "forward" not in since:
        since["forward"] += 1
        places["random"] = crc([torch.get_rng_state()])
    if grad and module in wrapped and not inside["wrapper"]:
        since["bypass"] += 1
        places["bypass"] = where()
    if module in wrapped and inside["wrapper"] and not module.training and not grad:
        evaluating(module)  # after DDP has sent rank 0's buffers
    if module in inner and (module not in wrapped or inside["wrapper"]):
        return
    if module not in roots and module not in inner:
        if next(module.parameters(), None) is None:
            inner.add(module)  # a loss function
            return
        roots.add(module)
        for child in module.modules():
            if child is not module:
                inner.add(child)
    event = {"train": module.training, "grad": grad, "where": where()}
    event["sharded"] = any(hasattr(p, "_local_tensor") for p in module.parameters())
    if not since_start["pass"]:
        event["rows"] = fingerprints(args)
    log("forward", **event)
    if not module.training and not grad and not isinstance(module, DDP):
        evaluating(module)


def evaluating(module):
    """Note once between two steps with which buffers this rank evaluates."""
    if places.get("evaluated") != steps["all"] and statistics(module):
        places["evaluated"] = steps["all"]
        log("evaluate", buffers=crc(statistics(module)), steps=steps["all"], where=where())


def forward_hook(module, args):
    if not compiling():
        before_forward(module, args, torch.is_grad_enabled())


def scalars(loss):
    """Return the factors at the root of this loss's graph, how its loss function reduces, and
    whether that has a weight for each class."""
    found, reduction, weighted, level = [], None, False, [loss.grad_fn]
    for _ in range(5):
        for node in filter(None, level):
            if node.name().startswith(("DivBackward", "MulBackward")):
                other = getattr(node, "_saved_other", None)
                try:
                    found.append(None if other is None else float(other))
                except (TypeError, ValueError, RuntimeError):
                    found.append(None)
            reduction = getattr(node, "_saved_reduction", reduction)
            if hasattr(node, "_saved_reduction"):
                weighted |= getattr(node, "_saved_weight", None) is not None
        # Below the loss function are the model's own divisions.
        above = [n for n in filter(None, level) if not hasattr(n, "_saved_reduction")]
        level = [n for node in above for n, _ in node.next_functions][:8]
    return found, reduction, weighted


@quiet
def before_backward(loss, *args, **kwargs):
    waiting, frozen[:] = frozen[:], []
    follow(waiting)
    since["backward"] += 1
    if loss.numel() == 1:
        factors, reduction, weighted = scalars(loss)
        factors = [f for f in factors if f is None or f != since["scale"]]  # a GradScaler's
        value = float(loss.detach()) / (since["scale"] or 1)
        kind = {"reduction": reduction, "weighted": weighted}
        log("backward", loss=value, factors=factors, where=where(), **kind)


@quiet
def final(*_):
    module = wrappers and wrappers[-1]["module"]()
    weights = [crc(parameters_of(o)) for o in optimizers]
    buffers = crc(statistics(module)) if module and statistics(module) else None
    log("final", weights=weights, buffers=buffers)


# ---- data ----------------------------------------------------------------------------------------

since_start = collections.Counter()


def to_base(dataset, index):
    """Return an index of a Subset (of a Subset ...) as one of the data set below."""
    while isinstance(dataset, torch.utils.data.Subset):
        index, dataset = dataset.indices[index], dataset.dataset
    return int(index)


def indices(iterator, index):
    one = isinstance(index, int) or not hasattr(index, "__iter__")
    try:
        return [to_base(iterator._dataset, i) for i in ([index] if one else index)]
    except (TypeError, ValueError, IndexError, KeyError):
        return None


@quiet
def index_drawn(index, iterator):
    queue = iterator.__dict__.setdefault("_check_queue", collections.deque())
    iterable = isinstance(iterator._dataset, torch.utils.data.IterableDataset)
    queue.append(None if iterable else indices(iterator, index))


def size_of(dataset):
    try:
        return len(dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


@quiet
def before_pass(loader):
    if getattr(loader, "_iterator", None) is not None:  # persistent workers
        loader._iterator.__dict__.get("_check_queue", collections.deque()).clear()


@quiet
def pass_begun(iterator, loader):
    since_start["pass"] += 1
    iterator._check_pass = since_start["pass"]
    sampler = loader.sampler
    sampler = sampler if getattr(loader, "batch_sampler", None) is None else loader.batch_sampler
    sampler = getattr(sampler, "sampler", sampler)
    base = loader.dataset
    while isinstance(base, torch.utils.data.Subset):
        base = base.dataset
    event = {"sampler": type(sampler).__name__, "epoch": getattr(sampler, "epoch", None)}
    event |= {"shuffle": getattr(sampler, "shuffle", None), "size": size_of(loader.dataset)}
    event |= {"replacement": bool(getattr(sampler, "replacement", False))}
    event |= {"replicas": getattr(sampler, "num_replicas", None), "batch": loader.batch_size}
    event |= {"subset": base is not loader.dataset, "base": size_of(base), "where": where()}
    event |= {"loader": number(loader, "loader"), "drop_last": loader.drop_last}
    event["counted"] = getattr(base, "epoch", None)  # by the data set itself
    log("pass", number=since_start["pass"], **event)


def next_batch(original):
    @functools.wraps(original)
    def __next__(self):
        try:
            data = original(self)
        except StopIteration:
            log("end", number=getattr(self, "_check_pass", 0))
            raise
        batch_read(self, data)
        return data

    return __next__


@quiet
def batch_read(iterator, data):
    queue = iterator.__dict__.get("_check_queue")
    index = queue.popleft() if queue else None
    event = {"number": getattr(iterator, "_check_pass", 0), "indices": index}
    tensor = first_tensor(data)
    since_start["batch"] += 1
    if index is None or since_start["batch"] <= SKETCHED:
        event["rows"] = fingerprints(data)
        if isinstance(data, (list, tuple)) and len(data) > 1:  # what augmentation leaves alone
            event["labels"] = fingerprints(data[-1])
    log("batch", count=len(index or (() if tensor is None else tensor)), **event)


@quiet
def random_states():
    """Return a checksum of each global random state."""
    found = [crc([torch.get_rng_state()]), zlib.crc32(repr(random.getstate()).encode())]
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        found.append(zlib.crc32(state[1].tobytes(), state[2]))  # the numbers, the place in them
    return found


def fetched(original):
    """Note from which random states a batch was made: a data loading worker, too, does this."""

    @functools.wraps(original)
    def fetch(self, index):
        since_start["fetch"] += 1
        if since_start["fetch"] > FETCHED:
            return original(self, index)
        before = random_states() or []
        data = original(self, index)
        states = [a for a, b in zip(before, random_states() or [], strict=False) if a != b]
        log("drawn", states=states, parent=os.getppid())
        return data

    return fetch


@quiet
def order_drawn(result, *args, **kwargs):
    if not since_start["pass"] and (place := where()):
        log("order", size=len(result), crc=crc([result]), where=place)


# ---- communication -------------------------------------------------------------------------------

COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "gather",
    "scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "all_gather_single",
    "reduce_scatter_single",
    "gather_into_tensor",
    "gather_single",
]


def collective(name, original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        if compiling() or inside["collective"]:
            return original(*args, **kwargs)
        called(name, args, kwargs)
        inside["collective"] += 1
        try:
            return original(*args, **kwargs)
        finally:
            inside["collective"] -= 1

    return call


@quiet
def called(name, args, kwargs):
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
    event = {"op": name, "where": where(), "group": group is not None}
    if tensor is not None:
        event |= {"count": tensor.numel(), "type": str(tensor.dtype)}
        if tensor.numel() == 1 and tensor.device.type != "meta":
            event["value"] = float(tensor.detach().real)
    if name in ("all_reduce", "reduce"):
        ops = [a for a in (*args, *kwargs.values()) if isinstance(a, type(dist.ReduceOp.SUM))]
        event["reduce"] = str(ops[0]).rpartition(".")[2] if ops else "SUM"
    log("collective", **event)


def group_made(original):
    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        method = kwargs.get("init_method") or next((a for a in args if isinstance(a, str)), None)
        port = os.environ.get("MASTER_PORT")
        event = {"method": method, "port": port, "given": os.environ.get("CHECK_PORT")}
        event |= {"rank": os.environ.get("RANK"), "library": not of_learner(caller())}
        log("init", **event, where=where())
        if backend and "nccl" in str(backend) and not torch.cuda.is_available():
            backend = "gloo"
        threading.Thread(target=answer, daemon=True).start()
        result = original(backend, *args, **kwargs)
        log("rank", rank=dist.get_rank(), world=dist.get_world_size())
        return result

    return init_process_group


def answer():
    """Wait until the checker asks; then write which call this rank is in. It may hang by then."""
    main, question = threading.main_thread().ident, f"{FOLDER}/question"
    asked = 0
    while True:
        time.sleep(0.5)
        if not os.path.exists(question) or asked == os.stat(question).st_size:
            continue
        asked = os.stat(question).st_size
        stack = traceback.extract_stack(sys._current_frames()[main])
        frames = [[f.filename, f.lineno, f.name] for f in reversed(stack)]
        recorded = {}
        with contextlib.suppress(Exception):  # no recorder while the group is made
            recorded = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
        entries = [
            {"op": e["profiling_name"], "id": e["collective_seq_id"], "sizes": e["input_sizes"]}
            | {"types": e.get("input_dtypes")}
            | {"frames": [[f["filename"], f["line"], f["name"]] for f in e["frames"]]}
            for e in recorded.get("entries", [])[-3:]
        ]
        status = {str(k): v for k, v in recorded.get("pg_status", {}).items()}
        log("answer", asked=asked, frames=frames, entries=entries, status=status)


@quiet
def group_ends(group=None):
    final()
    log("destroy", whole=group is None, where=where())


# ---- files, output, precision, scheduler ---------------------------------------------------------


def audit(event, args):
    if event not in ("open", "os.rename", "os.mkdir") or getattr(busy, "now", False):
        return
    busy.now = True
    try:
        if event == "os.mkdir":
            if where() and not os.path.exists(args[0]):
                log("mkdir", path=os.path.realpath(os.fsdecode(args[0])))
            return
        path, mode = (args[1], "rename") if event == "os.rename" else (args[0], args[1])
        if event == "open" and mode is None:
            flags = args[2] or 0
            mode = "w" if flags & os.O_WRONLY else "r+" if flags & os.O_RDWR else "r"
        if isinstance(path, (str, bytes, os.PathLike)) and mode != "r" and set(mode) & set("wax+n"):
            written(os.fsdecode(path), mode)
    finally:
        busy.now = False


NOISE = re.compile(
    r"^/(dev|proc|sys)/|__pycache__|\.pyc|\.lock$|torchinductor|/\.cache/|/\.config/"
)


@quiet
def written(path, mode):
    path = os.path.realpath(path)
    if path.startswith(FOLDER) or NOISE.search(path) or os.path.isdir(path):  # O_TMPFILE opens one
        return
    if (place := where()) and not NOISE.search(place):  # inductor's code writes headers elsewhere
        log("write", path=path, mode=mode, existed=os.path.exists(path), where=place)
        busy.now = True


def describe(thing, found, depth=0):
    """Add to found what a checkpoint holds."""
    if isinstance(thing, nn.Module):
        found |= {"weights": True, "whole": type(thing).__name__}
    elif isinstance(thing, dict):
        if {"state", "param_groups"} <= set(thing):
            found["optimizer"] = True
            return
        keys = [k for k, v in thing.items() if isinstance(v, torch.Tensor) and isinstance(k, str)]
        if keys and len(keys) * 2 >= len(thing) and "n_averaged" not in thing:
            found["weights"] = True
            for prefix in ("module.", "_orig_mod."):
                if all(k.startswith(prefix) for k in keys):
                    found["prefix"] = prefix
            return
        for key, value in thing.items():
            if re.search(r"epoch|step|iter|next|progress", str(key).lower()) and depth < 2:
                found["epoch"] = True
            if not re.search(r"arg|config|hparam|hyper", str(key).lower()) and depth < 3:
                describe(value, found, depth + 1)
    elif isinstance(thing, (list, tuple)) and depth < 3:
        for value in thing[:8]:
            describe(value, found, depth + 1)


@quiet
def saving(thing, f=None, *args, **kwargs):
    path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    if isinstance(path, (str, os.PathLike)) or isinstance(f, io.BytesIO):
        if path is f:
            written(os.fspath(path), "w")  # torch.save's own writer is not Python's open()
            busy.now = False
        found = {}
        describe(thing, found)
        path = os.path.realpath(path) if path else None
        log("save", path=path, found=found, where=where(), steps=steps["all"])


@quiet
def loading(f=None, *args, **kwargs):
    path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    if isinstance(path, (str, os.PathLike)):
        log("load", path=os.path.realpath(path), where=where(), steps=steps["all"])


@quiet
def planned(planner, state_dict, storage_meta=None, *args, **kwargs):
    """Note what torch.distributed.checkpoint saves, and in which folder."""
    path = getattr(storage_meta, "checkpoint_id", None)
    if isinstance(path, (str, os.PathLike)):
        found = {}
        describe(state_dict, found)
        log("save", path=os.path.realpath(path), found=found, where=where(), steps=steps["all"])


@quiet
def folder_read(reader, *args, **kwargs):
    log("load", path=os.path.realpath(reader.path), where=where(), steps=steps["all"])


def follow_folders():
    """Hook torch.distributed.checkpoint as soon as the script has imported it: that takes long."""
    name = "torch.distributed.checkpoint"
    planner, files = (sys.modules.get(f"{name}.{x}") for x in ("default_planner", "filesystem"))
    if planner and files and not since_start["folders"]:
        since_start["folders"] = 1
        patch(planner.DefaultSavePlanner, "set_up_planner", planned)
        patch(files.FileSystemReader, "read_metadata", folder_read)


@quiet
def printing(*values, sep=" ", end="\n", file=None, flush=False):
    if file in (None, sys.stdout, sys.stderr) and (place := where()):
        text = (sep or " ").join(map(str, values))
        if re.search(r"\d", text):
            log("print", text=text[:500], where=place)


@quiet
def logging_record(logger, record):
    if of_learner(record.pathname):
        text = record.getMessage()[:500]
        log("print", text=text, where=f"{os.path.abspath(record.pathname)}:{record.lineno}")


@quiet
def clipped_by(result, parameters, max_norm, total_norm, *args, **kwargs):
    clipped(total_norm, parameters, max_norm)


@quiet
def clipped(total, parameters=None, max_norm=None, *args, **kwargs):
    scaled = bool(since["scale"]) and not since["unscaled"]
    since["clips"] += 1
    limit = kwargs.get("clip_value", max_norm)
    total = None if total is None else float(plain(total))
    log("clip", norm=total, limit=float(limit), scaled=scaled, where=where())


def scaler_scales(scaler, *args, **kwargs):
    if scaler.is_enabled():
        since["scale"] = scaler.get_scale()


def scaler_unscales(scaler, *args, **kwargs):
    since["unscaled"] = 1


def scheduler_step(original):
    @functools.wraps(original)
    def step(self, *args, **kwargs):
        outermost = not inside["scheduler"]
        inside["scheduler"] += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            inside["scheduler"] -= 1
        if outermost:
            event = {"number": number(self, "scheduler"), "metric": bool(args or kwargs)}
            log("scheduler", scaled=since["scale"], where=where(), **event)
        return result

    return step


def scheduler_starts(original):
    @functools.wraps(original)
    def _initial_step(self, *args, **kwargs):
        inside["scheduler"] += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            inside["scheduler"] -= 1

    return _initial_step


def environ_set(environ, key, value):
    if key in ("MASTER_PORT", b"MASTER_PORT"):
        log("port", value=str(value), where=where())


def install():
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    patch(torch.optim.Optimizer, "add_param_group", after=group_added)
    patch(DDP, "__init__", after=wrapper_made)
    DDP.forward = forward_of_wrapper(DDP.forward)
    nn.modules.module.register_module_forward_pre_hook(forward_hook)
    patch(torch.Tensor, "backward", before_backward)

    data = torch.utils.data.dataloader
    patch(data._BaseDataLoaderIter, "_next_index", after=index_drawn)
    data._BaseDataLoaderIter.__next__ = next_batch(data._BaseDataLoaderIter.__next__)
    patch(data.DataLoader, "__iter__", before_pass, pass_begun)
    for kind in vars(torch.utils.data._utils.fetch).values():
        if isinstance(kind, type) and "fetch" in vars(kind):
            kind.fetch = fetched(kind.fetch)
    patch(torch, "randperm", after=order_drawn)

    c10d = dist.distributed_c10d
    replaced = {"init_process_group": group_made(c10d.init_process_group)}
    replaced["destroy_process_group"] = patch(c10d, "destroy_process_group", group_ends)[1]
    for name in COLLECTIVES:
        if hasattr(c10d, name):
            replaced[name] = collective(name, getattr(c10d, name))
    originals = {name: getattr(new, "__wrapped__", None) for name, new in replaced.items()}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed"):
            for name, new in replaced.items():
                if module.__dict__.get(name) is originals[name] or module is c10d:
                    setattr(module, name, new)

    for owner in (torch, torch.serialization):
        patch(owner, "save", saving)
        patch(owner, "load", loading)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        patch(torch.nn.utils, name, after=clipped)
    patch(torch.nn.utils, "clip_grads_with_norm_", after=clipped_by)
    patch(torch.amp.GradScaler, "scale", scaler_scales)
    patch(torch.amp.GradScaler, "unscale_", scaler_unscales)
    schedulers = torch.optim.lr_scheduler
    kinds = {kind for kind in vars(schedulers).values() if isinstance(kind, type)}
    for kind in kinds:
        if issubclass(kind, schedulers.LRScheduler) and "step" in vars(kind):
            kind.step = scheduler_step(kind.step)
    schedulers.LRScheduler._initial_step = scheduler_starts(schedulers.LRScheduler._initial_step)
    patch(builtins, "print", printing)
    patch(logging.Logger, "callHandlers", logging_record)
    patch(type(os.environ), "__setitem__", environ_set)
    sys.addaudithook(audit)
    atexit.register(lambda: dist.is_initialized() and final())
    log("start", argv=sys.argv, given=os.environ.get("CHECK_PORT"))


install()
