"""For all tests: python, torchrun and the rest are those of the environment that runs pytest."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def pytest_configure(config):
    """What tests leave among the temporary files (logs of torchrun, compiled code) goes with them.

    Pytest's own folders stay where they are, to look at what a failed test wrote.
    """
    config.addinivalue_line("markers", "slow: left out by make check")
    if not hasattr(config, "workerinput"):  # a worker of pytest -n inherits the environment
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
        folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def pytest_collection_modifyitems(config, items):
    """For two at a time (pytest -n 2 --dist loadgroup): a file stays together, clusters do too."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "cluster" if "cluster" in item.fixturenames else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
