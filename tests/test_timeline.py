"""labs/timeline.py draws what has happened: who computed, what was hidden, who waited for whom."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "labs"))

import slides  # noqa: E402
import timeline  # noqa: E402

import ladder  # noqa: E402,F401  imports what the forked ranks need
from labs.bugs.bench import fork_watched  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SLEEP = 0.1  # seconds of a step that the straggler loses
# Rank 1 is late for each backward pass. The layers are of two buckets, and of a dozen of them.
SCRIPT = f"""
import time, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(64, 256)).square().mean()
    if rank == 1:
        time.sleep({SLEEP})
    loss.backward()
    optimizer.step()
    HERE
dist.destroy_process_group()
"""


def recorded(tmp_path, here="pass", **options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("HERE", here))
    options = {"steps": 3, "timeout": 60, "starter": fork_watched} | options
    ranks, ended, errors = timeline.record(script, [], **options)
    return ranks, ended, errors


@pytest.fixture(scope="module")
def straggler(tmp_path_factory):
    ranks, ended, errors = recorded(tmp_path_factory.mktemp("run"), nproc=3)
    assert ended in ("steps", "end"), errors
    return timeline.analyse(ranks, 3)


def test_straggler_is_found_and_the_times_add_up(straggler):
    assert straggler["steps"] == 3 and [lane["rank"] for lane in straggler["lanes"]] == [0, 1, 2]
    assert straggler["slowest"] == 1
    assert any("Rank 1 is the slowest" in text for text in timeline.sentences(straggler))
    for lane in straggler["lanes"]:
        total, parts = lane["communication_ms"], lane["hidden_ms"] + lane["exposed_ms"]
        assert parts == pytest.approx(total) and lane["hidden_ms"] >= 0
        work = sum(lane[f"{kind}_ms"] for kind in timeline.WORK)
        assert work + lane["exposed_ms"] <= lane["step_ms"] * 1.001
        buckets = lane["calls"]
        assert {call["op"] for call in buckets} == {"bucket"}  # not the hook's own all_reduce
        assert len(buckets) == 3 * 3  # six layers of 0.25 MiB
        assert sum(call["bytes"] for call in buckets) == 3 * 6 * (256 * 256 + 256) * 4
    first, second, third = straggler["lanes"]
    assert second["forward_ms"] > SLEEP * 1e3  # the sleep stands before its backward pass
    for lane in (first, third):
        assert lane["waits_ms"]["1"] > 0.5 * SLEEP * 1e3 > sum(second["waits_ms"].values())
        assert lane["exposed_ms"] >= lane["waits_ms"]["1"] * 0.999


def test_hidden_and_exposed_of_known_times():
    """Two ranks by hand, in seconds: rank 1 comes 1 s late."""

    def rank(number, late):
        one = timeline.Rank(number, world=2, steps=[0.0, 10.0])
        one.spans["forward"] = [(1.0, 3.0 + late)]
        one.spans["backward"] = [(3.0 + late, 9.0)]
        first = {"op": "bucket", "start": 4.0 + late, "end": 7.0, "world": True, "sync": False}
        one.calls = [first, first | {"start": 6.0, "end": 9.0}]
        return one

    result = timeline.analyse([rank(0, 0.0), rank(1, 1.0)], steps=1)
    early, late = result["lanes"]
    assert early["communication_ms"] == 5000 and early["hidden_ms"] == 2000
    assert late["communication_ms"] == 4000 and late["hidden_ms"] == 1000
    assert early["exposed_ms"] == late["exposed_ms"] == 3000
    assert early["backward_ms"] == 3000 and late["backward_ms"] == 2000
    assert early["calls"][0]["for"] == 1 and early["calls"][0]["waits"] == 5
    assert early["waits_ms"] == {"1": 0}  # it waits while it computes: that costs nothing
    assert result["exposed_share"] == pytest.approx(0.3)


def test_a_hang_is_drawn(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # as on most machines
    here = "if step == 5 and rank == 0: dist.barrier()\n    if step == 5 and rank: time.sleep(60)"
    ranks, ended, _ = recorded(tmp_path, here, nproc=2, steps=5, timeout=6)
    assert ended == "timeout"
    result = timeline.analyse(ranks, 5, hung=True)
    said = " ".join(timeline.sentences(result))
    assert re.search(r"Rank 0 waits in barrier \(train.py:\d+\), which never returned", said)
    assert "barrier" in timeline.svg(result)


def test_svg_is_whole_and_to_scale(straggler):
    root = ET.fromstring(timeline.svg(straggler))
    boxes = [e.attrib for e in root.iter("{http://www.w3.org/2000/svg}rect") if "class" in e.attrib]
    red = sum(float(box["width"]) for box in boxes if box["class"] == "idle")
    share = red / timeline.WIDTH * straggler["seconds"] * 1e3 / 3
    assert share == pytest.approx(sum(x["exposed_ms"] for x in straggler["lanes"]), rel=0.01)
    assert "http" not in timeline.page(straggler, "x").replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_browser_shows_it(straggler, tmp_path):
    """The words of the page, the colour and place of each bar, as a browser lays them out."""
    look = """<script>
      const all = [...document.querySelectorAll("rect[class]")].map(e => {
        const box = e.getBoundingClientRect();
        return [e.classList[0], getComputedStyle(e).fill, box.left, box.width, box.height];
      });
      const text = document.body.innerText + [...document.querySelectorAll("text")]
        .map(e => e.textContent).join(" ");
      document.documentElement.textContent = JSON.stringify({all, text});
    </script>"""
    page = tmp_path / "page.html"
    page.write_text(timeline.page(straggler, "A run of <train.py>") + look)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,700"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seen = json.loads(
        re.search(r"\{.*\}", done.stdout, re.S)[0].replace("&lt;", "<").replace("&gt;", ">")
    )
    assert "Rank 1 is the slowest" in seen["text"] and "A run of <train.py>" in seen["text"]
    widths = {}
    for kind, colour, left, width, height in seen["all"]:
        assert left >= 0 and left + width <= 1300 and height > 5
        if kind in ("idle", "exposed"):
            assert colour == "rgb(214, 39, 40)"
        widths[kind] = widths.get(kind, 0) + width
    parts = straggler["lanes"]
    ratio = sum(x["exposed_ms"] for x in parts) / sum(x["forward_ms"] for x in parts)
    assert widths["idle"] / widths["forward"] == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "nothing.py is not a file"),
        (["02_torchrun.py", "--steps=0"], "must be more than 0"),
        (["02_torchrun.py", "--output=/no/where.svg"], "does not exist"),
    ],
)
def test_wrong_use_is_one_line(words, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        timeline.parse_args(words)
    assert end.value.code == 2 and said in capsys.readouterr().err


# ---- the slides ----------------------------------------------------------------------------------


def test_slides_are_fresh():
    assert slides.PAGES.read_text() == slides.make(), "run: python labs/slides.py --write"
    text = slides.PAGES.read_text()
    assert text.count("<section>") == 6
    for name in ("01_single_node_multi_gpu.py", "02_torchrun.py", "03_multinode.py"):
        assert name == "01_single_node_multi_gpu.py" or slides.shown(slides.lines_of(name)) in text
        for line in slides.lines_of(name):
            assert line[0] == "@" or slides.html.escape(line) in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_slides_fit_and_print_as_six_pages(tmp_path):
    look = """<script>
      const all = [...document.querySelectorAll("section")].map(e => [e.scrollHeight,
        e.clientHeight, e.scrollWidth, e.clientWidth]);
      document.documentElement.textContent = JSON.stringify(all);
    </script>"""
    page, printed = tmp_path / "slides.html", tmp_path / "slides.pdf"
    page.write_text(slides.PAGES.read_text() + look)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,720"]
    command += [f"--user-data-dir={tmp_path / 'profile'}"]
    dump = [*command, "--dump-dom", page.as_uri()]
    done = subprocess.run(dump, capture_output=True, text=True, timeout=60)
    for height, most, width, widest in json.loads(re.search(r"\[\[.*\]\]", done.stdout)[0]):
        assert height <= most and width <= widest
    pdf = [*command, "--no-pdf-header-footer", f"--print-to-pdf={printed}"]
    subprocess.run([*pdf, slides.PAGES.as_uri()], capture_output=True, timeout=60, check=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) == 6


def test_teaching_names_rows_of_the_bench():
    text = (ROOT / "labs" / "TEACHING.md").read_text()
    rows = {line.partition(",")[0] for line in (ROOT / "results" / "bugs.csv").open()}
    table = text.partition("## Wrong answers")[2].partition("## Grading")[0]
    named = re.findall(r"\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", table)
    assert len(named) >= 10
    assert {name.strip("`") for cell in named for name in cell.split(", ")} <= rows
