"""Faults to plant, each with the tests that must notice it: does a test see what it claims to see?

    python tests/mutants.py                         all of them, one after the other: half an hour
    python tests/mutants.py fsync "port by user"    those whose name holds one of these words
    python tests/mutants.py --random 10 --seed 3    ten of the quick ones, as make test does

A fault is a small change of a file. It is planted in a copy of the working tree, and its tests run
there. They must pass without any fault, and fail with theirs. It exits with 1 if a fault survives,
or if a file or a test is no longer as the list says. Who changes code changes its fault as well.
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", "checkpoints", "downloads")
TIMEOUT = 300  # seconds, for the tests of one fault
# Imported once. Each run of pytest is forked from here, and need not import them again.
HEAVY = ("torch", "torch._dynamo", "torchvision", "lightning", "pandas", "matplotlib.pyplot")


@dataclass
class Fault:
    name: str
    file: str
    old: str  # stands in the file once
    new: str
    why: str  # it matters
    tests: str  # of tests/: one of them must fail
    slow: bool = False  # many epochs, or real launchers: not among the random ones


FAULTS = [
    # ---- common.py -------------------------------------------------------------------------------
    Fault(
        "no fsync",
        "common.py",
        "        os.fsync(file.fileno())",
        "        pass",
        "a power cut leaves an empty checkpoint",
        "test_rungs.py::test_a_checkpoint_is_on_the_disk_before_it_gets_its_name",
    ),
    Fault(
        "a link becomes a file",
        "common.py",
        "Path(args.checkpoint).resolve()",
        "Path(args.checkpoint).absolute()",
        "the file on the large disk stays old",
        "test_rungs.py::test_a_link_to_a_checkpoint_stays_a_link[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "random state not restored",
        "common.py",
        '    torch.set_rng_state(state["rng"])\n',
        "",
        "the dropout of a resumed run is another one",
        "test_rungs.py::test_a_resumed_run_draws_the_random_numbers_of_a_whole_one[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "random state of the GPU not restored",
        "common.py",
        '        torch.cuda.set_rng_state(state["cuda_rng"])',
        "        pass",
        "the same, on a GPU",
        "test_rungs.py::test_the_random_state_of_a_gpu_is_saved_and_restored",
    ),
    Fault(
        "momentum not restored",
        "common.py",
        '    optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "a resumed run is another one",
        "test_rungs.py::test_a_resumed_run_draws_the_random_numbers_of_a_whole_one[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "resumed with the old rate",
        "common.py",
        '        group["lr"] = args.lr',
        "        pass",
        "--lr is ignored in silence",
        "test_rungs.py::test_a_resumed_run_takes_its_lr_from_the_command_line[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "pickles are executed",
        "common.py",
        'map_location="cpu", weights_only=True',
        'map_location="cpu", weights_only=False',
        "a checkpoint of somebody else runs code",
        "test_rungs.py::test_a_checkpoint_is_loaded_to_the_cpu",
        slow=True,
    ),
    Fault(
        "loaded to the GPU",
        "common.py",
        'map_location="cpu", weights_only=True',
        "map_location=None, weights_only=True",
        "GPU 0 holds a copy for every rank",
        "test_rungs.py::test_a_checkpoint_is_loaded_to_the_cpu",
        slow=True,
    ),
    Fault(
        "the clock does not wait",
        "common.py",
        "    torch.get_device_module(device).synchronize()\n",
        "",
        "speeds of GPUs are too high",
        "test_rungs.py::test_the_clock_waits_for_the_device",
    ),
    Fault(
        "speed of the test set",
        "common.py",
        "trained / seconds",
        "tested / seconds",
        "all speeds are too low",
        "test_rungs.py::test_what_an_epoch_prints_and_logs",
    ),
    Fault(
        "--num-workers ignored",
        "common.py",
        '"num_workers": args.num_workers,',
        '"num_workers": 0,',
        "the loader is slower than what was asked for",
        "test_rungs.py::test_loader_options",
    ),
    Fault(
        "memory not pinned",
        "common.py",
        '"pin_memory": device.type == "cuda"',
        '"pin_memory": False',
        "copies to the GPU do not overlap",
        "test_rungs.py::test_loader_options",
    ),
    Fault(
        "evaluates in train mode",
        "common.py",
        "    model.eval()\n",
        "",
        "dropout and batch norm spoil the accuracy",
        "test_rungs.py::test_it_trains_with_gradients_and_evaluates_without[00_single_gpu.py]",
    ),
    Fault(
        "evaluates with gradients",
        "common.py",
        "@torch.no_grad()\n",
        "",
        "memory",
        "test_rungs.py::test_it_trains_with_gradients_and_evaluates_without[00_single_gpu.py]",
    ),
    Fault(
        "GPU 3 of one",
        "common.py",
        "0 if gpu_count() == 1 else local_rank or 0",
        "local_rank or 0",
        "srun --gpus-per-task=1 shows each rank one GPU",
        "test_rungs.py::test_take_device",
    ),
    # ---- checks.py -------------------------------------------------------------------------------
    Fault(
        "NaN is saved",
        "checks.py",
        "if weights.is_floating_point() and not weights.isfinite().all():",
        "if weights.is_floating_point() and weights.isinf().any():",
        "the last good checkpoint is overwritten",
        "test_rungs.py::test_weights_that_are_not_finite_are_not_saved[00_single_gpu.py]",
    ),
    Fault(
        "a loss of NaN goes on",
        "checks.py",
        "    if not math.isfinite(loss):",
        "    if loss < 0:",
        "hours of training for nothing",
        "test_rungs.py::test_a_loss_that_is_not_finite_ends_all_ranks_and_spares_the_checkpoint"
        "[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "ranks with other seeds",
        "checks.py",
        'FREE += ("start_epoch",)',
        'FREE += ("start_epoch", "seed")',
        "they train on overlapping samples",
        "test_rungs.py::test_ranks_with_other_options_are_refused[02_torchrun.py---seed=1]",
    ),
    Fault(
        "ranks at other epochs",
        "checks.py",
        '    own |= {"epochs behind it": epochs}\n',
        "",
        "one rank has no checkpoint and starts from scratch",
        "test_rungs.py::test_a_checkpoint_that_one_rank_has[02_torchrun.py-0]",
        slow=True,
    ),
    Fault(
        "the other node's checkpoint is ignored",
        "checks.py",
        "        if other_exists and not ranks[0][1]:",
        "        if False:",
        "a run starts from scratch",
        "test_rungs.py::test_a_checkpoint_that_one_rank_has[03_multinode.py-1]",
        slow=True,
    ),
    Fault(
        "resumed with another seed",
        "checks.py",
        '"batch_size", "seed")',
        '"batch_size")',
        "samples are seen twice, others never",
        "test_rungs.py::test_a_checkpoint_of_another_run_is_refused[00_single_gpu.py]",
        slow=True,
    ),
    Fault(
        "half a line stays",
        "checks.py",
        "            os.truncate(path, size) if size else path.unlink()",
        "            pass",
        "the log can no longer be read",
        "test_rungs.py::test_a_full_disk_at_the_log_is_said_in_one_line_and_leaves_no_half_line"
        "[00_single_gpu.py]",
    ),
    Fault(
        "a batch that does not split",
        "checks.py",
        "    if rest:\n",
        "    if not args.per_rank_batch:\n",
        "the effective batch is not --batch-size",
        "test_rungs.py::test_wrong_options[02_torchrun.py-batch does not divide]",
        slow=True,
    ),
    Fault(
        "refused with exit code 0",
        "checks.py",
        "    sys.exit(code)\n",
        "    sys.exit(0)\n",
        "a batch system takes it for done",
        "test_rungs.py::test_wrong_options[02_torchrun.py-unknown data]",
    ),
    # ---- rungs -----------------------------------------------------------------------------------
    Fault(
        "00: the same order each epoch",
        "00_single_gpu.py",
        "manual_seed(args.seed + epoch)",
        "manual_seed(args.seed)",
        "00 is the reference of all numbers",
        "test_contract.py::test_world_size_1_is_bitwise_00[02_torchrun.py]",
        slow=True,
    ),
    Fault(
        "01: loss of rank 0 only",
        "01_single_node_multi_gpu.py",
        "        dist.all_reduce(sums)",
        "        pass",
        "loss and accuracy of a share",
        "test_contract.py::test_same_numbers[01_single_node_multi_gpu.py-2-0]",
        slow=True,
    ),
    Fault(
        "01: no timeout",
        "01_single_node_multi_gpu.py",
        ", timeout=args.timeout)",
        ")",
        "a missing rank is waited for for half an hour",
        "test_rungs.py::test_every_wait_for_other_ranks_has_a_timeout",
    ),
    Fault(
        "02: train mode is never set again",
        "02_torchrun.py",
        "        model.train()\n",
        "",
        "from the second epoch on dropout is off",
        "test_rungs.py::test_it_trains_with_gradients_and_evaluates_without[02_torchrun.py]",
    ),
    Fault(
        "02: train mode before the loop",
        "02_torchrun.py",
        "        model.train()\n        for images",
        "        model.train() if epoch == start_epoch else None\n        for images",
        "the same",
        "test_topics.py::test_each_epoch_begins_in_train_mode",
    ),
    Fault(
        "02: every rank saves",
        "02_torchrun.py",
        "        if rank == 0:\n            common.save_checkpoint",
        "        if rank >= 0:\n            common.save_checkpoint",
        "two ranks write one file",
        "test_rungs.py::test_only_rank_0_writes[02_torchrun.py]",
        slow=True,
    ),
    Fault(
        "02: gradients add up",
        "02_torchrun.py",
        "            optimizer.zero_grad()\n",
        "",
        "each step takes those of all steps before",
        "test_docs.py::test_step_is_the_same_everywhere",
    ),
    Fault(
        "03: device by rank",
        "03_multinode.py",
        "common.take_device(local_rank)",
        "common.take_device(rank)",
        "the second node has no GPU of that number",
        "test_rungs.py::test_03_takes_the_gpu_of_its_local_rank",
    ),
    Fault(
        "03: each node reads its own disk",
        "03_multinode.py",
        "state = common.read_checkpoint(args) if rank == 0 else None",
        "state = common.read_checkpoint(args)",
        "an old or broken file there stops the job",
        "test_rungs.py::test_a_checkpoint_that_one_rank_has[03_multinode.py-0]",
        slow=True,
    ),
    Fault(
        "03: rank 0's state is not sent",
        "03_multinode.py",
        "    state = checks.from_rank_0(state, model)  # all ranks; the weights are sent by DDP\n",
        "",
        "the others start from scratch",
        "test_rungs.py::test_a_checkpoint_that_one_rank_has[03_multinode.py-0]",
        slow=True,
    ),
    Fault(
        "03: rank 0's momentum is not sent",
        "checks.py",
        "        dist.broadcast(momentum, src=0)\n",
        "",
        "the others go on with whatever is in memory",
        "test_rungs.py::test_a_checkpoint_that_one_rank_has[03_multinode.py-0]",
        slow=True,
    ),
    Fault(
        "04: resumed with the old rate",
        "04_lightning.py",
        '        self.optimizers().param_groups[0]["lr"] = self.args.lr',
        "        pass",
        "--lr is ignored in silence",
        "test_rungs.py::test_a_resumed_run_takes_its_lr_from_the_command_line[04_lightning.py]",
        slow=True,
    ),
    Fault(
        "04: metrics of one rank",
        "04_lightning.py",
        '"sync_dist": True',
        '"sync_dist": False',
        "loss and accuracy of a share",
        "test_contract.py::test_same_numbers[04_lightning.py-2-0]",
        slow=True,
    ),
    # ---- topics ----------------------------------------------------------------------------------
    Fault(
        "uneven inputs: mean over all ranks",
        "topics/uneven_inputs.py",
        "divide_by_initial_world_size=False):",
        "divide_by_initial_world_size=True):",
        "the last batches count for less",
        "test_topics.py::test_a_rank_without_a_batch_does_not_count_in_the_mean",
    ),
    Fault(
        "fsdp: the last but one is deleted",
        "topics/fsdp.py",
        'shutil.rmtree(folder / f"{epoch - 1:04}"',
        'shutil.rmtree(folder / f"{epoch:04}"',
        "other ranks may still write the last one",
        "test_topics.py::test_the_last_two_checkpoints_of_fsdp_stay",
    ),
    Fault(
        "fsdp: 10 sorts before 9",
        "topics/fsdp.py",
        'f"{epoch + 1:04}"',
        'f"{epoch + 1}"',
        "resumes from an old epoch",
        "test_topics.py::test_the_last_two_checkpoints_of_fsdp_stay",
    ),
    Fault(
        "preemption: no barrier",
        "topics/preemption.py",
        "                dist.barrier(control)",
        "                pass",
        "Slurm kills the rank that still saves",
        "test_preemption.py::test_a_stopped_run_waits_for_a_slow_save_and_counts_all_its_seconds",
    ),
    Fault(
        "preemption: seconds before the stop",
        "topics/preemption.py",
        ' - mid_epoch.get("seconds", 0)',
        "",
        "a speed that is too high",
        "test_preemption.py::test_a_stopped_run_waits_for_a_slow_save_and_counts_all_its_seconds",
    ),
    Fault(
        "preemption: device by rank",
        "topics/preemption.py",
        "common.take_device(local_rank)",
        "common.take_device(rank)",
        "the second node has no GPU of that number",
        "test_topics.py::test_a_topic_for_several_nodes_takes_the_gpu_of_its_local_rank[preemption]",
    ),
    Fault(
        "standalone: no fsync",
        "topics/standalone.py",
        "os.fsync(file.fileno())",
        "pass",
        "a power cut leaves an empty checkpoint",
        "test_standalone.py::test_a_checkpoint_is_on_the_disk_before_it_gets_its_name",
    ),
    Fault(
        "standalone: device by rank",
        "topics/standalone.py",
        'int(os.environ["LOCAL_RANK"]))',
        "rank)",
        "the second node has no GPU of that number",
        "test_topics.py::test_a_topic_for_several_nodes_takes_the_gpu_of_its_local_rank[standalone]",
    ),
    Fault(
        "lr_scaling: warm-up again",
        "topics/lr_scaling.py",
        "steps = epoch * len(train_loader)",
        "steps = (epoch - start_epoch) * len(train_loader)",
        "each resume slows the training down",
        "test_topics.py::test_the_warm_up_is_not_run_again_after_a_resume",
    ),
    Fault(
        "lr_scaling: square root",
        "topics/lr_scaling.py",
        '"linear": k,',
        '"linear": k**0.5,',
        "the rule that the topic is about",
        "test_topics.py::test_the_warm_up_is_not_run_again_after_a_resume",
    ),
    Fault(
        "evaluation: rank 0 alone goes through DDP",
        "topics/evaluation.py",
        "common.evaluate(model.module, DataLoader(test_set, batch), device)",
        "common.evaluate(model, DataLoader(test_set, batch), device)",
        "hangs where the model has buffers",
        "test_topics.py::test_evaluation_with_batch_norm",
    ),
    Fault(
        "graphs: trained on the test set",
        "topics/graph_dataset.py",
        "Grown(499, seed=2)",
        "Grown(499, seed=1)",
        "the accuracy stays high",
        "test_topics_data.py::test_no_graph_is_in_both_sets",
    ),
    Fault(
        "mmap: the file stays",
        "topics/shared_dataset.py",
        "                file.unlink()",
        "                pass",
        "each run fills the disk",
        "test_topics_data.py::test_shared_dataset[mmap-4-1]",
        slow=True,
    ),
    Fault(
        "accumulation: mean of means",
        "topics/gradient_accumulation.py",
        " * len(targets) / len(labels)\n",
        " / args.accumulation_steps\n",
        "a smaller last part weighs too much",
        "test_topics.py::test_gradient_accumulation[5]",
        slow=True,
    ),
    Fault(
        "by hand: sum in place of mean",
        "topics/ddp_by_hand.py",
        "vector_to_parameters(flat / world_size, tensors)",
        "vector_to_parameters(flat, tensors)",
        "the rate is too high by the world size",
        "test_topics.py::test_ddp_by_hand",
        slow=True,
    ),
    Fault(
        "uneven inputs: momentum of one rank",
        "topics/uneven_inputs.py",
        "            dist.broadcast(state.setdefault(",
        "            (lambda *_, **__: 0)(state.setdefault(",
        "a resumed run is another one",
        "test_topics.py::test_uneven_inputs",
        slow=True,
    ),
    # ---- batch files -----------------------------------------------------------------------------
    Fault(
        "03: port by user",
        "slurm/03_multinode.sbatch",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "$((20000 + UID % 10000))",
        "two jobs of a user collide",
        "test_slurm.py::test_two_jobs_of_a_user_meet_at_two_ports[03_multinode]",
    ),
    Fault(
        "03 by srun: one port",
        "slurm/03_multinode_srun.sbatch",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "29501",
        "two jobs collide",
        "test_slurm.py::test_two_jobs_of_a_user_meet_at_two_ports[03_multinode_srun]",
    ),
    Fault(
        "04: port by user",
        "slurm/04_lightning.sbatch",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "$((20000 + UID % 10000))",
        "two jobs of a user collide",
        "test_slurm.py::test_two_jobs_of_a_user_meet_at_two_ports[04_lightning]",
    ),
    Fault(
        "requeue: port by user",
        "slurm/requeue.sbatch",
        "$((20000 + SLURM_JOB_ID % 10000))",
        "$((20000 + UID % 10000))",
        "two jobs of a user collide",
        "test_slurm.py::test_two_jobs_of_a_user_meet_at_two_ports[requeue]",
    ),
    Fault(
        "03: one rendezvous id",
        "slurm/03_multinode.sbatch",
        '--rdzv-id="$SLURM_JOB_ID"',
        "--rdzv-id=train",
        "a job may join another one",
        "test_slurm.py::test_two_jobs_of_a_user_meet_at_two_ports[03_multinode]",
    ),
    Fault(
        "requeue: exit code swallowed",
        "slurm/requeue.sbatch",
        'exit "$code"',
        "exit 0",
        "a failed job reads COMPLETED",
        "test_slurm.py::test_the_job_has_the_exit_code_of_the_training[requeue]",
    ),
    Fault(
        "requeue: any failure is requeued",
        "slurm/requeue.sbatch",
        "[[ ${code:=0} != 75 && $code != 138 ]]",
        "[[ ${code:=0} == 0 ]]",
        "a job that fails starts for ever",
        "test_slurm.py::test_the_job_has_the_exit_code_of_the_training[requeue]",
    ),
    Fault(
        "01: exit code swallowed",
        "slurm/01_single_node_multi_gpu.sbatch",
        '--nproc "$NPROC" "$@"',
        '--nproc "$NPROC" "$@" || echo failed',
        "a failed job reads COMPLETED",
        "test_slurm.py::test_the_job_has_the_exit_code_of_the_training[01_single_node_multi_gpu]",
    ),
    Fault(
        "a task that fails ends no others",
        "slurm/04_lightning.sbatch",
        "--kill-on-bad-exit=1",
        "--kill-on-bad-exit=0",
        "the job waits until its time limit",
        "test_slurm.py::test_the_last_command_is_the_launcher[04_lightning]",
    ),
    # ---- benchmarks ------------------------------------------------------------------------------
    Fault(
        "all-reduce: rank 0's seconds",
        "benchmarks/allreduce.py",
        "        dist.all_reduce(slowest, dist.ReduceOp.MAX)\n",
        "",
        "it has ended when all have it",
        "test_benchmarks.py::test_the_slowest_rank_counts",
    ),
    Fault(
        "all-reduce: n in place of n - 1",
        "benchmarks/allreduce.py",
        "2 * (world_size - 1) / world_size * size",
        "2 * size",
        "bandwidths at different n cannot be compared",
        "test_benchmarks.py::test_the_slowest_rank_counts",
    ),
    Fault(
        "all-reduce: seconds of all repeats",
        "benchmarks/allreduce.py",
        "common.seconds_since(start, device) / repeats",
        "common.seconds_since(start, device)",
        "small messages look a hundred times too slow",
        "test_benchmarks.py::test_the_slowest_rank_counts",
    ),
    Fault(
        "data loading: upside down",
        "benchmarks/data_loading.py",
        "statistics.median(rung) / statistics.median(resident)",
        "statistics.median(resident) / statistics.median(rung)",
        "a loader that is too slow looks too quick",
        "test_benchmarks.py::test_what_data_loading_counts",
    ),
    Fault(
        "data loading: a mean",
        "benchmarks/data_loading.py",
        "statistics.median(rung) / ",
        "statistics.mean(rung) / ",
        "one slow window counts",
        "test_benchmarks.py::test_what_data_loading_counts",
    ),
    Fault(
        "data loading: the warm-up counts",
        "benchmarks/data_loading.py",
        "range(args.windows + 1)][1:]",
        "range(args.windows + 1)][:-1]",
        "the resident step looks slow",
        "test_benchmarks.py::test_what_data_loading_counts",
    ),
    Fault(
        "overlap: all is hidden",
        "benchmarks/overlap.py",
        "hidden = communication + busy - length(network + compute)",
        "hidden = min(communication, busy)",
        "what the figure of the README shows",
        "test_benchmarks.py::test_overlap_reads_the_kernels_of_a_gpu_trace",
    ),
    Fault(
        "overlap: buckets at once count twice",
        "benchmarks/overlap.py",
        "for start, end in union(spans))",
        "for start, end in spans)",
        "more communication than time",
        "test_benchmarks.py::test_overlap_reads_the_kernels_of_a_gpu_trace",
    ),
    Fault(
        "scaling: the best window",
        "benchmarks/scaling.py",
        "statistics.median(speeds)",
        "max(speeds)",
        "speeds are too high",
        "test_benchmarks.py::test_the_columns_of_a_row",
    ),
    Fault(
        "scaling: the warm-up counts",
        "benchmarks/scaling.py",
        ".read_text().splitlines()][1:]",
        ".read_text().splitlines()]",
        "speeds are too low",
        "test_benchmarks.py::test_the_columns_of_a_row",
    ),
    Fault(
        "scaling: memory of the rank that needs least",
        "benchmarks/scaling.py",
        'memory = max(entries[0]["peak_memory"]',
        'memory = min(entries[0]["peak_memory"]',
        "a model does not fit where it should",
        "test_benchmarks.py::test_the_columns_of_a_row",
    ),
    Fault(
        "tour: any loss is the same",
        "benchmarks/tour.py",
        "LOSS_TOLERANCE = 5e-5",
        "LOSS_TOLERANCE = 5e-2",
        "the verdict behind the tables of parity",
        "test_benchmarks.py::test_what_the_tour_calls_the_same_numbers",
    ),
    Fault(
        "tour: any accuracy is the same",
        "benchmarks/tour.py",
        '        and abs(a["test_accuracy"] - b["test_accuracy"]) <= slack\n',
        "",
        "the verdict behind the tables of parity",
        "test_benchmarks.py::test_what_the_tour_calls_the_same_numbers",
    ),
    Fault(
        "tour: a difference is success",
        "benchmarks/tour.py",
        'return 0 if all(row[-1] == "yes" for row in rows) else 1',
        'return 1 if any(row[-1] == "FAILED" for row in rows) else 0',
        "make tour says that all is well",
        "test_benchmarks.py::test_the_tour_ends_with_1_where_a_rung_differs_or_fails",
    ),
    Fault(
        "restarts: from the first start",
        "benchmarks/restarts.py",
        "later = [start - killed for start in starts if killed and start > killed]",
        "later = [start - starts[0] for start in starts if killed and start > killed]",
        "a restart looks slow",
        "test_benchmarks.py::test_what_restarts_counts",
    ),
    Fault(
        "seal without the numbers",
        "benchmarks/machine.py",
        'if k != "seal"]',
        'if k != "seal" and isinstance(v, str)]',
        "a number may be changed",
        "test_benchmarks.py::test_a_seal_is_of_all_cells_in_their_order",
    ),
    # ---- results, by hand: the documents may be made again from them -----------------------------
    Fault(
        "results: a speed",
        "results/scaling.csv",
        ",2134.52,",
        ",2140.52,",
        "made up",
        "test_benchmarks.py::test_a_row_is_as_the_benchmark_wrote_it[scaling.csv]",
    ),
    Fault(
        "results: a loss",
        "results/batch_and_lr.csv",
        ",1.339716041901983,",
        ",1.329716041901983,",
        "made up",
        "test_benchmarks.py::test_a_row_is_as_the_benchmark_wrote_it[batch_and_lr.csv]",
    ),
    Fault(
        "results: a ratio",
        "results/data_loading.jsonl",
        '"ratio": 0.9756',
        '"ratio": 0.9956',
        "made up",
        "test_benchmarks.py::test_a_row_is_as_the_benchmark_wrote_it[data_loading.jsonl]\n"
        "test_benchmarks.py::test_what_was_measured_fits_together",
    ),
    Fault(
        "results: a hidden time",
        "results/overlap.jsonl",
        '"hidden_ms": 88.245, "exposed_ms": 127.106',
        '"hidden_ms": 118.245, "exposed_ms": 97.106',
        "made up",
        "test_benchmarks.py::test_a_row_is_as_the_benchmark_wrote_it[overlap.jsonl]",
    ),
    # ---- documents -------------------------------------------------------------------------------
    Fault(
        "speedup over another script",
        "tests/tables.py",
        'else ("00_single_gpu.py", kind, threads, "", 1)',
        "else (script, kind, threads, options, 1)",
        "DDP itself costs nothing, then",
        "test_benchmarks.py::test_the_table_of_speeds",
    ),
    Fault(
        "rows of an older commit",
        "tests/tables.py",
        'groupby(work).commit.transform("last")',
        'groupby(work).commit.transform("first")',
        "the document shows what was measured again",
        "test_benchmarks.py::test_the_table_of_speeds",
    ),
    Fault(
        "strategies: against all of 02",
        "tests/tables.py",
        '"devices", "place", "commit"]',
        '"place", "commit"]',
        "one process in the base of two",
        "test_benchmarks.py::test_the_table_of_strategies",
    ),
    Fault(
        "tour: the warm-up counts",
        "tests/tables.py",
        'rung["epochs"][1:]',
        'rung["epochs"]',
        "speeds are too low",
        "test_benchmarks.py::test_the_tables_of_tour_and_parity",
    ),
    Fault(
        "tour: the first loss",
        "tests/tables.py",
        'last = rung["epochs"][-1]',
        'last = rung["epochs"][0]',
        "it does not look trained",
        "test_benchmarks.py::test_the_tables_of_tour_and_parity",
    ),
    Fault(
        "nequip: the smallest difference",
        "tests/tables.py",
        ".abs().max(axis=None)",
        ".abs().min(axis=None)",
        "ranks that differ look equal",
        "test_benchmarks.py::test_the_table_of_nequip",
    ),
    Fault(
        "figure: efficiency is not divided",
        "notebooks/figures.py",
        "gains.div(points.devices, axis=0)",
        "gains.div(1, axis=0)",
        "an efficiency over 1",
        "test_benchmarks.py::test_speedup_and_efficiency_of_the_figure",
    ),
    Fault(
        "figure: speedup over itself",
        "notebooks/figures.py",
        'found["base"] = found.alone.fillna(pd.Series(itself, found.index))',
        'found["base"] = pd.Series(itself, found.index).fillna(found.alone)',
        "DDP itself costs nothing, then",
        "test_benchmarks.py::test_speedup_and_efficiency_of_the_figure",
    ),
    Fault(
        "a diff counts comments",
        "tests/pairs.py",
        'and not line.strip().startswith("#")',
        "",
        "the lines of code in README.md",
        "test_benchmarks.py::test_how_a_diff_is_counted",
    ),
    Fault(
        "a README is stale",
        "README.md",
        "| +3 -1 |",
        "| +2 -1 |",
        "written by hand",
        "test_docs.py::test_generated_parts_are_fresh",
    ),
]


def pytest_in_fork(copy: Path, arguments: list[str], seconds: float) -> tuple[int | None, str]:
    """Run pytest in a copy; return its exit code (None: it did not end in time) and what it says.

    Forked from here, where nothing of the repository is imported: the copy's files are, afresh.
    """
    said = copy / "said"
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(copy)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.path[0] = str(copy / "tests")
            options = [
                "-q",
                "-p",
                "no:cacheprovider",
                f"--rootdir={copy}",
                f"-c{copy}/pyproject.toml",
            ]
            code = pytest.main([*options, f"--basetemp={copy}/basetemp", *arguments])
            sys.stdout.flush()
        finally:
            os._exit(code)
    code, deadline = None, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return code, said.read_text()
            time.sleep(0.02)
        return None, said.read_text()
    finally:
        if code is None:  # too late, or Ctrl-C here: let the test end what it has started
            os.kill(pid, signal.SIGINT)
            try:
                time.sleep(5)
            finally:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def ids(faults: list[Fault]) -> list[str]:
    """Return the tests of these faults, each once."""
    found = [f"tests/{test}" for fault in faults for test in fault.tests.splitlines()]
    return list(dict.fromkeys(found))


def misplaced(fault: Fault, root: Path = ROOT) -> str:
    """Return what is wrong with a fault's place; "" if its old text stands there once."""
    path = root / fault.file
    count = path.read_text().count(fault.old) if path.is_file() else -1
    found = "there is no such file" if count < 0 else f"its old text is found {count} times"
    return "" if count == 1 else f"{fault.name}: {fault.file} has changed, {found}"


def verdict(fault: Fault, copy: Path) -> str:
    """Plant a fault, run its tests, and take it out again."""
    path = copy / fault.file
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        code, said = pytest_in_fork(copy, ["-x", *ids([fault])], TIMEOUT)
    finally:
        path.write_text(text)
    last = said.strip().rpartition("\n")[2]
    if code == 0:
        return "SURVIVED" if "passed" in last else "skipped"
    return {1: "caught", None: "SURVIVED: no end"}.get(code, f"NOT RUN, exit code {code}\n{said}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words of the names; default: all faults")
    parser.add_argument("--random", type=int, metavar="N", help="N of those that are not slow")
    parser.add_argument("--seed", default="0", help="of --random")
    args = parser.parse_args(words)
    chosen = [f for f in FAULTS if not args.names or any(w in f.name for w in args.names)]
    if args.random:
        quick = [fault for fault in chosen if not fault.slow]
        chosen = random.Random(args.seed).sample(quick, min(args.random, len(quick)))
    if not chosen:
        parser.error(f"no fault has this in its name: {' '.join(args.names)}")
    if wrong := [why for fault in FAULTS if (why := misplaced(fault))]:
        sys.exit("\n".join(wrong))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    sys.dont_write_bytecode = True  # a cached file could be that of another fault
    os.environ["PYTHONDONTWRITEBYTECODE"] = os.environ["ALL"] = "1"  # not the day's tests alone
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds for what is not needed here
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve() / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        code, said = pytest_in_fork(copy, ["--collect-only", *ids(FAULTS)], TIMEOUT)
        if code:
            sys.exit(f"{said}\nA test of the list does not exist.")
        print(f"{len(ids(chosen))} tests without any fault ...", end=" ", flush=True)
        code, said = pytest_in_fork(copy, ["-x", *ids(chosen)], TIMEOUT * len(chosen))
        print("pass" if code == 0 else f"FAIL\n{said}", flush=True)
        verdicts = []
        for number, fault in enumerate(chosen, 1) if code == 0 else ():
            start = time.monotonic()
            print(f"[{number}/{len(chosen)}] {fault.name} ({fault.file}) ...", end=" ", flush=True)
            verdicts.append(verdict(fault, copy))
            print(f"{verdicts[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
    bad = [v for v in verdicts if v not in ("caught", "skipped")]
    print(f"{verdicts.count('caught')} of {len(chosen)} caught")
    return 1 if bad or code else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("mutants.py: interrupted")
