"""Planted faults are noticed: ten of the list of mutants.py, other ones each day."""

import datetime
import os
import subprocess
import sys

import mutants
import pytest


def run(*command):
    done = subprocess.run(
        [sys.executable, *command], cwd=mutants.ROOT, capture_output=True, text=True, timeout=900
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", mutants.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault):
    """Who changes the code changes the fault as well."""
    assert not mutants.misplaced(fault)
    assert fault.old != fault.new and fault.why and fault.tests


def test_the_list_is_long_and_about_all_parts():
    names = [fault.name for fault in mutants.FAULTS]
    assert len(set(names)) == len(names) >= 40
    files = {fault.file.rpartition("/")[0] or fault.file[:2] for fault in mutants.FAULTS}
    parts = {"co", "ch", "00", "01", "02", "03", "04", "topics", "slurm", "benchmarks", "results"}
    assert parts | {"tests", "notebooks"} <= files


def test_ten_faults_are_noticed(capsys):
    """MUTANTS_SEED chooses them; without it the day does."""
    seed = os.environ.get("MUTANTS_SEED") or datetime.date.today().isoformat()
    with capsys.disabled():
        print(f"\nten planted faults: python tests/mutants.py --random 10 --seed {seed}")
    code, said = run("tests/mutants.py", "--random=10", f"--seed={seed}")
    print(said)
    assert code == 0 and said.count(" caught (") + said.count(" skipped (") == 10


# One fault of a made-up list. Its test knows no torch, so nothing heavy is imported.
ONE = """
import sys
sys.path.insert(0, "tests")
import mutants
mutants.HEAVY = ()
mutants.FAULTS = [mutants.Fault("made up", {}, {}, {}, "", "test_budgets.py::" + {})]
sys.exit(mutants.main([]))
"""
RUNG, TEST, IMPORT = "00_single_gpu.py", "test_no_private_names[00_single_gpu.py]", "import time\n"
PLANTED = {
    "caught (": (RUNG, IMPORT, f"{IMPORT}time._private\n", TEST),
    "SURVIVED (": (RUNG, IMPORT, f"{IMPORT}time.public\n", TEST),
    "NOT RUN, exit code": ("tests/pairs.py", "import ast\n", "import (\n", TEST),
    "its old text is found 0 times": (RUNG, "import no_such_thing\n", "", TEST),
    "its old text is found 2 times": (RUNG, "optimizer.", "", TEST),
    "A test of the list does not exist": (RUNG, IMPORT, "", "test_no_such_thing"),
}


@pytest.mark.parametrize("said", PLANTED)
def test_what_survives_or_has_drifted_is_said(said):
    code, text = run("-c", ONE.format(*map(repr, PLANTED[said])))
    assert said in text and code == (said != "caught ("), text


def test_a_test_that_fails_without_any_fault_has_caught_none():
    """Here because a folder that it needs is not in the copy."""
    less = ONE.replace(
        "HEAVY = ()", "HEAVY, mutants.NOT_COPIED = (), (*mutants.NOT_COPIED, 'topics')"
    )
    words = (RUNG, IMPORT, "", "test_each_budget_is_of_a_file")
    code, text = run("-c", less.format(*map(repr, words)))
    assert code == 1 and "without any fault ... FAIL" in text and "0 of 1 caught" in text, text
