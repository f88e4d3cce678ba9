"""The notebooks: committed executed, run again here, and nothing in them starts a process group."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys

import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient
from test_contract import run

from ladder import ROOT, RUNGS, launch

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FORBIDDEN = r"init_process_group|mp\.spawn|multiprocessing|torchrun|Trainer|subprocess|^!|^%%"


def outputs(notebook, kind):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [out for cell in cells for out in cell.outputs if out.output_type == kind]


def printed(notebook):
    """Return what the cells print, and their tables."""
    text = [out.text for out in outputs(notebook, "stream")]
    return text + [out.data["text/plain"] for out in outputs(notebook, "execute_result")]


def drawn(notebook):
    return sum("image/png" in out.data for out in outputs(notebook, "display_data"))


def test_there_are_four():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["batch_and_lr", "communication", "sampling", "scaling"]


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


NOTEBOOK = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@NOTEBOOK
def test_a_notebook_is_committed_clean(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "DDP needs a process for each device" in notebook.cells[0].source
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not outputs(notebook, "error") and drawn(notebook)
    assert all(out.name == "stdout" for out in outputs(notebook, "stream"))
    assert code[0].source.count("# change this line") == 1 and "your own" in code[0].source
    assert not any(cell.metadata for cell in notebook.cells)  # such as the times of a run
    found = re.search(r"/(home|tmp|root|Users|work|opt|usr|mnt)/|[A-Z]:\\\\", path.read_text())
    assert not found, f"an absolute path: {found[0]}"
    for cell in code:
        assert not re.search(FORBIDDEN, cell.source, re.MULTILINE), cell.source


@NOTEBOOK
def test_a_notebook_runs_and_prints_what_is_committed(path):
    """In a fresh kernel, in the notebooks' folder, as Jupyter does: the numbers are not stale."""
    committed, again = nbformat.read(path, 4), nbformat.read(path, 4)
    for cell in code_of(again):
        cell.outputs = []
    NotebookClient(again, timeout=60, resources={"metadata": {"path": path.parent}}).execute()
    assert not outputs(again, "error")
    assert printed(again) == printed(committed), "run the command of notebooks/README.md"
    assert drawn(again) == drawn(committed)


@NOTEBOOK
def test_a_notebook_also_starts_in_the_root(path):
    first = code_of(nbformat.read(path, 4))[0].source
    python("-c", first)


def python(*arguments, cwd=ROOT, **env):
    """Run Python in a fresh process; return what it prints."""
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | {"MPLBACKEND": "agg"} | env
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- figures.py ----------------------------------------------------------------------------------

NUMBER = r"-?\d+(?:\.\d+)?"


def parts(path):
    """Return an SVG as its text without numbers, and its numbers."""
    text = re.sub(r"\b[a-z]?[0-9a-f]{10}\b", "id", path.read_text())  # hashes of coordinates
    return re.sub(NUMBER, "#", text), [float(found) for found in re.findall(NUMBER, text)]


def words(path):
    """Return the words and numbers that one reads in an SVG: it has them as comments."""
    return sorted(re.findall(r"<!-- (.*?) -->", path.read_text()))


FIGURES = ("notebooks/figures.py", "labs/bugs/figure.py")


def test_the_figures_of_the_readme_are_fresh(tmp_path):
    said = "".join(python(script, "--out", tmp_path) for script in FIGURES)
    kept = sorted((ROOT / "results" / "figures").glob("*.svg"))
    drawn = sorted(tmp_path.glob("*.svg"))
    assert kept and [path.name for path in kept] == [path.name for path in drawn]
    assert said.count("wrote") == len(kept)
    for old, new in zip(kept, drawn, strict=True):
        assert words(old) == words(new), f"{old.name} is stale: run make figures"
        if f"Matplotlib v{matplotlib.__version__}," in old.read_text():  # else it lays out anew
            (text, numbers), (fresh, others) = parts(old), parts(new)
            assert text == fresh and len(numbers) == len(others)
            assert numbers == pytest.approx(others, abs=0.01), f"{old.name}: run make figures"


def test_the_figures_are_the_same_bytes_again(tmp_path):
    for folder, script in itertools.product(("a", "b"), FIGURES):
        python(script, "--out", tmp_path / folder)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


# Runs the code cells of a notebook on the files of a folder, and says which draw.
RUN = """
import json, sys
import matplotlib.pyplot as plt
from IPython.core.interactiveshell import InteractiveShell
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
for n, cell in enumerate(cells):
    source = "".join(cell["source"])
    if n == 0:
        source = source.replace("figures.RESULTS", f"figures.Path({sys.argv[2]!r})")
    InteractiveShell.instance(colors="nocolor").run_cell(source).raise_error()
    print("cell", n, "drawn" if plt.get_fignums() else "empty")
    plt.close("all")
"""
# What is drawn by the cells of scaling.ipynb; the first one lists what was measured.
SCALING = ["speedup", "data_parallel", "launchers", "weak_strong", "amdahl", "bound", "cores"]


def write(rows, folder):
    with (folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(rows, folder, name="scaling"):
    """Run a notebook on these rows of scaling.csv; return what it prints, and what it draws."""
    write(rows, folder)
    said = python("-c", RUN, ROOT / "notebooks" / f"{name}.ipynb", folder, cwd=ROOT / "notebooks")
    cells = {int(n) for n in re.findall(r"cell (\d+) drawn", said)}
    return said, {figure for n, figure in enumerate(SCALING, 1) if n in cells}


def table(counts, serial):
    """Return rows of scaling.csv that follow Amdahl's law; DataParallel is half as fast as DDP."""
    with (ROOT / "results" / "scaling.csv").open(newline="") as file:
        template = next(csv.DictReader(file)) | {"model": "resnet50", "precision": "tf32"}
    template |= {"image_size": 224, "per_rank_batch": 256, "device": "cuda", "gpu": "some GPU"}
    rows = []
    for devices in counts:
        for script in RUNGS:
            if script.startswith("00_") and devices > 1:
                continue
            speed = 100 / (serial + (1 - serial) / devices) / (2 if script[:3] == "00b" else 1)
            for mode in ("weak", "strong"):
                row = template | {"script": script, "mode": mode, "devices": devices}
                row["per_rank_batch"] = 256 if mode == "weak" else 256 // devices
                row["effective_batch"] = row["per_rank_batch"] * devices
                rows.append(row | {"samples_per_second": speed, "min": speed, "max": speed})
    return rows


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, 4), (1, 2, 4, 8), (1, 3, 16)], ids=str)
def test_any_number_of_devices(counts, tmp_path):
    """The fit finds the serial fraction that the rows were made with, and predicts 8 from it."""
    said, drawn = draw(table(counts, 0.1), tmp_path)
    assert drawn == set(SCALING) - {"cores"}  # that is for CPUs
    assert "0.1000" in said and "4.71" in said  # 1 / (0.1 + 0.9 / 8) = 4.706
    ((old, new),) = re.findall(rf"resnet50(?:, on {counts[-1]})? +([\d.]+) +([\d.]+) +2\.0\n", said)
    assert float(old) == pytest.approx(float(new) / 2, abs=0.01)


@pytest.mark.parametrize("share", [0.5, 0])
def test_the_ring_law_finds_what_is_exposed(share, tmp_path):
    """Of steps made with 50 % of their all-reduce exposed, it finds that, and is right about 8."""

    def seconds(n, size):
        return 2 * (n - 1) * 1e-4 + 2 * (n - 1) / n * size / 1e9

    def speed(n):
        return n * 256 / (1 + share * seconds(n, 1e8))

    rows = [row for row in table((1, 2, 4, 8), 0) if row["script"] == "02_torchrun.py"]
    for row in rows:
        row |= dict.fromkeys(("samples_per_second", "min", "max"), speed(row["devices"]))
    machine = {name: rows[0][name] for name in ("device", "gpu", "cpu", "cores", "torch", "date")}
    machine["backend"] = "nccl"
    lone = ["bytes,devices,seconds,min,max," + ",".join(machine)]
    for n, size in itertools.product((2, 4), (1000, 10**6, 10**8)):
        cells = [size, n, *[seconds(n, size)] * 3, *machine.values()]
        lone.append(",".join(map(str, cells)))
    (tmp_path / "allreduce.csv").write_text("\n".join(lone))
    step = json.loads((ROOT / "results" / "overlap.jsonl").read_text().splitlines()[0]) | machine
    step |= {"model": "resnet50", "devices": 4, "precision": "tf32"}
    for bucket in step["buckets"]:
        bucket["bytes"] = 10**8 // len(step["buckets"])
    (tmp_path / "overlap.jsonl").write_text(json.dumps(step))
    said, _ = draw(rows, tmp_path, "communication")
    right, worst = speed(8) / 256, 8 / (1 + seconds(8, 1e8))
    cells = f"1, 2, 4 100 MB {seconds(8, 1e8) * 1e3:.2f} {share:.2f} {right:.2f} "
    cells += f"{right:.2f} to {right:.2f} {worst:.2f} {right:.2f}"
    assert cells in " ".join(said.split())
    there = f"{speed(4) / 256:.2f}"
    assert f"without 4, the law says {there} there; measured {there}." in said


def test_several_machines_and_a_slow_down(tmp_path):
    """Rows of two machines are never mixed; where several are slower than one, it is said."""
    slow = [row | {"gpu": "", "device": "cpu", "cpu": "some CPU"} for row in table((1, 2), 1.5)]
    rows = [row | {"model": "small"} for row in slow] + table((1, 2, 4), 0)
    said, drawn = draw(rows, tmp_path)
    assert "some GPU" in said and "cores of some CPU" in said and drawn == set(SCALING)
    said, _ = draw([row | {"model": "wide"} for row in table((1, 2), 1.5)], tmp_path)
    assert "several are slower than one" in said


@pytest.mark.parametrize(
    "rows", [table((1,), 0), table((2,), 0)[:1]], ids=["one device", "one row"]
)
def test_what_is_missing_is_said(rows, tmp_path):
    said, drawn = draw(rows, tmp_path)
    assert "There is no file ladder_of_speed.csv" in said
    missing = said.count("Nothing to draw here: ") - 1  # without the ladder of speed
    assert missing == len(SCALING) - len(drawn) >= 5


def test_without_files_nothing_is_written(tmp_path):
    (tmp_path / "none").mkdir()
    arguments = "--results", tmp_path / "none", "--out", tmp_path / "out"
    assert "There is no file scaling.csv" in python("notebooks/figures.py", *arguments)
    assert not list((tmp_path / "out").iterdir())


def test_work_measured_again_counts_as_it_was_last(tmp_path):
    rows = table((1, 2), 0.1)
    first = [row | {"samples_per_second": 1, "min": 1, "max": 1, "commit": "old"} for row in rows]
    said, _ = draw([*first, *first, *rows], tmp_path)
    assert "0.1000" in said


def test_a_rung_runs_in_a_cell_of_a_notebook():
    """As docs/notes.md says of Colab and Kaggle: its processes are not the notebook's."""
    cell = "!torchrun --standalone --nproc-per-node=2 02_torchrun.py --epochs=1"
    done = launch(sys.executable, "-m", "IPython", "--no-banner", "-c", cell)
    expected = run("00_single_gpu.py", 1, "--seed=0", whole=True).epochs[0]["train_loss"]
    assert f"epoch 1/1 | train loss {expected:.4f}" in done.stdout, done.stdout + done.stderr
