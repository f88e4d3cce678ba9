"""The house stays small: lengths of files, no private names, no arrow from a rung to a topic.

The budgets of the diffs are in test_docs.py.
"""

import ast

import pytest

from pairs import ROOT

# Lines of a file, blank ones and comments included (wc -l).
MOST = {
    "common.py": 200,
    "04_lightning.py": 105,
    "topics/standalone.py": 115,
    "README.md": 300,
    "notebooks/figures.py": 300,
    "tests/readme.py": 160,
    "slurm/*.sbatch": 45,
}
TAUGHT = [*sorted(ROOT.glob("[0-9]*.py")), ROOT / "common.py"]  # what a student reads
FILES = [(path, most) for glob, most in MOST.items() for path in sorted(ROOT.glob(glob))]


def name(value):
    return str(value.relative_to(ROOT)) if hasattr(value, "relative_to") else None


def test_each_budget_is_of_a_file():
    assert all(list(ROOT.glob(glob)) for glob in MOST)


@pytest.mark.parametrize(("path", "most"), FILES, ids=name)
def test_length(path, most):
    assert path.read_text().count("\n") <= most


def imported(path):
    """Return every word of the file's import statements: modules and names."""
    words = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            words += [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    return [part for word in words for part in word.split(".")]


@pytest.mark.parametrize("path", TAUGHT, ids=name)
def test_no_private_names(path):
    """A private name of torch or Lightning may be another one, or gone, in the next version."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.attr for node in nodes if isinstance(node, ast.Attribute)] + imported(path)
    assert not [word for word in names if word.startswith("_") and not word.startswith("__")]


@pytest.mark.parametrize("path", TAUGHT, ids=name)
def test_no_rung_needs_a_topic(path):
    """Topics are variants of rungs: the arrow has one direction."""
    assert not {"topics", "importlib", "runpy"} & set(imported(path))
