"""The labs: every starter fails for its reason, every solution passes, no wrong answer does.

Here what a check runs is forked from this process, which has imported torch: see forked(). The last
tests run labs/run.py itself, with real processes.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from functools import cache
from pathlib import Path

import lightning  # noqa: F401  here, so that the forks need not
import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args
from torch.distributed.run import parse_args as torchrun_args

from labs import starters
from labs.bugs import bench
from ladder import ROOT, of_the_day

pytestmark = pytest.mark.cold  # a fork of this process is what is warm here
LEARNER = starters.Learner("you")
NAMES = [folder.name for folder in starters.folders()]
load = cache(lambda name: starters.load(starters.LABS / name))
# Labs that hand out a script of this repository, patched.
OF_A_SCRIPT = ["1_two_processes", "3_detective", "5_break_it", "6_batch_and_rate", "7_lightning"]
each_lab = pytest.mark.parametrize("name", NAMES)

# ---- what the checks run, in forks ---------------------------------------------------------------


def forked_spawn(function, args=(), nprocs=1, **_):
    mp.start_processes(function, args, nprocs, start_method="fork")


def run_file(path, words):
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(Path(path).parent))
    names = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(Path(path).read_text(), str(path), "exec"), names)


def run_rank(path, words):
    """Do what a rank of torchrun does; say its exit code: elastic_launch tells one only."""
    try:
        run_file(path, words)
    except SystemExit as error:
        print(f"exitcode  : {error.code}\n", end="", file=sys.stderr, flush=True)
        raise


def as_python(words):
    """Do what `python WORDS` does."""
    torch.set_num_threads(1)
    mp.spawn = forked_spawn
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    elif words[:2] == ["-m", "torch.distributed.run"]:
        args = torchrun_args(words[2:])
        if args.standalone:
            args.rdzv_backend, args.rdzv_endpoint = "c10d", "127.0.0.1:0"
            args.rdzv_id = str(uuid.uuid4())
        config = config_from_args(args)[0]
        config.start_method, config.monitor_interval = "fork", 0.02
        try:
            elastic_launch(config, run_rank)(args.training_script, args.training_script_args)
        except ChildFailedError as error:
            print(str(error).replace("exitcode", "code"), file=sys.stderr)
            sys.exit(1)
    elif words[0].endswith("labs/check.py"):
        bench.checker.check.__defaults__ = (bench.fork_watched, True)
        sys.argv = words
        sys.exit(bench.checker.main())
    else:
        run_file(os.path.abspath(words[0]), words[1:])


def children():
    text = "".join(p.read_text() for p in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pid in text.split()}


def forked(command, work, limit, env=None, watch=None):
    """Stand in for starters.run(): a python command runs in a fork. Nothing of it is left."""
    words = [str(word) for word in command]
    if words[0] not in ("python", sys.executable):
        return REAL_RUN(command, work, limit, env, watch)
    out, err = (work / f".{stream}" for stream in ("out", "err"))
    if work == ROOT:
        out, err = (
            Path(os.environ["TMPDIR"]) / f"labs-{os.getpid()}.{stream}" for stream in ("out", "err")
        )
    before, deadline = children(), time.monotonic() + limit
    if not (pid := os.fork()):
        code = 1
        try:
            faulthandler.disable()  # pytest's would write to pytest's stderr
            for number, path in ((0, os.devnull), (1, out), (2, err)):
                flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0)
                os.dup2(os.open(path, flags), number)
            sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
            os.environ.update({"OMP_NUM_THREADS": "1"} | (env or {}))
            os.chdir(work)
            as_python(words[1:])
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = None
    while code is None and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if watch:
            watch(out.read_text())
    while left := children() - before:
        for one in left:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
                os.waitpid(one, 0)
    killed = code is None
    code = starters.KILLED if killed else code
    return starters.Run(code, out.read_text(), err.read_text(), killed, limit)


REAL_RUN = starters.run


@pytest.fixture
def in_forks(monkeypatch):
    """All labs run what they run in forks; what these leave behind comes to this process."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(starters, "run", forked)
    for name in NAMES:
        if hasattr(load(name), "run"):
            monkeypatch.setattr(load(name), "run", forked)
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def checked(lab, work, files, answers):
    """Return what the lab's check says of these files and answers, in the learner's folder."""
    for file, text in (lab.files(LEARNER) | files).items():
        (work / file).parent.mkdir(parents=True, exist_ok=True)
        (work / file).write_text(text)
    begun = time.monotonic()
    results = lab.check(work, LEARNER, answers)
    assert results and time.monotonic() - begun < lab.LIMIT
    if "at rest" in failures(results) and hasattr(lab, "fresh"):  # another test was busy just then
        lab.fresh.cache_clear()
        results = lab.check(work, LEARNER, answers)
    return results


def failures(results):
    return "\n".join(f"{r.name}: {r.text}" for r in results if r.passed is False)


@each_lab
def test_the_starter_fails_for_its_reason(name, in_forks, tmp_path):
    lab = load(name)
    said = failures(checked(lab, tmp_path, {}, {}))
    assert lab.FAILS in said, said


@each_lab
def test_the_solution_passes(name, in_forks, tmp_path):
    lab = load(name)
    results = checked(lab, tmp_path, *lab.SOLUTION(LEARNER))
    assert not failures(results), failures(results)


def wrong(name):
    """Return the wrong answers of a lab: those of the learner where they depend on him."""
    lab = load(name)
    return lab.WRONG(LEARNER) if callable(lab.WRONG) else lab.WRONG


def some(name):
    """Return all of a lab's wrong answers, or of lab 5, whose checks are the slowest, two a day."""
    return of_the_day(list(wrong(name)), 2) if name.startswith("5") else wrong(name)


CASES = [pytest.param(name, one, id=f"{name}-{one[0]}") for name in NAMES for one in some(name)]


@pytest.mark.parametrize("name, one", CASES)
def test_a_wrong_answer_fails(name, one, in_forks, tmp_path):
    """A wrong answer is the solution but for one thing."""
    lab, (_, files, answers, words) = load(name), one
    right_files, right_answers = lab.SOLUTION(LEARNER)
    said = failures(checked(lab, tmp_path, right_files | files, right_answers | answers))
    assert words in said, said


def test_an_answer_is_read_as_it_was_meant(in_forks, tmp_path):
    """A number in quotes, capitals and spaces change nothing; no answer is not a wrong answer."""
    lab, answers = load("2_launch_six_ways"), load("2_launch_six_ways").SOLUTION(LEARNER)[1]
    answers["parents"] = f" {answers['parents']}"
    assert not failures(checked(lab, tmp_path, {}, answers))
    lab = load("7_lightning")
    right = {name: f"{who} ".title() for name, who in lab.SOLUTION(LEARNER)[1].items()}
    assert not failures(lab.told(right))
    assert failures(lab.told(right | {"wrap": "me"})).startswith("wrap: not answered yet")
    assert failures(lab.told({})).count("not answered yet") == len(right)


def test_9_overlap_needs_a_picture_with_something_to_overlap(in_forks, tmp_path):
    """One rank, or one bucket, has nothing to hide: what is right of it is not the lab's answer."""
    lab = load("9_overlap")
    files, answers = lab.SOLUTION(LEARNER)
    capitals = {name: f"{answers[name]} ".title() for name in lab.WORDS}
    assert not failures(checked(lab, tmp_path, files, answers | capitals))
    result = lab.numbers(tmp_path / "timeline.html")
    alone = result | {"lanes": result["lanes"][:1]}
    lanes = [lane | {"calls": lane["calls"][: result["steps"]]} for lane in result["lanes"]]
    for few in (alone, result | {"lanes": lanes}):
        text = f'<script id="numbers">{json.dumps(few)}</script>'
        right = lab.right(few)[0] | {"last_bucket": answers["last_bucket"]}
        said = failures(checked(lab, tmp_path, {"timeline.html": text}, right))
        assert "too few to see it" in said, said


def test_slurm_that_is_not_there_is_not_passed(in_forks, tmp_path, monkeypatch):
    lab, nobody = load("2_launch_six_ways"), starters.Run(127, "", "not found", False)
    run = lab.run
    absent = lambda command, *rest: nobody if "sinfo" in command else run(command, *rest)  # noqa: E731
    lab.printed.cache_clear()
    monkeypatch.setattr(lab, "run", absent)
    results = checked(lab, tmp_path, *lab.SOLUTION(LEARNER))
    lab.printed.cache_clear()
    assert not failures(results)
    [slurm] = [result for result in results if result.name == "slurm"]
    assert slurm.passed is None and slurm.text.startswith("not tried here: no Slurm"), slurm


def test_what_holds_is_said_beside_what_is_broken(in_forks, tmp_path):
    """Of lab 1, with lines of the learner's own file and no file that has the answer."""
    lab = load("1_two_processes")
    files = lab.solved((lab.REDUCED, ""), ("        sampler.set_epoch(epoch)\n", ""))
    results = {result.name: result for result in checked(lab, tmp_path, files, {})}
    assert not results["order"].passed and not results["loss"].passed, results
    [rules] = [result for name, result in results.items() if name.endswith("of 10 rules")]
    assert rules.passed and "gradients" in rules.text and "order" not in rules.text
    assert re.search(r"\(starter.py line \d+\)$", results["order"].text), results["order"]
    assert not re.search(r"02_torchrun|judge|/", failures(results.values())), results


def test_a_rank_s_error_is_said_and_not_torchrun_s():
    rank = '[rank1]:   File "/a/starter.py", line 7, in main\n[rank1]: NameError: no model\n'
    torchrun = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    said = starters.why(starters.Run(1, "", rank + torchrun, False))
    assert said == "NameError: no model (starter.py line 7)"
    assert "ChildFailedError" in starters.why(starters.Run(1, "", torchrun, False))


def test_starters_are_fresh():
    assert not starters.stale(), f"run: {starters.REFRESH}"


@each_lab
def test_a_rung_that_no_longer_fits_is_named(name, monkeypatch, tmp_path):
    """Each script that a starter is made of loses its loops: the error says how to go on."""
    made = []
    monkeypatch.setattr(starters, "ROOT", tmp_path)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("labs/bugs/twins/*.py"), *ROOT.glob("topics/*.py")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
        made.append(copy)
    files = load(name).files(LEARNER)
    for copy in made:
        copy.write_text("# another script\n")
    if name in OF_A_SCRIPT:
        with pytest.raises(ValueError, match=re.escape(starters.REFRESH)):
            load(name).files(LEARNER)
    else:
        assert load(name).files(LEARNER) == files


def test_the_detective_is_right(in_forks, tmp_path):
    """Who is guilty, as labs/check.py sees it, is what the sealed answers say."""
    lab = load("3_detective")
    right = lab.SOLUTION(LEARNER)[1]
    for file, text in lab.files(LEARNER).items():
        (tmp_path / file).write_text(text)
    row = starters.checked(tmp_path, 60, script="case_1.py", nproc=3)[right["case_1_cause"]]
    assert row["verdict"] == "broken", row
    lines = dict(re.findall(r"rank (\d)\D+ at case_1.py:(\d+)", row["evidence"]))
    assert len(lines) == 3, row
    [odd] = [rank for rank, line in lines.items() if list(lines.values()).count(line) == 1]
    assert int(odd) == right["case_1_rank"], row
    row = starters.checked(tmp_path, 60, script="case_2.py", nproc=3)[right["case_2_cause"]]
    clips = re.search(r"not all ranks clip: (\d) and (\d) and (\d) times", row["evidence"])
    assert clips and clips.groups().index("1") == right["case_2_rank"], row
    assert int(row["where"].rpartition(":")[2]) == right["case_2_line"], row


def test_the_detective_takes_both_places_of_a_moved_line():
    lab, moved = load("3_detective"), "    model.module.head = "
    for learner in map(starters.Learner, map(str, range(99))):
        text = lab.files(learner)["case_3.py"].splitlines()
        if found := [n for n, line in enumerate(text, 1) if line.startswith(moved)]:
            assert lab.lines(learner)["case_3"] == {found[0] - 1, found[0]}
            return
    raise AssertionError("nobody has that case")


def test_nothing_is_predicted_before_it_is_measured(tmp_path):
    command = [sys.executable, starters.LABS / "4_scale_it" / "starter.py", "wide"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("first run measure.py --model wide")


SAID = """\
[rank1]:   File "/mine/starter.py", line 48, in main
[rank1]: RuntimeError: Error(s) in loading state_dict for Sequential:
[rank1]: \tMissing key(s) in state_dict: "1.weight".
[rank1]: \tUnexpected key(s) in state_dict: "module.1.weight".
[rank0]: RuntimeError: [pair.cc:561] Connection closed by peer [127.0.0.1]:24742.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_the_culprits_error_is_told():
    """Not torchrun's own, which comes last, and not that of a rank which waited for another."""
    said = starters.why(starters.Run(1, "", SAID, False))
    first, rest = "RuntimeError: Error(s) in loading", 'Unexpected key(s) in state_dict: "module.1'
    assert said.startswith(first) and rest in said and said.endswith("(starter.py line 48)")
    assert "peer" in starters.why(starters.Run(1, "", SAID.splitlines()[4], False))


def test_a_checkpoint_without_weights_is_not_called_others(monkeypatch, tmp_path):
    lab, ended = load("5_break_it"), starters.Run(0, "", "", False)
    for name, state in (("mine", {"model": {}}), ("whole", {"weights": {}})):
        torch.save(state, tmp_path / name)
    monkeypatch.setattr(lab, "whole", lambda: [tmp_path / "whole"])
    text = lab.verdict("kill", ended, [1, 2], tmp_path / "mine", "killed").text
    assert "not one of common.save_checkpoint" in text


# ---- labs/run.py ---------------------------------------------------------------------------------

RUNNER = """if True:
    import pathlib, signal, sys
    sys.path.insert(0, {root!r})
    from labs import run, starters
    run.WORK, run.SLACK = pathlib.Path({work!r}), 1
    starters.LABS = pathlib.Path({labs!r})
    signal.signal(signal.SIGTERM, run.interrupted)
    code = run.main()
    assert "torch" not in sys.modules
    sys.exit(code)
"""


@pytest.fixture
def runner(tmp_path):
    """Return a function that calls labs/run.py with a work folder of its own."""

    def start(*words, labs=starters.LABS, **options):
        names = {"root": str(ROOT), "work": str(tmp_path / "work"), "labs": str(labs)}
        command = [sys.executable, "-c", RUNNER.format(**names), *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, **pipes, **options)

    def call(*words, **options):
        process = start(*words, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    call.start, call.work = start, tmp_path / "work"
    return call


def test_the_way_through_a_lab(runner, tmp_path):
    code, out, err = runner()
    assert code == 0 and out.count("\n") == len(NAMES) + 2 and not err, err
    code, out, _ = runner("3", "--learner", "ann")
    assert code == 1 and "about 60 minutes" in out and "case_1_rank" in out, out
    work = runner.work / "3_detective"
    case, answers = work / "case_1.py", work / "answers.toml"
    assert 'case_1_rank = ""' in answers.read_text()
    case.write_text("mine")
    (work / "case_2.py").unlink()
    right = load("3_detective").SOLUTION(starters.Learner("ann"))[1]
    right["case_1_rank"] = str(right["case_1_rank"])  # a number in the quotes that were there
    answers.write_text("".join(f"{k} = {json.dumps(v)}  # so\n" for k, v in right.items()))
    assert runner("3", "--hint")[1].startswith("hint 1 of 4") and not runner("3", "--hint")[2]
    report = tmp_path / "report.json"
    code, out, _ = runner("3_detective", "--json", report)
    assert code == 0 and "9 of 9 hold" in out and "hints: 2 of 4" in out, out
    assert case.read_text() == "mine" and (work / "case_2.py").exists()
    seen = json.loads(report.read_text())
    keys = re.findall(r"`(\w+)`", (ROOT / "labs" / "README.md").read_text().partition("| key |")[2])
    assert seen.keys() <= set(keys) and seen["version"] == 1 and seen["passed"], seen.keys()
    assert seen["tries"] == 2 and seen["learner"] == "ann" and len(seen["checks"]) == 9
    assert "passed, tries: 2, hints: 2" in runner()[1]
    for grader in sorted((ROOT / "labs" / "graders").glob("*.py")):
        subprocess.run([sys.executable, grader, report], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "result.json").read_text())["score"] == 9
    assert len(json.loads((tmp_path / "results.json").read_text())["tests"]) == 9
    assert (tmp_path / "junit.xml").read_text().count("<testcase") == 9
    assert runner("3", "--reset", "--hint")[0] == 0
    [backup] = runner.work.glob("3_detective.backup-*")
    assert (backup / "case_1.py").read_text() == "mine" != case.read_text()


def test_what_the_runner_refuses(runner):
    def refused(*words):
        code, _, err = runner(*words)
        assert code == 2 and err.count("\n") == 1, err
        return err

    assert "no lab 77: there are 1_two_processes" in refused("77")
    assert "which lab?" in refused("--hint")
    assert "does not exist" in refused("3", "--json", "/no/such/folder/report.json")
    runner("3", "--learner", "ann", "--hint")
    assert "is of ann: --learner bob needs --reset" in refused("3", "--learner", "bob")
    answers = runner.work / "3_detective" / "answers.toml"
    for bad in ("case_1_rank = two", "case_9_rank = 1", "case_1_rank", "case_1_rank = 1 2"):
        answers.write_text(f"# a comment\n{bad}\n")
        assert "answers.toml line 2 is no answer" in refused("3")
    (runner.work / "progress.json").write_text("{")
    assert "progress.json cannot be read" in refused("3")


def test_a_python_without_torch_is_one_line():
    command = [sys.executable, "-S", "labs/run.py", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "this Python has no torch" in done.stderr and not done.stdout


HANGS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
print("started", flush=True)
time.sleep(99)
"""
LAB = """
import sys, time
from labs import starters
from labs.starters import Result, run
TITLE, MINUTES, LIMIT, QUESTIONS, HINTS = "A hang", 1, 2, {{}}, []
def files(learner):
    return {{"starter.py": {hangs!r}}}
def check(work, learner, answers):
    done = run([sys.executable, "starter.py"], work, 50)
    {then}
    return [Result("ends", not done.timed_out, done.out)]
"""


SKIPS = """
from labs.starters import Result
TITLE, MINUTES, LIMIT, QUESTIONS, HINTS = "No Slurm", 1, 2, {}, []
def files(learner):
    return {}
def check(work, learner, answers):
    return [Result("python", True, "good"), Result("slurm", None, "not tried here: no Slurm")]
"""


def test_what_is_not_tried_is_not_counted(runner, tmp_path):
    (folder := tmp_path / "labs" / "1_skips").mkdir(parents=True)
    (folder / "README.md").write_text(
        "# A lab\n\nIt needs [Slurm](../slurm.md) and `bash`.\n\n## Steps\n"
    )
    (folder / "lab.py").write_text(SKIPS)
    code, out, _ = runner("1", "--json", tmp_path / "report.json", labs=folder.parent)
    assert code == 0 and "1 of 1 hold, 1 not tried here; " in out, out
    assert "skipped  slurm            not tried here: no Slurm\n" in out
    assert "\nIt needs Slurm and bash.\n" in out
    for grader in sorted((ROOT / "labs" / "graders").glob("*.py")):
        subprocess.run([sys.executable, grader, "report.json"], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "result.json").read_text())["max_score"] == 1
    assert len(json.loads((tmp_path / "results.json").read_text())["tests"]) == 1
    junit = (tmp_path / "junit.xml").read_text()
    assert "<skipped" in junit and "<failure" not in junit


def left(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize("how", ["limit", "check hangs", "ours hangs", "SIGTERM"])
def test_the_runner_keeps_its_limit_and_leaves_nothing(how, runner, tmp_path):
    (folder := tmp_path / "labs" / "1_hang").mkdir(parents=True)
    (folder / "README.md").write_text("# A lab\n\nIt hangs.\n")
    then = {"check hangs": "time.sleep(50)", "ours hangs": "starters.must_end(done, 'rung 02')"}
    then = then.get(how, "pass")
    (folder / "lab.py").write_text(LAB.format(hangs=HANGS, then=then))
    mark, begun = f"LABS_TEST={tmp_path}", time.monotonic()
    env = os.environ | {"LABS_TEST": str(tmp_path)}
    process = runner.start("1", labs=folder.parent, env=env)
    if how == "SIGTERM":
        while len(left(mark)) < 3:
            assert time.monotonic() - begun < 30
            time.sleep(0.05)
        process.terminate()
    out, err = process.communicate(timeout=40)
    assert not left(mark)
    if how == "SIGTERM":
        assert process.returncode == 128 + signal.SIGTERM and err == "run.py: ended by SIGTERM\n"
        return
    assert time.monotonic() - begun < 20 and "checking, for 2 s at most" in out
    assert "\n  starter.py: 2 s at most\n" in out
    if how == "ours hangs":  # then it is not the learner's fault
        text = "rung 02, which has no fault, does not run here: it did not end in 2 s (a hang, or a"
        assert process.returncode == 2 and f"run.py: nothing was checked. {text}" in err
        assert err.count("\n") == 1 and "NOT YET" not in out
        return
    assert process.returncode == 1
    said = (
        "the check took more than 2 s"
        if how == "check hangs"
        else "NOT YET  ends             started"
    )
    assert said in out, out
