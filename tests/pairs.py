"""The diffs of the ladder: which files are neighbours, and how many lines of code lie between them.

The pairs are not listed anywhere: the header of a file names the command that shows its diff.

    python tests/pairs.py      prints every pair with its count
"""

import ast
import functools
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAIR = re.compile(r"diff -U0 -w (\S+\.py) (\S+\.py)")


def scripts() -> list[Path]:
    """Every script a reader can run: the rungs and the topics."""
    return sorted([*ROOT.glob("[0-9]*.py"), *ROOT.glob("topics/[!_]*.py")])


@functools.cache
def header(source: str) -> str:
    """Return the docstring of a file's text."""
    return ast.get_docstring(ast.parse(source)) or ""


def pairs() -> list[tuple[Path, Path]]:
    """Return (file, its variant), as the headers name them."""
    docs = {path: header(path.read_text()) for path in scripts()}
    found = [(ROOT / a, ROOT / b, path) for path, doc in docs.items() for a, b in PAIR.findall(doc)]
    for before, after, path in found:
        assert after == path, (
            f"{path.name}: the diff in its header is of another file, {after.name}"
        )
        assert before.exists(), (
            f"{path.name}: the diff in its header names {before}, which is missing"
        )
    return [(before, after) for before, after, _ in found]


def code(path: Path) -> str:
    """Return the file without its blank, comment and docstring lines."""
    source = path.read_text()
    skip = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            skip |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return "".join(
        f"{line}\n"
        for number, line in lines
        if number not in skip and line.strip() and not line.strip().startswith("#")
    )


def diff(before: Path, after: Path, only_code: bool = False) -> str:
    """Return `diff -U0 -w before after`, of whole files or of their code alone."""
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for path in (before, after):
            names.append(Path(folder) / f"{len(names)}-{path.name}")
            names[-1].write_text(code(path) if only_code else path.read_text())
        command = ["diff", "-U0", "-w", *map(str, names)]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    return "".join(text.splitlines(keepends=True)[2:])  # without the two lines of file names


def changed(before: Path, after: Path) -> tuple[int, int]:
    """Return how many lines of code the second file adds and takes away."""
    lines = diff(before, after, only_code=True).splitlines()
    return sum(x.startswith("+") for x in lines), sum(x.startswith("-") for x in lines)


if __name__ == "__main__":
    for before, after in pairs():
        plus, minus = changed(before, after)
        print(f"+{plus:<3} -{minus:<3} {before.name} -> {after.relative_to(ROOT)}")
