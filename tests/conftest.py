"""For all tests: python, torchrun and the rest are those of the environment that runs pytest."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WARM = Path(__file__).parent / "warm"
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def pytest_configure(config):
    """What tests leave among the temporary files (logs of torchrun, compiled code) goes with them.

    Pytest's own folders stay where they are, to look at what a failed test wrote.
    """
    config.addinivalue_line("markers", "slow: left out by make check")
    config.addinivalue_line("markers", "cold: its starts of Python are new interpreters")
    if not hasattr(config, "workerinput"):  # a worker of pytest -n inherits the environment
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
        folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name
        warm = sys.platform == "linux" and os.environ.get("COLD") != "1"
        if warm and "WARM" not in os.environ:  # the mutants' pytest is started by this one
            prefix = f"{folder.name}/warm"
            parent = start_warm_parent(prefix)
            config.add_cleanup(lambda: parent.communicate(timeout=60))  # closes stdin: it ends
            os.environ["WARM"] = prefix


def start_warm_parent(prefix, *node, **options):
    """From here on, most starts of Python below the tests are forks: see warm/parent.py.

    node: words before the command, for a pretended node.
    """
    command = [*node, sys.executable, WARM / "parent.py", prefix]
    env = {**options.pop("env", os.environ), "OMP_NUM_THREADS": "1"}
    env.pop("WARM", None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen(command, env=env, **pipes, **options)
    parent.stdout.readline()  # it is there, or has failed: then starts are cold
    return parent


@pytest.fixture(autouse=True)
def starts(request, monkeypatch):
    """Start Python warm, unless the test is marked `cold`. (The tour starts all rungs cold.)"""
    if request.node.get_closest_marker("cold"):
        monkeypatch.delenv("WARM", raising=False)
    elif "WARM" in os.environ:
        monkeypatch.setenv("PYTHONPATH", str(WARM))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """For two at a time: a file stays together, since its tests share runs; Slurm's files do too.

    (--dist loadgroup would be for that, but finds no group: xdist 3.8 with pytest 9.2.)
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            slurm = "slurm" in nodeid or "test_nodes" in nodeid
            return "cluster" if slurm else nodeid.partition("::")[0]

    return Files(config, log)
