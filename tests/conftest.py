"""For all tests: python, torchrun and the rest are those of the environment that runs pytest."""

import os
import sys
from pathlib import Path

import pytest

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def pytest_collection_modifyitems(config, items):
    """For two at a time (pytest -n 2 --dist loadgroup): a file stays together, clusters do too."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "cluster" if "cluster" in item.fixturenames else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))
