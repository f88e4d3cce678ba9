"""The generated parts of the READMEs: tables made from headers and from results/, and the diffs.

    python tests/readme.py           says which file is stale; exits with 1 if there is one
    python tests/readme.py --write   writes them again

A generated part stands between <!-- generated: NAME ARGUMENTS --> and <!-- end -->. NAME is a
function here or in tables.py: it gets the arguments, and topics() the part as it stands.
"""

import ast
import re
import sys

import tables
from tables import table

import pairs

ROOT = pairs.ROOT
PART = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# The command of a rung that works on any machine.
ANYWHERE = r"(?:python|torchrun --standalone --nproc-per-node=2) "


def rungs():
    """Return the rungs' paths, in order."""
    return sorted(ROOT.glob("[0-9]*.py"))


def before(path):
    """Return the file that this one is a variant of; None for the first rung and standalone.py."""
    found = {after: before for before, after in pairs.pairs()}
    if path in found or path == rungs()[0] or path not in rungs():
        return found.get(path)
    return rungs()[rungs().index(path) - 1]  # Lightning's header shows its diff side by side


def count(path):
    """Return '+a -b': the lines of code that this file adds to and takes from the one before."""
    return "+{} -{}".format(*pairs.changed(before(path), path)) if before(path) else ""


def header(path):
    """Return the docstring of a file."""
    return pairs.header(path.read_text())


def ladder():
    lines = []
    for path in rungs():
        text = " ".join(header(path).split("\n\n")[0].split()).partition(": ")[2]
        command = re.search(rf"{ANYWHERE}{re.escape(path.name)}$", header(path), re.MULTILINE)[0]
        lines.append([f"[`{path.name}`]({path.name})", text, f"`{command}`", count(path)])
    return table(["file", "what is new", "runs anywhere", "lines of code"], lines)


def diff(name, state=""):
    """Return, in <details>, the diff of the code that leads to this file."""
    after = ROOT / name
    doc_end = ast.parse(after.read_text()).body[0].end_lineno
    hunks = re.split(r"^(?=@@)", pairs.diff(before(after), after), flags=re.MULTILINE)
    code = [hunk for hunk in hunks if hunk and int(re.search(r"\+(\d+)", hunk)[1]) > doc_end]
    imports = r"@@.*\n(?=(?:[+-](?:import|from) .*\n)+$)"  # a hunk of imports needs no line number
    code = [re.sub(imports, "", hunk) for hunk in code]
    title = f"<b>{before(after).name} → {name}</b>, {count(after)} lines of code"
    opening = f"<details {state}".strip() + f">\n<summary>{title}</summary>\n\n```diff\n"
    return f"{opening}{''.join(code)}```\n</details>\n"


def topics(*, part):
    """Return a written table with its last column, the diff against the rung, made again."""

    def row(match):
        base = before(path := ROOT / "topics" / match[2])
        cell = f"[`{base.name}`](../{base.relative_to(ROOT)}) {count(path)}" if base else ""
        return f"{match[1]}| {cell} |" if base else match[0]

    return re.sub(r"^(.*\[`(.+?\.py)`\]\(.*)\|.*\|$", row, part, flags=re.MULTILINE)


def fresh(text):
    """Return the text of a README with its generated parts made again."""

    def part(match):
        name, *arguments = match[2].split()
        keep = {"part": match[3]} if name == "topics" else {}
        make = globals().get(name) or getattr(tables, name)
        return match[1] + make(*arguments, **keep) + match[4]

    return PART.sub(part, text)


def readmes():
    """Return the paths of all documents."""
    globs = (
        "README.md",
        "[!.]*/README.md",
        "case_studies/*/README.md",
        "labs/[0-9]*/README.md",
        "docs/*.md",
    )
    return sorted({path for pattern in globs for path in ROOT.glob(pattern)})


def stale():
    """Return {path: text as it should be} of the documents whose generated parts are not fresh."""
    wanted = {path: fresh(path.read_text()) for path in readmes()}
    return {path: text for path, text in wanted.items() if text != path.read_text()}


if __name__ == "__main__":
    todo = stale()
    for path, text in todo.items():
        print(f"{path.relative_to(ROOT)} is stale" + (": written" * ("--write" in sys.argv)))
        if "--write" in sys.argv:
            path.write_text(text)
    if todo and "--write" not in sys.argv:
        sys.exit("run: python tests/readme.py --write")
