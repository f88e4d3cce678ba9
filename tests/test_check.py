# ruff: noqa: E501  the edits of the script are as long as its lines
"""labs/check.py names the fault in a script, and no other; it finds none in a script without.

The ranks are forked from this process, which has imported torch: that takes 2 s instead of 15.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "labs"))

import check  # noqa: E402
import judge  # noqa: E402
from judge.collectives import collectives  # noqa: E402
from judge.trace import Trace  # noqa: E402

import ladder  # noqa: E402,F401  imports what the forked ranks need
from labs.bugs.bench import fork_watched  # noqa: E402


def checked(script, *words, nproc=2, nodes=1, timeout=60, more=True):
    """Return the trace and {check: result}. more: also on one rank, and killed and resumed."""
    own = [str(script), f"--nproc={nproc}", f"--nodes={nodes}", f"--timeout={timeout}"]
    args = check.parse_args([*own, "--", *words])
    trace, results = check.check(args, starter=fork_watched, more=more)
    inner = [e["text"] for rank in trace.ranks for e in rank.all("internal")]
    assert not inner, inner[0]
    assert not [r for r in results if "the checker failed" in r["evidence"]], results
    return trace, {r["check"]: r for r in results}


def broken(results):
    return {name for name, r in results.items() if r["verdict"] == judge.BROKEN}


# A whole training script. The cases below change a few lines of it.
SCRIPT = """
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    y = (x.sum(dim=1) > 0).long()
    train_set, test_set = TensorDataset(x, y), TensorDataset(x[:21], y[:21])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 8, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, 21, world_size)), 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    start = 0
    if os.path.exists("state.pt"):
        state = torch.load("state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["epoch"]
    for epoch in range(start, 3):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2)
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        scheduler.step()
        dist.all_reduce(total)
        model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in test_loader:
                sums += torch.tensor([(model.module(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}, accuracy {sums[0] / sums[1]:.4f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}
            torch.save(state, "state.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


def edited(tmp_path, *edits, script=SCRIPT):
    for old, new in edits:
        assert old in script, old
        script = script.replace(old, new)
    path = tmp_path / "train.py"
    path.write_text(script)
    return path


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    files = {"train.py", "part.py", "state.pt", "run.log"}
    left = {path.name for path in tmp_path.iterdir()} - files
    assert not left


def test_right_script_holds(tmp_path):
    trace, results = checked(edited(tmp_path))
    assert trace.codes == {0: 0, 1: 0}
    assert not broken(results), results
    seen = {name for name, r in results.items() if r["verdict"] == judge.HOLDS}
    assert set(results) - seen == {"accumulation", "buffers", "sharding", "devices"}


BY_HAND = [
    ("    model = DDP(model)\n", "    module = model\n"),
    ("model.module", "model"),
    (
        "            nn.utils",
        "            for p in model.parameters():\n"
        "                dist.all_reduce(p.grad)\n"
        "                p.grad /= world_size\n"
        "            nn.utils",
    ),
]
ACCUMULATE = [
    ("in train_loader:", "in train_loader:\n            micro = micro + 1"),
    ("        total = torch.zeros(2)\n", "        total = torch.zeros(2)\n        micro = 0\n"),
    ("            optimizer.zero_grad()\n", ""),
    ("            loss.backward()\n", "            (loss / 2).backward()\n"),
    (
        "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n            optimizer.step()\n",
        "            if micro % 2 == 0:\n"
        "                optimizer.step()\n"
        "                optimizer.zero_grad()\n",
    ),
]
NORM = ("        model = DDP", "        model = DDP")
TINY = ["--dataset=fake:96", "--image-size=8", "--epochs=2", "--batch-size=16", "--lr=0.01"]
BATCH_NORM = [("nn.Linear(8, 16), ", "nn.Linear(8, 16), nn.BatchNorm1d(16), ")]
OF_RANK_0 = (
    "        model.eval()\n",
    "        model.eval()\n        [dist.broadcast(b, src=0) for b in model.buffers()]\n",
)
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
SAVE = '            torch.save(state, "state.pt")\n'
EVALUATE = "                sums += torch.tensor([(model.module(inputs)"

STREAM = [
    ("    sampler = DistributedSampler(train_set)\n", ""),
    ("        sampler.set_epoch(epoch)\n", ""),
    (", sampler=sampler", ""),
    (
        "def main",
        "class Stream(torch.utils.data.IterableDataset):\n    def __init__(self, *args):\n        self.args = args\n\n"
        "    def __iter__(self):\n        x, y, rank, n = self.args\n        return iter([(x[i], y[i]) for i in torch.randperm(96, generator=torch.Generator().manual_seed(3))[rank::n]])\n\n\ndef main",
    ),
]

WINDOWS = [  # batches at random places of a long row of numbers, without a DataLoader
    ("    sampler = DistributedSampler(train_set)\n", "    torch.manual_seed(rank)\n"),
    ("        sampler.set_epoch(epoch)\n", ""),
    ("    train_loader = DataLoader(train_set, 8, sampler=sampler)\n", ""),
    (
        "    test_loader = DataLoader(Subset(test_set, range(rank, 21, world_size)), 8)\n",
        "    test_loader = [(x[rank:21:world_size], y[rank:21:world_size])]\n"
        "    long, draw = torch.arange(9000).sin(), lambda: torch.randint(8992, (8,))\n",
    ),
    (
        "in train_loader",
        "in ((torch.stack([long[i : i + 8] for i in draw()]), torch.zeros(8).long()) for _ in range(6))",
    ),
]
# Each rank has random numbers of its own, and changes its samples by them.
AUGMENT = [
    (
        "    sampler =",
        "    torch.manual_seed(rank)\n    train_set = Changed(train_set)\n    sampler =",
    ),
    (
        "def main",
        "class Changed(torch.utils.data.Dataset):\n    def __init__(self, data):\n        self.data = data\n\n"
        "    def __len__(self):\n        return len(self.data)\n\n"
        "    def __getitem__(self, i):\n        return self.data[i][0] + 0.1 * torch.randn(8), self.data[i][1]\n\n\ndef main",
    ),
]
SEEDED = ("    torch.manual_seed(rank)\n", "")
SCALER = [
    ("    start = 0\n", "    start = 0\n    scaler = torch.amp.GradScaler('cpu')\n"),
    (
        "                optimizer.step()\n",
        "                scaler.step(optimizer)\n                scaler.update()\n",
    ),
]

# Each fault: the check that must name it, words of the evidence, and what is changed.
FAULTS = {
    "equal seeds": ("samples", "steps two ranks train on the same rows", [*WINDOWS, SEEDED]),
    "equal seeds, but rank 0 evaluates": (
        "samples",
        "in other steps",
        [
            *WINDOWS,
            SEEDED,
            ("        model.train()\n", "        model.train()\n        rank or draw()\n"),
        ],
    ),
    "read in turn": (
        "samples",
        "in other steps",
        [
            *WINDOWS,
            (
                "in ((torch.stack([long[i : i + 8] for i in draw()])",
                "in ((long[128 * (6 * epoch + i) :][: 16 * 8].view(8, 16)[:, :8]",
            ),
            ("for _ in range(6))", "for i in range(rank, rank + 6))"),
        ],
    ),
    "order by rank": (
        "samples",
        "in other steps",
        [
            *WINDOWS,
            (
                "in ((torch.stack([long[i : i + 8] for i in draw()]), torch.zeros(8).long()) for _ in range(6))",
                "in ((torch.stack([long[i : i + 8] for i in part]), torch.zeros(8).long()) for part in torch.randperm(256)[rank::world_size].split(8))",
            ),
        ],
    ),
    "equal augmentation": ("samples", "equal seeds", [*AUGMENT, SEEDED]),
    "equal augmentation by workers": (
        "samples",
        "equal seeds",
        [*AUGMENT, SEEDED, ("sampler=sampler)", "sampler=sampler, num_workers=2)")],
    ),
    "gradients of an optimizer that is gone": (
        "gradients",
        "own",
        [
            *BY_HAND[:2],
            ("    dist.destroy_process_group()\n", ""),
            (
                "    main()\n",
                "    main()\n    __import__('gc').collect()\n    dist.destroy_process_group()\n",
            ),
        ],
    ),
    "not divided, in two lines": (
        "accumulation",
        "nothing is divided",
        [
            *ACCUMULATE,
            (
                "            (loss / 2).backward()\n",
                "            if micro % 2:\n                loss.backward()\n            else:\n                loss.backward()\n",
            ),
        ],
    ),
    "not divided, with a scaler": (
        "accumulation",
        "nothing is divided",
        [*ACCUMULATE, *SCALER, ("(loss / 2)", "scaler.scale(loss)")],
    ),
    "loss with counters": (
        "loss",
        "one rank",
        [
            (
                "            loss.backward()\n",
                "            loss.backward()\n            rank or print(f'Epoch: [{epoch}][ 1/6] loss {loss.item():.4f}')\n",
            )
        ],
    ),
    "no sampler": ("samples", "every rank reads", [("sampler=sampler)", "shuffle=True)")]),
    "half of the data": (
        "samples",
        "never read",
        [("sampler=sampler)", "sampler=range(rank * 24, rank * 24 + 24))")],
    ),
    "no set_epoch": ("order", "set_epoch", [("        sampler.set_epoch(epoch)\n", "")]),
    "seed by rank": (
        "replicas",
        "from the start",
        [*BY_HAND, ("    model = nn", "    torch.manual_seed(rank)\n    model = nn")],
    ),
    "lr by rank": ("replicas", "learning rates", [("lr=0.1", "lr=0.1 * (rank + 1)")]),
    "not wrapped": ("gradients", "own", BY_HAND[:2]),
    "sum": (
        "gradients",
        "sum over ranks",
        [*BY_HAND, ("                p.grad /= world_size\n", "")],
    ),
    "part by hand": (
        "gradients",
        "not synchronised",
        [*BY_HAND, ("for p in model.parameters():", "for p in model[0].parameters():")],
    ),
    "autograd.grad": (
        "gradients",
        "own",
        [
            (
                "            loss.backward()\n",
                "            gs = torch.autograd.grad(loss, list(model.parameters()))\n"
                "            for p, g in zip(model.parameters(), gs):\n"
                "                p.grad = g\n",
            )
        ],
    ),
    "mean of means": (
        "gradients",
        "mean of means",
        [
            ("DataLoader(train_set, 8,", "DataLoader(train_set, 8 - 4 * rank,"),
            (
                "for inputs, labels in train_loader",
                "for _, (inputs, labels) in zip(range(6), train_loader)",
            ),
        ],
    ),
    "module": (
        "wrapper",
        "past the wrapper",
        [("model(inputs), labels", "model.module(inputs), labels")],
    ),
    "layers": (
        "wrapper",
        "wrapper's forward",
        [
            (
                "model(inputs), labels",
                "model.module[2](model.module[1](model.module[0](inputs))), labels",
            )
        ],
    ),
    "no_sync for ever": (
        "wrapper",
        "no_sync",
        [
            (
                "            loss = F.cross_entropy(model(inputs), labels)\n",
                "            with model.no_sync():\n"
                "                loss = F.cross_entropy(model(inputs), labels)\n",
            )
        ],
    ),
    "head replaced": (
        "wrapper",
        "model was wrapped",
        [("    optimizer =", "    model.module[2] = nn.Linear(16, 2)\n    optimizer =")],
    ),
    "layer added": (
        "wrapper",
        "model was wrapped",
        [("    optimizer =", "    model.module.append(nn.Linear(2, 2))\n    optimizer =")],
    ),
    "unfrozen later": (
        "wrapper",
        "0.weight",
        [
            ("    model = DDP", "    model[0].requires_grad_(False)\n    model = DDP"),
            ("    optimizer =", "    model.module[0].requires_grad_(True)\n    optimizer ="),
        ],
    ),
    "cast": (
        "wrapper",
        "hooks",
        [("    optimizer =", "    model.double(); model.float()\n    optimizer =")],
    ),
    "optimizer before sharding": (
        "wrapper",
        "never gets",
        [
            ("    model = DDP(model)\n", ""),
            ("model.module", "model"),
            (
                "    scheduler =",
                "    from torch.distributed.fsdp import fully_shard\n    fully_shard(model, mesh=torch.distributed.init_device_mesh('cpu', (world_size,)))\n    scheduler =",
            ),
            ("        model.eval()\n", "        break\n"),
            (CLIP, ""),
        ],
    ),
    "stream not split": (
        "samples",
        "every rank reads",
        [
            (
                "TensorDataset(x, y), TensorDataset(x[:21]",
                "Stream(x, y, 0, 1), TensorDataset(x[:21]",
            ),
            *STREAM,
        ],
    ),
    "stream, workers": (
        "samples",
        "2 times",
        [
            (
                "TensorDataset(x, y), TensorDataset(x[:21]",
                "Stream(x, y, rank, world_size), TensorDataset(x[:21]",
            ),
            *STREAM,
            ("(train_set, 8", "(train_set, 8, num_workers=2"),
        ],
    ),
    "buffers from the start": (
        "buffers",
        "just been wrapped",
        [
            *BATCH_NORM,
            ("DDP(model)", "DDP(model, broadcast_buffers=False)"),
            ("    model = DDP", "    model[1].running_mean += rank\n    model = DDP"),
        ],
    ),
    "unused": (
        "wrapper",
        "unused",
        [
            (
                "    model = DDP(model)",
                "    model.register_parameter('extra', nn.Parameter(torch.ones(2)))\n    model = DDP(model)",
            )
        ],
    ),
    "optimizer of a copy": (
        "wrapper",
        "none of the wrapper",
        [
            (
                "    model = DDP",
                "    import copy\n    old, model = model, copy.deepcopy(model)\n    model = DDP",
            ),
            ("SGD(model.parameters()", "SGD(old.parameters()"),
        ],
    ),
    "not divided": ("accumulation", "nothing is divided", [*ACCUMULATE, ("(loss / 2)", "loss")]),
    "not divided, but the model divides": (
        "accumulation",
        "nothing is divided",
        [
            *ACCUMULATE,
            ("(loss / 2)", "loss"),
            ("model(inputs), labels", "model(inputs) / inputs.norm().clamp(max=2), labels"),
        ],
    ),
    "accumulation under no_sync": (
        "wrapper",
        "no_sync",
        [
            *ACCUMULATE,
            ("model(inputs), labels", "quiet(model, inputs), labels"),
            (
                "def main",
                "def quiet(model, x):\n    with model.no_sync():\n        return model(x)\n\n\ndef main",
            ),
        ],
    ),
    "buffers": (
        "buffers",
        "differ",
        [*BATCH_NORM, ("DDP(model)", "DDP(model, broadcast_buffers=False)")],
    ),
    "buffers in evaluation": ("buffers", "evaluate with different", BATCH_NORM),
    "tail not tested": (
        "evaluation",
        "5 samples are never tested: drop_last",
        [("range(rank, 21, world_size)), 8)", "range(rank, 21, world_size)), 8, drop_last=True)")],
    ),
    "loss of each step": (
        "loss",
        "one rank",
        [
            (
                "            loss.backward()\n",
                "            loss.backward()\n            rank or print(f'loss {loss.item():.4f}')\n",
            )
        ],
    ),
    "loss of rank 0": ("loss", "one rank", [("        dist.all_reduce(total)\n", "")]),
    "padded evaluation": (
        "evaluation",
        "21 samples are counted as 22",
        [
            (
                "Subset(test_set, range(rank, 21, world_size)), 8)",
                "test_set, 8, sampler=DistributedSampler(test_set, shuffle=False))",
            )
        ],
    ),
    "accuracy of rank 0": ("evaluation", "no reduction", [("        dist.all_reduce(sums)\n", "")]),
    "all save": (
        "writers",
        "ranks [0, 1]",
        [
            (
                "    dist.destroy",
                "    torch.save({'w': model.module.state_dict()}, 'run.log')\n    dist.destroy",
            )
        ],
    ),
    "all log": (
        "writers",
        "run.log",
        [
            (
                "        model.eval()\n",
                "        model.eval()\n        open('run.log', 'a').write('x')\n",
            )
        ],
    ),
    "keys": ("checkpoint", "module.", [("model.module.state_dict()", "model.state_dict()")]),
    "no optimizer": (
        "checkpoint",
        "no optimizer",
        [(', "optimizer": optimizer.state_dict()}', "}")],
    ),
    "fixed port": (
        "port",
        "29871",
        [("    dist.init", "    os.environ['MASTER_PORT'] = '29871'\n    dist.init")],
    ),
    "no destroy": ("teardown", "ranks [0, 1]", [("    dist.destroy_process_group()\n", "")]),
    "scheduler by rank": (
        "scheduler",
        "one for each rank",
        [
            (
                "        scheduler.step()\n",
                "        for _ in range(world_size):\n            scheduler.step()\n",
            )
        ],
    ),
    "scheduler first": (
        "scheduler",
        "before the optimizer",
        [
            ("        scheduler.step()\n", ""),
            ("        model.train()\n", "        model.train()\n        scheduler.step()\n"),
        ],
    ),
    "clip on rank 0": ("precision", "not all ranks", [(CLIP, CLIP.replace("nn.", "rank or nn."))]),
    "clip before the mean": (
        "precision",
        "its own norm",
        [
            *BY_HAND,
            (CLIP, ""),
            (
                "            for p in model.parameters()",
                CLIP + "            for p in model.parameters()",
            ),
        ],
    ),
    "clip before backward": (
        "precision",
        "before backward",
        [
            (CLIP, ""),
            ("            loss.backward()\n", CLIP + "            loss.backward()\n"),
            ("            optimizer.zero_grad()\n", ""),
        ],
    ),
    "clip scaled": (
        "precision",
        "unscale_",
        [
            ("            loss.backward()\n", "            scaler.scale(loss).backward()\n"),
            (
                "            optimizer.step()\n",
                "            scaler.step(optimizer)\n            scaler.update()\n",
            ),
            ("    start = 0\n", "    start = 0\n    scaler = torch.amp.GradScaler('cpu')\n"),
        ],
    ),
    "norm twice": (
        "precision",
        "summed over ranks",
        [
            (
                CLIP,
                "            norm = sum(p.grad.norm() ** 2 for p in model.parameters())\n"
                "            dist.all_reduce(norm)\n"
                "            for p in model.parameters():\n"
                "                p.grad *= min(1, 0.2 / norm.sqrt().item())\n",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name, tmp_path):
    check_name, words, edits = FAULTS[name]
    _, results = checked(edited(tmp_path, *edits), more=False)
    assert broken(results) == {check_name}, [r for r in results.values() if r["verdict"] != "holds"]
    assert words in results[check_name]["evidence"]


COLLECTIVES = {
    "missing": (
        "missing call",
        "all_reduce at train.py:53",
        [
            (
                "        dist.all_reduce(sums)\n",
                "        if rank == 0:\n            dist.all_reduce(sums)\n            dist.barrier()\n",
            )
        ],
    ),
    "misplaced": (
        "misplaced call",
        "rank 1 waits in",
        [
            (
                "        dist.all_reduce(sums)\n",
                "        if rank == 0:\n            dist.barrier()\n            dist.all_reduce(sums)\n"
                "        else:\n            dist.all_reduce(sums)\n            dist.barrier()\n",
            )
        ],
    ),
    "mismatch": (
        "argument mismatch",
        "",
        [
            (
                "        dist.all_reduce(sums)\n",
                "        dist.all_reduce(torch.zeros(2 + 5000 * rank))\n",
            )
        ],
    ),
    "uneven": (
        "uneven number of batches",
        "",
        [("sampler=sampler)", "sampler=range(rank, 96, world_size) if rank else range(0, 32, 2))")],
    ),
    "break": (
        "uneven number of batches",
        "",
        [
            (
                "            optimizer.zero_grad()\n",
                "            if rank and total[1] == 4:\n                break\n            optimizer.zero_grad()\n",
            )
        ],
    ),
}


COLLECTIVES["broadcast"] = (
    "argument mismatch",
    "broadcast",
    [
        (
            "        dist.all_reduce(sums)\n",
            "        dist.all_reduce(sums)\n        stop = torch.zeros(1 + rank)\n"
            "        dist.broadcast(stop, 0)\n        stop.item()\n",
        )
    ],
)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_hang_or_abort_is_named(name, tmp_path):
    kind, words, edits = COLLECTIVES[name]
    trace, results = checked(edited(tmp_path, *edits), more=False, timeout=30)
    evidence = results["collectives"]["evidence"]
    assert broken(results) == {"collectives"}, (results, trace.error[-2000:])
    assert kind in evidence and words in evidence, evidence


IN_RECORD = (
    "def main",
    "from torch.distributed.elastic.multiprocessing.errors import record\n\n\n@record\ndef main",
)
SLOW = {
    "before the group": ("    dist.init", "    if os.environ['RANK'] == '1':\n", 60),
    "before DDP": ("    model = DDP", "    if rank:\n", 60),
    "at the time-out": ("    model = DDP", "    while rank:\n", 5),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_rank_is_no_hang(name, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "IDLE", 1)
    before, condition, timeout = SLOW[name]
    slow = (before, f"{condition}        __import__('time').sleep(4)\n{before}")
    path = edited(tmp_path, IN_RECORD, slow)
    trace, results = checked(path, more=False, timeout=timeout)
    assert trace.timed_out == (timeout == 5) and not broken(results), results
    if trace.timed_out:
        assert "rank 1 is at train.py" in results["collectives"]["evidence"]


def test_one_call_of_all_ranks_is_no_mismatch():
    """Both are in DDP(), in the same call: nothing but the time says that it hangs."""
    entry = {"op": "gloo:all_gather", "sizes": [[1]], "id": 1, "frames": []}
    status = {"0": {"last_enqueued_collective": 1, "last_completed_collective": 0}}
    answer = {"entries": [entry], "status": status, "frames": [[__file__, 7, "main"]]}
    trace = Trace(Path(__file__), hang={0: answer, 1: answer}, errors={0: "", 1: ""})
    verdict, text, _ = collectives(trace)
    assert verdict == judge.BROKEN and text.startswith("no progress: rank 0 waits in all_gather")
    trace.timed_out = True
    assert collectives(trace)[0] == judge.NOT_SEEN


ODD = {
    "accumulation": [*ACCUMULATE],
    "accumulation with no_sync": [
        *ACCUMULATE,
        ("model(inputs), labels", "run(model, inputs, micro % 2), labels"),
        (
            "def main",
            "def run(model, x, quiet):\n    with model.no_sync() if quiet else nullcontext():\n        return model(x)\n\n\ndef main",
        ),
    ],
    "no_sync around backward": [
        (
            "            loss.backward()\n",
            "            with model.no_sync():\n                loss.backward()\n",
        )
    ],
    "reduced before backward": [
        (
            "            loss.backward()\n",
            "            dist.all_reduce(loss.detach())\n            loss.backward()\n",
        )
    ],
    "by hand": BY_HAND,
    "checkpointing": [
        ("F.cross_entropy(model(inputs)", "F.cross_entropy(model(inputs.requires_grad_())"),
        ("    model = DDP", "    model = Checkpointed(model)\n    model = DDP"),
        (
            "def main",
            "class Checkpointed(nn.Module):\n    def __init__(self, m):\n        super().__init__()\n        self.m = m\n\n"
            "    def forward(self, x):\n        from torch.utils.checkpoint import checkpoint\n        return checkpoint(self.m, x, use_reentrant=False)\n\n\ndef main",
        ),
    ],
    "frozen": [("    model = DDP", "    model[0].requires_grad_(False)\n    model = DDP")],
    "unused": [
        (
            "    model = DDP(model)",
            "    model.register_parameter('extra', nn.Parameter(torch.ones(2)))\n    model = DDP(model, find_unused_parameters=True)",
        )
    ],
    "ema": [
        (
            "    start = 0\n",
            "    start = 0\n    ema = torch.optim.swa_utils.AveragedModel(model.module)\n",
        ),
        (
            "        scheduler.step()\n",
            "        scheduler.step()\n        ema.update_parameters(model.module)\n",
        ),
    ],
    "windows": WINDOWS,
    "augmentation by workers": [*AUGMENT, ("sampler=sampler)", "sampler=sampler, num_workers=2)")],
    "equal seeds without augmentation": [
        ("    sampler =", "    torch.manual_seed(0)\n    sampler =")
    ],
    "divided, with a scaler": [
        *ACCUMULATE,
        *SCALER,
        ("(loss / 2)", "scaler.scale(loss / 2)"),
    ],
    "each rank prints": [
        (
            "        dist.all_reduce(total)\n",
            "        print(f'loss {total[0] / total[1]:.4f}')\n        dist.all_reduce(total)\n",
        ),
    ],
    "label of the rank": [
        (
            "        dist.all_reduce(total)\n",
            "        rank or print(f'[RANK{rank}] loss {total[0] / total[1]:.4f}')\n        dist.all_reduce(total)\n",
        ),
    ],
    "augmentation": [
        ("F.cross_entropy(model(inputs)", "F.cross_entropy(model(inputs + 0.1 * torch.randn(8))")
    ],
    "batch norm": [*BATCH_NORM, OF_RANK_0],
    "batch norm evaluated through DDP": [*BATCH_NORM, ("model.module(inputs)", "model(inputs)")],
    "weighted": [
        (
            "DistributedSampler(train_set)",
            "torch.utils.data.WeightedRandomSampler(torch.ones(96), 48, generator=torch.Generator().manual_seed(rank))",
        ),
        ("        sampler.set_epoch(epoch)\n", ""),
        (SAVE, ""),
    ],
    "iterable": [
        (
            "TensorDataset(x, y), TensorDataset(x[:21]",
            "Stream(x, y, rank, world_size), TensorDataset(x[:21]",
        ),
        *STREAM,
    ],
    "own part": [
        (
            "TensorDataset(x, y), TensorDataset(x[:21]",
            "TensorDataset(x[rank::world_size], y[rank::world_size]), TensorDataset(x[:21]",
        ),
        ("    sampler = DistributedSampler(train_set)\n", ""),
        ("        sampler.set_epoch(epoch)\n", ""),
        ("sampler=sampler", "shuffle=True"),
    ],
    "sliced by hand": [
        ("    sampler = DistributedSampler(train_set)\n", ""),
        (
            "        sampler.set_epoch(epoch)\n",
            "        order = torch.randperm(96)[rank::world_size].split(8)\n",
        ),
        ("    train_loader = DataLoader(train_set, 8, sampler=sampler)\n", ""),
        (
            "    test_loader = DataLoader(Subset(test_set, range(rank, 21, world_size)), 8)\n",
            "    test_loader = [(x[rank:21:world_size], y[rank:21:world_size])]\n",
        ),
        ("in train_loader", "in [(x[i], y[i]) for i in order]"),
    ],
    "rank 0 evaluates": [
        ("Subset(test_set, range(rank, 21, world_size))", "test_set"),
        ("        with torch.no_grad():\n", "        if rank == 0:\n"),
        ("                sums += torch", "                with torch.no_grad(): sums += torch"),
        ("        dist.all_reduce(sums)\n", ""),
    ],
    "all evaluate the last one": [
        ("range(rank, 21, world_size)", "range(rank, 20, world_size)"),
        (
            "        dist.all_reduce(sums)\n",
            "        dist.all_reduce(sums)\n"
            "        with torch.no_grad():\n"
            "            for inputs, labels in DataLoader(Subset(test_set, [20]), 8):\n"
            "                sums += torch.tensor([(model.module(inputs).argmax(1) == labels).sum(), 1])\n",
        ),
    ],
    "all evaluate": [
        ("Subset(test_set, range(rank, 21, world_size))", "test_set"),
        ("        dist.all_reduce(sums)\n", ""),
    ],
    "scaler": [
        ("            loss.backward()\n", "            scaler.scale(loss).backward()\n"),
        (CLIP, "            scaler.unscale_(optimizer)\n" + CLIP),
        (
            "            optimizer.step()\n",
            "            scaler.step(optimizer)\n            scaler.update()\n",
        ),
        ("    start = 0\n", "    start = 0\n    scaler = torch.amp.GradScaler('cpu')\n"),
    ],
    "autocast": [
        (
            "            loss = F.cross_entropy(model(inputs), labels)\n",
            "            with torch.autocast('cpu', torch.bfloat16):\n                loss = F.cross_entropy(model(inputs), labels)\n",
        )
    ],
    "bf16": [
        ("nn.Linear(16, 2))\n", "nn.Linear(16, 2)).bfloat16()\n"),
        ("torch.randn(96, 8)", "torch.randn(96, 8).bfloat16()"),
    ],
    "zero": [
        (
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "ZeRO(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)",
        ),
        (
            "def main",
            "from torch.distributed.optim import ZeroRedundancyOptimizer as ZeRO\n\n\ndef main",
        ),
        (
            "        if rank == 0:\n            print",
            "        optimizer.consolidate_state_dict(0)\n        if rank == 0:\n            print",
        ),
    ],
    "fsdp": [
        (
            "    model = DDP(model)\n",
            "    from torch.distributed.fsdp import fully_shard\n    fully_shard(model, mesh=torch.distributed.init_device_mesh('cpu', (world_size,)))\n",
        ),
        ("model.module", "model"),
        (
            "                sums += torch.tensor([(model(inputs)",
            "                model(inputs)\n                sums += torch.tensor([(model(inputs)",
        ),
        ("in test_loader:", "in [(x[:21], y[:21])]:"),
        (SAVE, ""),
        (
            '            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}\n            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}\n',
            "",
        ),
    ],
    "tensor parallel": [
        (
            "    model = DDP(model)\n",
            "    from torch.distributed.tensor import parallel as tp\n"
            "    plan = {'0': tp.ColwiseParallel(), '2': tp.RowwiseParallel()}\n"
            "    tp.parallelize_module(model, torch.distributed.init_device_mesh('cpu', (world_size,)), plan)\n",
        ),
        ("DistributedSampler(train_set)", "DistributedSampler(train_set, 1, 0)"),
        ("model.module", "model"),
        (CLIP, ""),
        ("Subset(test_set, range(rank, 21, world_size))", "test_set"),
        ("        dist.all_reduce(sums)\n", ""),
        (SAVE, ""),
    ],
    "copied shards": [
        (
            "    optimizer = torch.optim.SGD(model.parameters()",
            "    weights = list(model.parameters())\n"
            "    part = nn.utils.parameters_to_vector(weights).detach().chunk(world_size)[rank].clone()\n"
            "    parts = [torch.empty_like(part) for _ in range(world_size)]\n"
            "    optimizer = torch.optim.SGD([part]",
        ),
        ("            optimizer.zero_grad()\n", "            model.zero_grad()\n"),
        (CLIP, ""),
        (
            "            optimizer.step()\n",
            "            part.grad = nn.utils.parameters_to_vector([w.grad for w in weights]).chunk(world_size)[rank]\n"
            "            optimizer.step()\n"
            "            dist.all_gather(parts, part)\n"
            "            nn.utils.vector_to_parameters(torch.cat(parts), weights)\n",
        ),
        (SAVE, ""),
    ],
    "local sgd": [
        ("    model = DDP(model)\n", ""),
        ("model.module", "model"),
        (CLIP, ""),
        (
            "        dist.all_reduce(total)\n",
            "        for p in model.parameters():\n            dist.all_reduce(p.data)\n            p.data /= world_size\n        dist.all_reduce(total)\n",
        ),
    ],
    "two optimizers": [
        (
            "    scheduler =",
            "    other = nn.Linear(8, 2)\n    other = DDP(other)\n    second = torch.optim.Adam(other.parameters())\n    scheduler =",
        ),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            second.zero_grad()\n            F.cross_entropy(other(inputs), labels).backward()\n            second.step()\n",
        ),
    ],
    "labelled loss": [
        (
            "        dist.all_reduce(total)\n",
            "        print(f'rank {rank}: loss {total[0] / total[1]:.4f}')\n        dist.all_reduce(total)\n",
        ),
    ],
    "workers": [
        ("8, sampler=sampler", "8, sampler=sampler, num_workers=2, persistent_workers=True")
    ],
    "sequential": [
        ("DistributedSampler(train_set)", "DistributedSampler(train_set, shuffle=False)")
    ],
    "weights only": [
        (
            '            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}\n            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}\n',
            "            state = model.module.state_dict()\n",
        ),
        (
            '        state = torch.load("state.pt")\n        model.module.load_state_dict(state["model"])\n        optimizer.load_state_dict(state["optimizer"])\n'
            '        scheduler.load_state_dict(state["scheduler"])\n        start = state["epoch"]\n',
            "        pass\n",
        ),
    ],
    "compiled": [
        ("    model = DDP(model)\n", "    model = torch.compile(DDP(model), backend='eager')\n"),
        ("model.module", "model._orig_mod.module"),
    ],
    "headers of inductor": [
        (
            "        model.eval()\n",
            "        model.eval()\n"
            "        header = compile(\"open('run.log', 'a')\", '/tmp/torchinductor_me/a.py', 'exec')\n"
            "        exec(header)\n",
        )
    ],
    "sleeping rank": [
        (
            "        if rank == 0:\n            print",
            "        if rank == 0:\n            import time; time.sleep(7 if epoch == 0 else 0)\n            print",
        ),
        ("        dist.all_reduce(sums)\n", "        dist.all_reduce(sums)\n"),
    ],
    "port of its own": [
        ("    dist.init", "    os.environ.setdefault('MASTER_PORT', '29500')\n    dist.init")
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_but_right(name, tmp_path):
    trace, results = checked(edited(tmp_path, *ODD[name]), more=False)
    assert not any(trace.codes.values()), trace.error[-3000:]
    assert not broken(results), [r for r in results.values() if r["verdict"] == "broken"]
    assert not results["wrapper"]["evidence"].startswith("0 "), results["wrapper"]
    if name not in ("fsdp", "tensor parallel", "copied shards", "local sgd"):
        assert results["gradients"]["verdict"] == results["replicas"]["verdict"] == "holds", results


RESUME = {
    "starts again": ("repeats", [("range(start, 3)", "range(3)")]),
    "an epoch twice": ("repeats", [('"epoch": epoch + 1', '"epoch": epoch')]),
    "skips": ("skips", [('start = state["epoch"]', 'start = state["epoch"] + 1')]),
    "scheduler": (
        "in step 19",
        [
            ('        scheduler.load_state_dict(state["scheduler"])\n', ""),
            ("StepLR(optimizer, 1, 0.9)", "LambdaLR(optimizer, lambda epoch: 0.9**epoch)"),
            ("range(start, 3)", "range(start, 4)"),
        ],
    ),
    "optimizer": (
        "optimizer state",
        [
            ('        optimizer.load_state_dict(state["optimizer"])\n', ""),
            ("StepLR(optimizer, 1, 0.9)", "StepLR(optimizer, 1, 1.0)"),
        ],
    ),
    "order": ("first epoch", [("set_epoch(epoch)", "set_epoch(epoch - start)")]),
    "weights": ("weights", [('        model.module.load_state_dict(state["model"])\n', "")]),
}


RESUME["optimizer, random samples"] = (
    "optimizer state",
    [*WINDOWS, ('        optimizer.load_state_dict(state["optimizer"])\n', "")],
)


@pytest.mark.parametrize("name", RESUME)
def test_resume(name, tmp_path):
    words, edits = RESUME[name]
    _, results = checked(edited(tmp_path, *edits))
    assert broken(results) == {"resume"}, [r for r in results.values() if r["verdict"] != "holds"]
    assert words in results["resume"]["evidence"]


BEST = [  # weights only; those of before, if there are any, and at the end those of the best epoch
    (
        '            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}\n'
        '            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}\n',
        "            state = model.module.state_dict()\n",
    ),
    ('    if os.path.exists("state.pt"):\n', '    if os.path.exists("weights.pt"):\n'),
    (
        '        state = torch.load("state.pt")\n',
        '        state = {"model": torch.load("weights.pt")}\n',
    ),
    (
        '        optimizer.load_state_dict(state["optimizer"])\n        scheduler.load_state_dict(state["scheduler"])\n        start = state["epoch"]\n',
        "",
    ),
    ("    dist.destroy", '    dist.barrier()\n    torch.load("state.pt")\n    dist.destroy'),
]


def test_the_best_weights_are_no_checkpoint_to_go_on_from(tmp_path):
    _, results = checked(edited(tmp_path, *BEST))
    assert not broken(results), results
    assert results["resume"]["evidence"].startswith("the second run did not start")


# The same script in a folder of torch.distributed.checkpoint; torch steps once to fill the state.
FOLDER = [
    (
        "import torch.distributed as dist\n",
        "import torch.distributed as dist\nimport torch.distributed.checkpoint as dcp\nfrom torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict\n",
    ),
    (
        '    if os.path.exists("state.pt"):\n        state = torch.load("state.pt")\n        model.module.load_state_dict(state["model"])\n        optimizer.load_state_dict(state["optimizer"])\n        scheduler.load_state_dict(state["scheduler"])\n',
        '    if os.path.isdir("saved"):\n        weights, moments = get_state_dict(model, optimizer)\n        state = {"model": weights, "optimizer": moments, "epoch": 0}\n'
        '        dcp.load(state, checkpoint_id="saved")\n        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])\n',
    ),
    ("StepLR(optimizer, 1, 0.9)", "StepLR(optimizer, 1, 1.0)"),
    (
        '            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}\n            state |= {"scheduler": scheduler.state_dict(), "epoch": epoch + 1}\n            torch.save(state, "state.pt")\n',
        '        weights, moments = get_state_dict(model, optimizer)\n        state = {"model": weights, "optimizer": moments, "epoch": epoch + 1}\n        dcp.save(state, checkpoint_id="saved")\n',
    ),
]


@pytest.mark.parametrize(
    ("expected", "edits"),
    [
        (set(), []),
        ({"resume"}, [('start = state["epoch"]', 'start = state["epoch"] - 1')]),
        ({"checkpoint"}, [('"optimizer": moments, "epoch": epoch + 1', '"epoch": epoch + 1')]),
    ],
)
def test_a_checkpoint_that_is_a_folder(expected, edits, tmp_path):
    _, results = checked(edited(tmp_path, *FOLDER, *edits))
    shutil.rmtree("saved")
    assert broken(results) == expected, results
    assert expected or results["resume"]["verdict"] == results["checkpoint"]["verdict"] == "holds"


def test_a_checkpoint_that_was_there_before(tmp_path):
    """It is replaced by another file, and the first run ended with it: nothing is left to resume."""
    saved = ('(state, "state.pt")', '(state, "run.log"); os.replace("run.log", "state.pt")')
    checked(edited(tmp_path, saved, ("range(start, 3)", "range(start, 1)")), more=False)
    _, results = checked(edited(tmp_path, saved))
    assert not broken(results), results
    assert results["resume"]["evidence"].startswith("the checkpoint was there before")


@pytest.mark.parametrize(
    ("rate", "batch", "wrong"),
    [
        ("0.1 * world_size", "8", False),
        ("0.1 * world_size ** 2", "8", True),
        ("0.1 * world_size", "16 // world_size", True),
        ("0.1", "16 // world_size", False),
    ],
)
def test_learning_rate(rate, batch, wrong, tmp_path):
    _, results = checked(
        edited(
            tmp_path,
            ("lr=0.1", f"lr={rate}"),
            ("(train_set, 8", f"(train_set, {batch}"),
            (SAVE, ""),
        )
    )
    assert broken(results) == ({"learning-rate"} if wrong else set()), results
    assert wrong or results["learning-rate"]["verdict"] == "holds"


LOCAL = "int(os.environ['LOCAL_RANK'])"
NODES = {
    "right": (set(), []),
    "sharding": (
        {"sharding"},
        [
            (
                "DistributedSampler(train_set)",
                f"DistributedSampler(train_set, int(os.environ['LOCAL_WORLD_SIZE']), {LOCAL})",
            )
        ],
    ),
    "devices": (
        {"devices"},
        [
            (
                "    torch.manual",
                "    if torch.cuda.is_available():\n        torch.cuda.set_device(rank)\n    torch.manual",
            )
        ],
    ),
    "devices right": (
        set(),
        [
            (
                "    torch.manual",
                f"    local_rank = {LOCAL}\n    if torch.cuda.is_available():\n        torch.cuda.set_device(local_rank)\n    torch.manual",
            )
        ],
    ),
    "writers": ({"writers"}, [("        if rank == 0:", f"        if {LOCAL} == 0:")]),
}


@pytest.mark.parametrize("name", NODES)
def test_two_nodes(name, tmp_path):
    expected, edits = NODES[name]
    _, results = checked(edited(tmp_path, *edits), nproc=4, nodes=2, more=False)
    assert broken(results) == expected, results


@pytest.mark.parametrize("name", ["devices", "port"])
def test_a_module_of_the_script_is_read(name, tmp_path):
    """It stands beside the script, and makes the process group."""
    port = "    os.environ['MASTER_PORT'] = '29873'\n" * (name == "port")
    device = "    rank = dist.get_rank()\n    torch.cuda.is_available() and torch.cuda.set_device(rank)\n"
    text = f"import os\nimport torch\nimport torch.distributed as dist\n\n\ndef start():\n{port}"
    text += "    dist.init_process_group('gloo')\n" + device * (name == "devices")
    (tmp_path / "part.py").write_text(text)
    start = ('    dist.init_process_group("gloo")\n', "    import part\n\n    part.start()\n")
    nodes = {"nproc": 4, "nodes": 2} if name == "devices" else {}
    _, results = checked(edited(tmp_path, start), more=False, **nodes)
    assert broken(results) == {name} and "part.py" in results[name]["where"], results


@pytest.mark.parametrize(
    "rung", ["01_single_node_multi_gpu.py", "02_torchrun.py", "03_multinode.py", "04_lightning.py"]
)
def test_rungs_hold(rung, tmp_path):
    by_us = rung in ("02_torchrun.py", "03_multinode.py")  # the others start their ranks themselves
    words = [*TINY, "--checkpoint=state.pt"] if by_us else TINY
    words = [*words, "--nproc=2"] if rung.startswith("01") else words
    _, results = checked(ROOT / rung, *words, more=by_us, timeout=300)
    assert not broken(results), results
    holds = sum(r["verdict"] == judge.HOLDS for r in results.values())
    assert holds >= (14 if by_us else 9), results


# A topic that is about a mistake is left out. crash: what dies is no fault of the collectives.
@pytest.mark.parametrize("topic", ["crash", "fsdp", "graph_dataset", "preemption", "uneven_inputs"])
def test_topics_hold(topic, tmp_path):
    words = {"graph_dataset": ["--epochs=2"], "preemption": [*TINY, "--checkpoint=state.pt"]}
    _, results = checked(ROOT / f"topics/{topic}.py", *words.get(topic, TINY), timeout=300)
    assert not broken(results), results


def test_a_rank_that_fails_is_no_missing_call(tmp_path):
    """The others wait for it, but its own error is the cause."""
    fails = ("    model = DDP", "    if rank == 0:\n        sys.exit('no data')\n    model = DDP")
    _, results = checked(edited(tmp_path, ("import os", "import os\nimport sys"), fails))
    assert not broken(results), results
    assert results["collectives"]["evidence"].endswith("no data")


@pytest.mark.parametrize("rung", ["00_single_gpu.py", "00b_data_parallel.py"])
def test_one_process_is_not_judged(rung, tmp_path):
    words = ["--dataset", "fake:96", "--image-size", "8", "--epochs", "1", "--batch-size", "16"]
    _, results = checked(ROOT / rung, *words, more=False)
    assert {r["verdict"] for r in results.values()} == {judge.NOT_SEEN}


def test_against_one_rank(tmp_path):
    """The first steps on one rank, of the same samples, show what all ranks do alike."""
    half = ("loss.backward()", "(loss / world_size).backward()")
    edits = [("(train_set, 8", "(train_set, 16 // world_size"), (CLIP, "")]
    results = checked(edited(tmp_path, *edits, half))[1]
    assert broken(results) == {"gradients"}, results
    assert results["gradients"]["evidence"].startswith("0.5 times the gradient of one rank")
    assert not broken(checked(edited(tmp_path, *edits))[1])


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(model(inputs) @ model(inputs + 0.1).T, torch.arange(len(inputs)))",  # of pairs
        "F.cross_entropy(model(inputs), labels, weight=torch.tensor([1.0, 4.0]))",
    ],
)
def test_a_loss_that_is_no_mean_over_samples(loss, tmp_path):
    edits = [("(train_set, 8", "(train_set, 16 // world_size"), (CLIP, ""), (SAVE, "")]
    _, results = checked(edited(tmp_path, *edits, ("F.cross_entropy(model(inputs), labels)", loss)))
    assert not broken(results), results


def test_further_runs_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "MORE", 2)
    load = '        state = torch.load("state.pt")\n'
    slow = (load, "        __import__('time').sleep(99)\n" + load)
    trace, results = checked(edited(tmp_path, slow))
    assert trace.seconds < 40 and not broken(results)
    assert results["resume"]["evidence"].startswith("a stop and a resume take more than twice")


def test_three_ranks(tmp_path):
    _, results = checked(edited(tmp_path, *BATCH_NORM, OF_RANK_0), nproc=3, more=False)
    assert not broken(results), results


@pytest.mark.cold
def test_command_line(tmp_path, tmp_path_factory):
    """The real thing: a process that is left behind, results in JSON, nothing left by us."""
    edits = [
        (
            "    dist.destroy",
            "    __import__('subprocess').Popen(['sleep', '99'])\n    dist.destroy",
        )
    ]
    path = edited(tmp_path, *edits, (SAVE, ""))
    command = [sys.executable, str(ROOT / "labs/check.py"), str(path), "--json", "run.log"]
    temporary = tmp_path_factory.mktemp("temporary")  # other tests run the checker as well
    env = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert len(lines) == len(judge.CHECKS) and not done.stderr
    found = json.loads(Path("run.log").read_text())
    assert found["version"] == 1 and found["exit_codes"] == [0, 0]
    assert [c["check"] for c in found["checks"] if c["verdict"] == "broken"] == ["teardown"]
    assert "sleep 99" in next(line for line in lines if line.startswith("broken"))
    assert not list(temporary.iterdir())


def test_a_run_that_does_not_end(tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    command = [sys.executable, str(ROOT / "labs/check.py"), "train.py", "--timeout=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "did not end in --timeout 1 s" in done.stderr and "fewer epochs" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "which script"),
        (["nowhere.py"], "is not a file"),
        ([__file__, "--nproc", "3", "--nodes", "2"], "cannot be shared"),
        ([__file__, "--timeout", "0"], "more than 0"),
        ([__file__, "--json", "nowhere/x.json"], "does not exist"),
    ],
)
def test_wrong_use_is_one_line(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        check.parse_args(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and says in err and err.count("\n") == 1


def test_what_is_recommended_exists():
    for one in judge.CHECKS:
        assert (ROOT / one.read).is_file(), one
