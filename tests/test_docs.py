"""What the READMEs and headers say is true: commands, paths, tables, and the laws of the ladder."""

import difflib
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import readme
import tables
import torch
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

import pairs
from ladder import fork

ROOT = pairs.ROOT
SCRIPTS = pairs.scripts()
RUNGS = readme.rungs()
READMES = readme.readmes()
README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
BLOCKS = re.findall(r"^```(\w+)( norun)?\n(.*?)^```$", README + INSTALL, re.DOTALL | re.MULTILINE)
EXECUTED = [block for language, norun, block in BLOCKS if language == "bash" and not norun]
CHECKED = [block for language, norun, block in BLOCKS if language == "bash" and norun]
STEP = ("optimizer.zero_grad()", "loss = F.cross_entropy(", "loss.backward()", "optimizer.step()")
BUDGETS = {"00b": (3, 2), "01": (28, 14), "02": (6, 9), "03": (10, 5)}


def name_of(path):
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else None


# ---- READMEs -------------------------------------------------------------------------------------


def test_generated_parts_are_fresh():
    stale = [name_of(path) for path in readme.stale()]
    assert not stale, f"{stale}: run python tests/readme.py --write"


def test_tour_record_has_what_a_reader_needs():
    record = json.loads((tables.RESULTS / "tour_cpu.json").read_text())
    assert {"date", "cpu", "cores", "gpus", "python", "torch"} <= record["machine"].keys()
    assert [rung["rung"] for rung in record["rungs"]] == [path.name for path in RUNGS]
    assert all(rung["same"] for rung in record["rungs"])


def prose(text):
    """Return the text without its fenced blocks and comments."""
    return re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the anchors of a README's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", prose(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text())):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"dead link: {link}"
        assert not anchor or anchor in anchors(target), f"dead anchor: {link}"


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_paths_exist(path):
    """A path in backticks exists, here or in the root, or a run makes it (git ignores it)."""
    suffix = r"\.(py|sh|sbatch|md|json|txt|toml|ipynb|npz|yaml|png)|/"
    for span in re.findall(r"`([^`\n]+)`", prose(path.read_text())):
        for word in span.split():
            if not re.fullmatch(rf"[\w.-][\w./-]*({suffix})", word):
                continue
            handed_out = ROOT / "labs" / "mine" / path.parent.name  # to a learner
            places = [
                f"{folder / word}{'/' * word.endswith('/')}"
                for folder in (path.parent, ROOT, handed_out)
            ]
            if any(Path(place).exists() for place in places):
                continue
            command = ["git", "check-ignore", "--no-index", *places]
            made = subprocess.run(command, cwd=ROOT, capture_output=True)
            assert made.returncode == 0, f"no such path: {word}"


def test_powershell_lines_are_those_of_bash():
    """Nobody can run them here: they are the bash lines, in Windows' spelling."""
    blocks = [block for language, _, block in BLOCKS if language == "powershell"]
    (block,) = blocks
    unix = block.replace("py -m", "python3 -m").replace("\\", "/").replace("/Scripts/", "/bin/")
    assert unix in CHECKED


# ---- commands ------------------------------------------------------------------------------------


@cache
def help_of(script):
    """Return what a script prints for --help. In a fork: a topic changes torch for itself."""
    done = fork(script, 1, "--help")
    if done.codes != [0] and (needs := re.search(r"needs \w+: pip install \S+", done.err)):
        pytest.skip(f"{script} {needs[0]}")
    assert done.codes == [0], f"{script} --help exits with {done.codes}: {done.err}"
    # Only the list of options: the help begins with the header, which names whatever it likes.
    return done.out.rpartition("\noptions:")[2]


def check_script(words):
    """Check that a script (a file, or -m and a module) exists and has these options."""
    script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    assert (ROOT / script).exists(), f"no such script: {script}"
    usage = help_of(script)
    for word in words[1:]:
        option = word.partition("=")[0]
        if option.startswith("--"):
            assert re.search(rf"{re.escape(option)}\b", usage), f"{script} has no {option}"


def check(command):
    """Check a command without running it. A kind of command that has no check fails."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if not words or words[0] in ("export", "rm", "source"):
        return
    program, *rest = words
    if program.endswith(("python", "python3")) and rest[:2] == ["-m", "pip"]:
        requirements = [b for a, b in zip(rest, rest[1:], strict=False) if a == "-r"]
        assert all((ROOT / file).exists() for file in requirements)
    elif program.endswith(("python", "python3")) and rest[:2] == ["-m", "venv"]:
        assert len(rest) == 3
    elif program.endswith(("python", "python3")):
        check_script(rest)
    elif program == "torchrun":
        args = get_args_parser().parse_args(rest)  # SystemExit for an unknown option
        start = rest.index(args.training_script)
        check_script(rest[start - 1 :] if args.module else rest[start:])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{word}:", makefile, re.MULTILINE) for word in rest), command
    elif program == "sbatch":
        (file,) = [word for word in rest if word.endswith(".sbatch")]
        assert subprocess.run(["bash", "-n", ROOT / file]).returncode == 0
    elif program == "bash" or program.endswith(".sh"):
        file = rest[0] if program == "bash" else program
        assert subprocess.run(["bash", "-n", ROOT / file]).returncode == 0
        if "exec" in rest:
            check(shlex.join(rest[rest.index("exec") + 1 :]))
    elif program == "diff":
        assert all((ROOT / file).exists() for file in rest[-2:])
    else:
        pytest.fail(f"no check for this command: {command}")


@pytest.mark.parametrize("block", CHECKED, ids=lambda block: block.splitlines()[0][:60])
def test_commands_that_are_not_run(block):
    for command in block.replace("\\\n", " ").splitlines():
        check(command)


@pytest.mark.parametrize("block", EXECUTED, ids=lambda block: block.splitlines()[0][:60])
def test_commands_run(block, tmp_path):
    """Run them as they stand, but: no GPU, one epoch, and checkpoints in a folder of the test."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = dict(os.environ, PATH=path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    for command in block.replace("\\\n", " ").splitlines():
        if not command.startswith("diff"):
            command += "" if "--epochs" in command else " --epochs 1"
        command = command.replace("checkpoints/", f"{tmp_path}/")
        run = subprocess.run(
            command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180
        )
        good = (0, 1) if command.startswith("diff") else (0,)  # 1: the files differ, as they should
        assert run.returncode in good, f"{command}\n{run.stdout}{run.stderr}"
        if not command.startswith("diff"):
            said = ("test accuracy", "nothing left to do")  # a finished run evaluates nothing
            assert any(words in run.stdout for words in said), f"{command}\n{run.stdout}"
    if "checkpoints/mine.pt" in block:
        assert "nothing left to do" in run.stdout and "train loss" not in run.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_commands_of_the_header(path):
    """A command begins after the colon of its label, or below it. \\ goes on in a deeper line."""
    for line, below in pairwise(readme.header(path).splitlines()):
        command = re.search(r"(?:: | {8}) *(?:\w+=\S* )*(?=python|torchrun)", line)
        if command and len(below) - len(below.lstrip()) > command.end():
            assert line.endswith(" \\"), f"pasted, this command ends too early: {line}"
    text = re.sub(r" \\\n +", " ", readme.header(path))
    starts = r"^(?:.*?:| {8}) +((?:\w+=\S* ?)*(?:python|torchrun|sbatch|bash|diff) .*)"
    found = re.findall(starts, text, re.M)
    if path in RUNGS:
        assert len(found) >= 2, "a header names its commands"
    for command in found:
        check(command)


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("no launcher has set RANK", "02_torchrun.py"),
        ("no launcher has set RANK", "03_multinode.py"),
        ("does not split into", "01_single_node_multi_gpu.py --nproc 5"),
        ("is for one node", "02_torchrun.py"),
    ],
)
def test_troubleshooting_quotes_what_the_scripts_say(message, command, monkeypatch, capsys):
    assert message in TROUBLESHOOTING
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    if message == "is for one node":
        env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
    script, *options = command.split()
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    ["processes for", "nothing left to do", "was made with", "cannot download", "cannot write"]
    + ["cannot read", "make them equal", "is there for rank", "is not finite after epoch"]
    + ["is not a checkpoint of these scripts", "is not a checkpoint of Lightning", "train loss nan"]
    + ["torchruns that do not know each other", "waits for the other tasks of the Slurm job"],
)
def test_troubleshooting_quotes_exist(message):
    assert message in TROUBLESHOOTING
    said = (ROOT / "checks.py").read_text() + (ROOT / "data" / "datasets.py").read_text()
    assert message.removesuffix(" nan") in said


@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("device_ids and output_device arguments ", "torch.nn.parallel.distributed"),
        ("SyncBatchNorm layers only work with GPU modules", "torch.nn.parallel.distributed"),
        ("Failed to parse reply file", "torch.distributed.elastic.multiprocessing.errors"),
        ("Early stopping conditioned on metric", "lightning.pytorch.callbacks.early_stopping"),
    ],
)
def test_troubleshooting_quotes_what_torch_and_lightning_say(message, module):
    """Those that are in Python; of the others the tests of the failures see some."""
    assert message in TROUBLESHOOTING
    assert message in Path(find_spec(module).origin).read_text()


def test_default_timeout_is_the_documented_one():
    (seconds,) = re.findall(r'"--timeout".*default="(\d+)"', (ROOT / "common.py").read_text())
    assert f"`--timeout` ({seconds} s)" in TROUBLESHOOTING


RENAMED = (ROOT / "docs" / "renamed.md").read_text()


def looked_up(name):
    """Return what a dotted name of the table means in the installed torch."""
    return pkgutil.resolve_name(re.sub(r"^dist\b", "torch.distributed", name))


def test_renamed_names_are_those_of_torch():
    """Old names exist and say that they are deprecated; new ones exist. torch 2.13 and newer."""
    if not hasattr(torch.distributed, "all_gather_single"):
        pytest.skip("an older torch")
    rows = re.findall(r"^\| `(\S+)` \| warns \| `(\S+)`", RENAMED, re.MULTILINE)
    assert len(rows) >= 9
    for old, new in rows:
        if new == "torchrun":
            assert "deprecated" in inspect.getsource(looked_up(old))
            continue
        if old.startswith("DDP("):
            parameters = inspect.signature(DistributedDataParallel).parameters
            assert {"broadcast_buffers", new} <= parameters.keys()
            continue
        thing = looked_up(old)
        marked = getattr(thing, "__deprecated__", getattr(thing.__init__, "__deprecated__", ""))
        assert "deprecated" in marked, old
        assert callable(looked_up(new)), new


def test_new_options_are_those_of_torchrun():
    usage = get_args_parser().format_help()
    if "--virtual-local-rank" not in usage:
        pytest.skip("an older torch")
    options = re.findall(r"^\| `(--\S+)` \|", RENAMED, re.MULTILINE)
    assert len(options) == 4 and all(option in usage for option in options)
    assert "30" in inspect.getsource(LaunchConfig.__post_init__)  # the default of one of them


def test_every_folder_and_every_topic_is_linked():
    for path in ROOT.glob("[!.]*/README.md"):
        assert f"]({path.parent.name}/README.md)" in README, path
    index = (ROOT / "topics" / "README.md").read_text()
    for path in [*ROOT.glob("topics/[!_]*.py"), *ROOT.glob("topics/*.sh")]:
        assert len(re.findall(rf"^\|.*\| \[`{path.name}`\]", index, re.MULTILINE)) == 1, path.name
    first = index.partition("**Read these six first**")[2].partition("| **")[0]
    assert first.count("](") == 2 * 6  # a link to the topic, and one to what it is compared with


LENGTHS = {"common.py": 200, "04_lightning.py": 105, "topics/standalone.py": 110}
LENGTHS |= {"README.md": 300, "topics/README.md": 200, "tests/readme.py": 160}


@pytest.mark.parametrize(("name", "most"), LENGTHS.items())
def test_lengths(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


@pytest.mark.parametrize("path", [*RUNGS, ROOT / "common.py"], ids=name_of)
def test_no_private_names(path):
    found = re.search(r"(?<!self)(?<!cls)\._[a-z]\w*", pairs.code(path))
    assert not found, f"{path.name}: {found[0]}"


# ---- the laws of the ladder ----------------------------------------------------------------------

PAIRS = pytest.mark.parametrize(("before", "after"), pairs.pairs(), ids=name_of)


def alone(path):
    """Whether a topic is no variant: it subclasses what rung 04 has, or says that it is whole."""
    text = path.read_text()
    whole = 'import_module("04_lightning")' in text or "\nStandalone" in text
    return path not in RUNGS and whole


def test_every_file_has_its_pair():
    variants = [after for _, after in pairs.pairs()]
    for path in SCRIPTS:
        if path not in variants and path != RUNGS[0] and not alone(path):
            assert re.search(rf"diff -y -w \S+\.py {path.name}", readme.header(path)), path.name


@PAIRS
def test_budget(before, after):
    most = BUDGETS.get(after.name.partition("_")[0], (20, 10)) if after in RUNGS else (20, 10)
    argued = re.search(r"^Budget: \+(\d+) -(\d+) because \S", readme.header(after), re.MULTILINE)
    if argued and after not in RUNGS:
        most = int(argued[1]), int(argued[2])
    plus, minus = pairs.changed(before, after)
    assert plus <= most[0] and minus <= most[1], f"+{plus} -{minus} is over +{most[0]} -{most[1]}"


def step_of(path):
    lines = path.read_text().splitlines()
    return [line for line in lines if line.strip().startswith(STEP)]


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_step_is_the_same_everywhere(path):
    if path.name.startswith("04") and path in RUNGS:
        pytest.skip("Lightning owns the step")
    if path not in RUNGS:
        if alone(path):
            pytest.skip("no variant of a rung")
        base = path
        while base not in RUNGS:
            base = readme.before(base)
            assert base, "its header names no file that it is a variant of"
        if base.name.startswith("04"):
            pytest.skip("a variant of Lightning's rung: Lightning owns the step")
        if re.search(r"^Step: .*because \S", readme.header(path), re.MULTILINE):
            pytest.skip("the header says why the step is another one")
    reference = step_of(RUNGS[0])
    assert len(reference) == len(STEP)
    assert step_of(path) == reference


@pytest.mark.parametrize("path", RUNGS, ids=name_of)
def test_length_of_a_rung(path):
    assert 50 <= len(path.read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / "common.py"], ids=name_of)
def test_lines_fit_side_by_side(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert len(line) <= 100, f"{path.name}:{number}"


def comments_of(path):
    """Return (comment, the code that it stands at or above) of a file, in order."""
    lines = path.read_text().splitlines()
    found = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                code = lines[row - 1][:column].strip()
                below = (line.strip() for line in lines[row:] if line.strip()[:1] not in ("", "#"))
                found.append((token.string, code or next(below, "")))
    return found


@PAIRS
def test_comments_are_kept_as_they_are(before, after):
    old, new = comments_of(before), comments_of(after)
    texts = {text for text, _ in new}
    fresh = [text for text, _ in new if text not in {text for text, _ in old}]
    code = {line.partition("  #")[0].strip() for line in after.read_text().splitlines()}
    for text, line in old:
        if text in texts:
            continue
        reworded = difflib.get_close_matches(text, fresh, cutoff=0.6)
        assert not reworded, f"{text!r} became {reworded[0]!r}"
        assert line not in code, f"{text!r} is gone, but its code is still there: {line}"


def tracked():
    """Return the text files of the repository, but for this one."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    binary = (".npz", ".png", ".pt")
    return [p for p in paths if p.is_file() and p != Path(__file__) and p.suffix not in binary]


def test_no_fixed_ports_in_code():
    for path in tracked():
        text = path.read_text()
        if path.stem in ("bugs", "test_bugs", "test_check"):  # where a fixed port is the fault
            continue
        if path.suffix == ".py":
            text = re.sub("HEAD_NODE:29400", "", pairs.code(path))  # in advice
        elif path.suffix in (".sbatch", ".sh"):
            text = re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE)
        else:
            continue
        found = re.search(r"\b(29500|12355|29400)\b", text)
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_nobody_meets_on_the_login_node():
    """SLURM_LAUNCH_NODE_IPADDR may be the login node. Comments may warn of it; no code reads it."""
    for path in tracked():
        if path.suffix in (".py", ".sh", ".sbatch", ".ipynb") and path.parent.name != "tests":
            lines = path.read_text().splitlines()
            code = "\n".join(line for line in lines if not line.strip().startswith("#"))
            assert "SLURM_LAUNCH_NODE_IPADDR" not in code, path.name
