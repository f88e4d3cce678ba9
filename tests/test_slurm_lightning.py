"""Rung 04 in a Slurm job: what Lightning makes of Slurm's variables, and how a job goes on."""

import json
import os
import re
import sys
import time

import pytest
from test_lightning import assert_epochs, by_hand
from test_slurm import cluster  # noqa: F401  a fixture: skips without Slurm, but never in CI

import checks
import common
from ladder import ROOT, fork, launcher_env, of_the_day

FILES = ["04_lightning.py", *(f"topics/{path.name}" for path in ROOT.glob("topics/lightning_*.py"))]
FILE = ROOT / "slurm" / "04_lightning.sbatch"
TWO_TASKS = ["--gpus-per-node=0", "--cpus-per-task=1", "--nodes=1", "--ntasks-per-node=2"]
NOT_SRUN = "waits for the other tasks of the Slurm job: start it with {} python, not python"
BY_SRUN, BY_NAME = NOT_SRUN.format("srun"), NOT_SRUN.format("srun --job-name=train")
NOT_EQUAL = "--devices {} on --num-nodes {}, but {} ranks have been started on {}: make them equal"
NTASKS = "Lightning needs --ntasks-per-node, not --ntasks: start it with srun {} python"
TWO_ON_ONE = "--nodes=1 --ntasks-per-node=2"
ONE_GPU_EACH = "4 tasks on a node, and each sees one GPU. In Lightning it must see all: use "
ONE_GPU_EACH += "--gpus-per-node=4, not --gpus-per-task"
SHELL = "each of 2 tasks would train alone: use srun --job-name=train python"
TORCHRUNS = "srun has started 2 torchruns on 1 nodes: use --ntasks-per-node=1"


def job(tasks, nodes=1, name="train", step=True, **more):
    """Return the variables that tell Lightning or us of Slurm, as the first task has them."""
    env = {"JOB_ID": "1", "JOB_NAME": name, "NTASKS": tasks, "NNODES": nodes}
    env |= {"PROCID": 0, "LOCALID": 0, "NODEID": 0} | more
    if step:
        env |= {"STEP_ID": 0, "STEP_NUM_TASKS": tasks, "STEP_NUM_NODES": nodes}
    return {f"SLURM_{name}": str(value) for name, value in env.items()}


# salloc's shell, where slurm.conf has LaunchParameters=use_interactive_step: a step of one task.
IN_A_STEP = {"STEP_ID": 4294967290, "STEP_NUM_TASKS": 1, "STEP_NUM_NODES": 1, "step": False}


@pytest.mark.parametrize(
    "env, options, line",
    [
        (job(2, NTASKS_PER_NODE=2), ["--devices=3"], NOT_EQUAL.format(3, 1, 2, 1)),
        (job(4, 2, NTASKS_PER_NODE=2), ["--devices=4"], NOT_EQUAL.format(4, 2, 4, 2)),
        (job(4, 2, NTASKS_PER_NODE=2), ["--devices=4", "--num-nodes=1"], "on --num-nodes 1, but 4"),
        # sbatch --wrap "python 04_lightning.py": one rank, with half of the batch
        (job(1, step=False), [], NOT_EQUAL.format(2, 1, 1, 1)),
        (job(2, step=False, NTASKS_PER_NODE=2), [], BY_SRUN),
        (job(2, NTASKS_PER_NODE=2, **IN_A_STEP), [], BY_SRUN),
        (job(4, 2, NTASKS_PER_NODE=2, **IN_A_STEP), [], BY_SRUN),
        (job(2, step=False), [], NOT_SRUN.format(f"srun {TWO_ON_ONE}")),
        (job(2, 2, "interactive", step=False, NTASKS_PER_NODE=1), [], BY_NAME),
        (job(4, 2, "interactive", NTASKS_PER_NODE=2, **IN_A_STEP), [], BY_NAME),
        # sbatch --nodes=2 says nothing of tasks
        ({"SLURM_NNODES": "2"}, [], NOT_SRUN.format("srun --nodes=2 --ntasks-per-node=1")),
        (job(2), [], NTASKS.format(TWO_ON_ONE)),
        (job(6, 2), ["--devices=3"], NTASKS.format("--nodes=2 --ntasks-per-node=3")),
        (job(2, name="interactive", NTASKS_PER_NODE=2), [], SHELL),
        (job(2, name="bash", NTASKS_PER_NODE=2), [], SHELL),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(env, options, line):
    done = fork("04_lightning.py", 1, *options, env=env, before=by_hand)
    assert done.codes == [2] and not done.out, done.out
    assert line in done.err and done.err.count("\n") == 1, done.err


@pytest.mark.parametrize("file", FILES)
def test_tasks_that_lightning_does_not_see_as_ranks(file):
    """srun --ntasks=2: Lightning's RuntimeError, from each rank. In the topics too."""
    done = fork(file, 1, env=job(2), before=by_hand)
    line = f"{file.split('/')[-1]}: {NTASKS.format(TWO_ON_ONE)}\n"
    assert (done.codes, done.err) == ([2], line)


@pytest.mark.parametrize(
    "env, devices, gpus, line",
    [
        (job(4, NTASKS_PER_NODE=4), 4, 1, ONE_GPU_EACH),
        (job(4, NTASKS_PER_NODE=4), 1, 1, ONE_GPU_EACH),
        (job(8, 2, NTASKS_PER_NODE=4), 4, 1, ONE_GPU_EACH),
        # these see all that there are, and are as many as there are
        (job(2, NTASKS_PER_NODE=2), 2, 2, None),
        (job(2, 2, NTASKS_PER_NODE=1), 1, 1, None),
        (job(1, NTASKS_PER_NODE=1), 1, 1, None),
    ],
)
def test_each_task_must_see_all_gpus_of_its_node(env, devices, gpus, line):
    """With sbatch --gpus-per-task=1 each sees one, and Lightning asks that one for 4."""

    def some_gpus():
        by_hand()
        common.gpu_count = lambda: gpus
        checks.lightning_epochs = lambda args: sys.exit(7)

    done = fork("04_lightning.py", 1, f"--devices={devices}", env=env, before=some_gpus)
    lines = f"04_lightning.py: {line}\n" if line else ""
    assert (done.codes, done.err) == ([2 if line else 7], lines)


@pytest.mark.parametrize("options", [["--devices=3"], ["--num-nodes=2"]])
def test_torchrun_has_started_as_many_as_it_has(options):
    done = fork("04_lightning.py", 1, *options, env=launcher_env(0, 1, "0"))
    assert done.codes == [2] and "but 1 ranks have been started on 1:" in done.err, done.err


# Of three ranks, on two nodes: in a job Slurm counts two tasks.
TORCHRUN_ON_EACH = launcher_env(0, 3, "0") | {"WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "env, devices, nodes",
    [
        (job(3, NTASKS_PER_NODE=3), 3, 1),
        (job(4, 2, NTASKS_PER_NODE=2), 2, 2),
        (job(3, 3, NTASKS_PER_NODE=1), 1, 3),
        (TORCHRUN_ON_EACH, 3, 2),
        (job(2, 2, NTASKS_PER_NODE=1) | TORCHRUN_ON_EACH, 3, 2),
        (job(2, 2) | TORCHRUN_ON_EACH, 3, 2),
        # a shell on one node, where Lightning starts the ranks, and one task of such a job
        (job(2, name="interactive", step=False, NTASKS_PER_NODE=2), 2, 1),
        (job(2, name="interactive", NTASKS_PER_NODE=2, **IN_A_STEP), 2, 1),
        (job(1, NTASKS_PER_NODE=1), 1, 1),
    ],
)
def test_devices_and_nodes_are_those_of_the_launcher(env, devices, nodes):
    def show_and_end():
        def lightning_epochs(args):
            print(args.devices, args.num_nodes, args.per_rank_batch)
            sys.exit(7)

        by_hand()
        os.environ.update(env)
        checks.lightning_epochs = lightning_epochs

    done = fork("04_lightning.py", 1, before=show_and_end)
    assert done.codes == [7], done.err
    assert done.out == f"{devices} {nodes} {96 // devices // nodes}\n"


def test_the_same_lines_in_a_real_job(cluster):  # noqa: F811
    """That the variables are those of the test above, and that nothing waits."""
    srun = "srun --kill-on-bad-exit=1"
    torchrun = "torchrun --standalone --nproc-per-node=1"
    commands = {
        BY_SRUN: "python 04_lightning.py",
        NOT_EQUAL.format(3, 1, 2, 1): f"{srun} python 04_lightning.py --devices 3",
        SHELL: f"SLURM_JOB_NAME=interactive {srun} python 04_lightning.py",
        TORCHRUNS: f"{srun} {torchrun} 04_lightning.py",
        NTASKS.format(TWO_ON_ONE): f"unset SLURM_NTASKS_PER_NODE; {srun} python 04_lightning.py",
    }
    script = cluster.logs / "refused.sh"
    lines = [f'{command}; echo "code $?"' for command in commands.values()]
    script.write_text("\n".join(["#!/bin/bash", *lines]))
    state, _, log = cluster.run(script, TWO_TASKS)
    assert state == "COMPLETED", log
    for line in commands:
        assert re.search(rf"^04_lightning.py: {re.escape(line)}$", log, re.M), log
    codes = re.findall(r"^code (\d+)$", log, re.M)
    assert len(codes) == 5 and "0" not in codes, log
    assert not re.search("epoch 1|ValueError|RuntimeError", log), log
    step = ["srun", "--interactive", "--preserve-env"]  # as salloc does with use_interactive_step
    salloc = ["salloc", "--job-name=mine", "--nodes=1", "--ntasks-per-node=2"]
    done = cluster.slurm("exec", *salloc, *step, "python", "04_lightning.py", "--timeout=9")
    assert f"04_lightning.py: {BY_SRUN}\n" in done.stdout and "Error" not in done.stdout


@pytest.fixture(scope="module")
def reference():
    done = fork("00_single_gpu.py", 1, "--epochs=3", whole=True)
    assert len(done.epochs) == 3
    return done.epochs


def logged(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_torchrun_on_each_node(cluster, reference):  # noqa: F811
    """Lightning believes torchrun, not Slurm, which counts two tasks for four ranks."""
    log = cluster.logs / "torchrun.jsonl"
    text = (ROOT / "slurm" / "03_multinode.sbatch").read_text()
    script = cluster.logs / "torchrun.sbatch"
    script.write_text(text.replace("SCRIPT=03_multinode.py", "SCRIPT=04_lightning.py"))
    options = ["--gpus-per-node=0", "--cpus-per-task=2"]
    training = ["--epochs=1", f"--log-json={log}"]
    state, code, text = cluster.run(script, options, training)
    assert (state, code) == ("COMPLETED", "0:0"), text
    assert text.count("04_lightning.py | world size 4 | batch 24 x 4 = 96") == 1, text
    assert_epochs(logged(log), reference[:1])


def test_an_interactive_shell_of_one_task(cluster, reference):  # noqa: F811
    """Lightning starts the ranks itself, as on a machine without Slurm."""
    log = cluster.logs / "shell.jsonl"
    training = ["--epochs=1", f"--log-json={log}"]
    command = ["salloc", "--nodes=1", "--ntasks=1", "python", "04_lightning.py", *training]
    done = cluster.slurm("exec", *command)
    assert done.returncode == 0 and "world size 2 | batch 48 x 2 = 96" in done.stdout, done.stdout
    assert_epochs(logged(log), reference[:1])


@pytest.mark.cold  # Slurm signals the processes of a job, which a fork is not
@pytest.mark.parametrize("way", of_the_day(["USR1", "scontrol requeue"], 1))
def test_back_to_the_queue(way, cluster, reference, tmp_path):  # noqa: F811
    """In the second epoch, which the job then does again; USR1 with the launcher of requeue.sbatch.

    Lightning's own answer to USR1, which is off, would save hpc_ckpt_1.ckpt and may hang.
    """
    checkpoint, log = tmp_path / "x.pt", tmp_path / "log"
    script = FILE
    if way == "USR1":
        text = (ROOT / "slurm" / "requeue.sbatch").read_text()
        script = tmp_path / "requeue.sbatch"
        script.write_text(text.replace("topics/preemption.py", "04_lightning.py"))
    training = ["--epochs=3", f"--checkpoint={checkpoint}", f"--log-json={log}"]
    job = cluster.submit(script, TWO_TASKS, training)
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.3)  # into the second epoch
    command = ["scancel", "--signal=USR1"] if way == "USR1" else way.split()
    assert cluster.slurm("exec", *command, job).returncode == 0
    state, code, text = cluster.wait(job)
    assert (state, code) == ("COMPLETED", "0:0"), text
    # The log has both attempts, one after the other.
    assert re.findall(rf"^job {job} \| restart (\d) \|", text, re.M) == ["0", "1"], text
    assert text.count("epoch 1/3") == 1, text
    assert len(re.findall(r"x.pt: resumes after epoch \d", text)) == 1, text
    assert_epochs(logged(log), reference)
    assert not [*tmp_path.glob("hpc_ckpt*"), *ROOT.glob("hpc_ckpt*")]
