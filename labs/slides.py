"""Make labs/slides.html, six pages for a projector or a printer, from the files of this repository.

    python labs/slides.py            says if the pages are stale; exits with 1 if they are
    python labs/slides.py --write    makes them again

In a browser: space or the arrow keys scroll; print to PDF for one page a slide.
"""

import html
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "labs")]
import readme  # noqa: E402
import timeline  # noqa: E402

PAGES = Path(__file__).with_name("slides.html")
STYLE = """
@page { size: 1280px 720px; margin: 0 }
* { box-sizing: border-box }
body { margin: 0; font: 22px/1.35 sans-serif; background: #ddd }
section { width: 1280px; height: 720px; padding: 28px 44px; margin: 0 auto 16px; background: white;
  overflow: hidden; break-after: page; position: relative }
@media print { section { margin: 0 } }
h1 { font-size: 34px; margin: 0 0 14px }
pre { font: 16px/1.25 monospace; margin: 0; white-space: pre-wrap }
.plus { background: #e2f4e4 } .minus { background: #fbe3e3 } .at { color: #888 }
td, th { text-align: left; padding: 6px 14px 6px 0; vertical-align: top }
table.small { font-size: 18px } .small td, .small th { padding: 2px 30px 2px 0 }
code { font-size: .9em } svg { width: 100% }
"""


def lines_of(name):
    """Return the lines of the diff that leads to this file, as the README shows it."""
    return re.search(r"```diff\n(.*?)```", readme.diff(name), re.S)[1].splitlines()


def shown(lines):
    """Return a diff in colours. The numbers of its lines mean nothing on a slide."""
    kinds = {"+": "plus", "-": "minus"}
    parts = [
        f'<div class="{kinds[line[0]]}">{html.escape(line)}</div>'
        if line[0] in kinds
        else '<div class="at">⋮</div>'
        for line in lines
    ]
    return f"<pre>{''.join(parts)}</pre>"


def ladder():
    """Return the rungs, and what each adds to the one before."""
    rows = ""
    for path in readme.rungs():
        text = " ".join(readme.header(path).split("\n\n")[0].split()).partition(": ")[2]
        text, count = text.partition(". ")[0].rstrip("."), readme.count(path)
        cells = f"<code>{path.name}</code>", html.escape(text), count
        rows += "<tr>" + "".join(f"<td>{cell}" for cell in cells)
    return f"<table><tr><th>file<th>what is new<th>lines of code{rows}</table>"


def step():
    """Return the step of DDP as timeline.py draws a run. The times are made up; rank 1 is late."""
    ranks = []
    for number, late in enumerate((0, 6e-3)):
        rank = timeline.Rank(number, world=2, steps=[0.0, 0.1])
        rank.spans["data"] = [(1e-3, 5e-3 + late)]
        rank.spans["forward"] = [(6e-3 + late, 30e-3 + late)]
        rank.spans["backward"] = [(30e-3 + late, 90e-3)]
        rank.spans["optimizer"] = [(91e-3, 99e-3)]
        begins, ends = (42e-3, 56e-3, 70e-3), (60e-3, 74e-3, 89e-3)
        for begin, end in zip(begins, ends, strict=True):
            call = {"op": "bucket", "start": begin + late, "end": end, "bytes": 25 * 2**20}
            rank.calls.append(call | {"world": True, "sync": False})
        ranks.append(rank)
    result = timeline.analyse(ranks, 1)
    picture = timeline.svg(result)
    # The sentences below it are about a run, and this one is a sketch.
    for text in timeline.sentences(result):
        picture = re.sub(rf"<text [^>]*>{re.escape(html.escape(text))}</text>", "", picture)
    return picture.replace('id="wait"', 'id="late"').replace("url(#wait)", "url(#late)")


def slides():
    """Return {title: HTML} of the six pages."""
    first = lines_of("01_single_node_multi_gpu.py")
    loop = next(n for n, line in enumerate(first) if "same_on_all_ranks" in line) - 1
    second, third = lines_of("02_torchrun.py"), lines_of("03_multinode.py")
    words = (
        "<p>Each rank runs forward and backward on its own share of the batch. A <b>bucket</b> of "
        "gradients leaves as soon as it is full, while <code>backward()</code> goes on with "
        "earlier layers: <b>hidden</b>. What is still under way when all is computed is "
        "<b>exposed</b>: the step pays for it. All ranks then step by themselves, from equal "
        "weights with equal gradients.<p>A sketch. Your own run: <code>python labs/timeline.py "
        "02_torchrun.py -- --model wide</code>"
    )
    lightning = (
        '<br><table class="small">'
        "<tr><th>Lightning<th>you"
        "<tr><td>starts the ranks, makes the group<td>divide <code>--batch-size</code> by the ranks"
        "<tr><td>wraps the model in DDP<td>give each rank its share of the test set"
        "<tr><td>zero_grad, backward, step; set_epoch<td>say that metrics are sums over all ranks"
        "<tr><td>saves on rank 0, resumes<td>send batch norm's statistics before the evaluation"
        "</table>"
    )
    return {
        "One training job, told five ways: the same losses": ladder(),
        "00 → 01: who am I, which share is mine?": shown(first[:loop]),
        "00 → 01: together where all must, alone where one may": shown(first[loop:]),
        "What DDP does in a step": step() + words,
        "01 → 02: torchrun starts the ranks": shown(second),
        "02 → 03: on which node? 04: Lightning": shown(third) + lightning,
    }


def make():
    body = "".join(
        f"<section><h1>{html.escape(title)}</h1>{text}</section>\n"
        for title, text in slides().items()
    )
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Data-parallel training'
    return f"{head}</title><style>{STYLE}</style>\n{body}</html>\n"


if __name__ == "__main__":
    text = make()
    if "--write" in sys.argv:
        PAGES.write_text(text, encoding="utf-8")
    elif not PAGES.exists() or PAGES.read_text(encoding="utf-8") != text:
        sys.exit("labs/slides.html is stale: run python labs/slides.py --write")
