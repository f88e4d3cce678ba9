"""The labs: hands out the tasks, runs their checks, keeps your progress.

    python labs/run.py                       the labs, and how far you are
    python labs/run.py 1_two_processes       the task, then its check; 1 is enough of the name
    python labs/run.py 1 --hint              one more hint
    python labs/run.py 1 --reset             start again; what you have is moved to a backup
    python labs/run.py 1 --json report.json  the report for a grader as well: see labs/README.md

The first call puts the files into labs/mine/. Nothing of yours is ever overwritten. Exit code 0:
the check has passed; 1: not yet; 2: nothing was checked. Standard library only.
"""

import argparse
import getpass
import importlib.util
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from labs import starters
from labs.starters import shown

WORK = starters.LABS / "mine"
SLACK = 10  # seconds that a check gets after its limit to say what it has seen


def fail(message):
    print(f"run.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("lab", nargs="?", help="a lab, or the beginning of its name")
    add(
        "--learner", metavar="NAME", help="who you are: picks your variant; default: your user name"
    )
    add("--hint", action="store_true", help="show one more hint, check nothing")
    add("--reset", action="store_true", help="make a backup of your files and start again")
    add("--json", metavar="FILE", help="write the report to FILE as well")
    args = parser.parse_args()
    if not args.lab and (args.hint or args.reset or args.json):
        fail("which lab? python labs/run.py shows them")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        fail(f"the folder of --json {args.json} does not exist")
    return args


def find(name):
    name = Path(name).name
    found = [path for path in starters.folders() if path.name.startswith(name)]
    if len(found) != 1:
        fail(f"no lab {name}: there are {', '.join(path.name for path in starters.folders())}")
    return found[0]


# ---- progress ------------------------------------------------------------------------------------


def read_progress():
    """Return {lab: {learner, tries, hints, passed, seconds}}."""
    try:
        return json.loads((WORK / "progress.json").read_text())["labs"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{WORK / 'progress.json'} cannot be read: move it away to start anew")


def write(path, text):
    """Write a file so that at every moment there is a whole one."""
    half = path.with_name(f"{path.name}.tmp")
    half.write_text(text)
    os.replace(half, path)


def keep(labs):
    write(WORK / "progress.json", json.dumps({"version": 1, "labs": labs}, indent=1) + "\n")


def table(labs):
    print(f"{'lab':18} {'title':44} {'minutes':>7}  you")
    for path in starters.folders():
        lab, mine = starters.load(path), labs.get(path.name, {})
        state = "passed" if mine.get("passed") else "begun" if mine else ""
        tries = f", tries: {mine['tries']}, hints: {mine['hints']}" if mine else ""
        print(f"{path.name:18} {lab.TITLE:44} {lab.MINUTES:7}  {state}{tries}")
    passed = sum(bool(mine.get("passed")) for mine in labs.values())
    print(f"{passed} of {len(starters.folders())} passed. Next: python labs/run.py LAB")


# ---- the work folder -----------------------------------------------------------------------------


def hand_out(lab, work, learner):
    """Write the learner's files, but none that is there; return the names of those written."""
    files = lab.files(learner)
    if lab.QUESTIONS:
        parts = [f'# {text}\n{name} = ""\n' for name, text in lab.QUESTIONS.items()]
        files = files | {"answers.toml": "\n".join(part.replace("\n#", "\n# ") for part in parts)}
    new = [name for name in files if not (work / name).exists()]
    work.mkdir(parents=True, exist_ok=True)
    for name in new:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        write(work / name, files[name])
    return new


def read_answers(work, lab):
    """Return {name: value} of the answers that are given: the part of TOML that labs need."""
    answers, path = {}, work / "answers.toml"
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not name or name.startswith("#"):
            continue
        try:
            if not equals or name not in lab.QUESTIONS:
                raise ValueError
            answer, stop = json.JSONDecoder().raw_decode(value)
            if value[stop:].strip()[:1] not in ("", "#"):
                raise ValueError
        except ValueError:
            kinds = 'name = "text", name = 1.5 or name = ["a", "b"], in one line'
            fail(f"answers.toml line {number} is no answer to a question: write {kinds}")
        if isinstance(answer, str) and re.fullmatch(r"-?\d+(\.\d+)?", answer):
            answer = json.loads(answer)  # "2" is 2: the quotes were there already
        if answer != "":
            answers[name] = answer
    return answers


def task(folder, lab, work, new):
    text = (folder / "README.md").read_text()
    goal = re.sub(r"\*\*|`|\[|\]\(.*?\)", "", text.split("\n\n")[1].replace("\n", " "))
    goal = re.sub(r" About \d+ minutes\.", "", goal.removeprefix("Goal. "))
    print(f"{folder.name}: {lab.TITLE}, about {lab.MINUTES} minutes\n{goal}\n")
    print(f"the task    {shown(folder / 'README.md')}\nyour files  {shown(work)}/")
    for name in new:
        print(f"  new       {name}")


# ---- the check -----------------------------------------------------------------------------------


def check(lab, work, learner, answers):
    """Return what the check says, after at most LIMIT seconds and SLACK."""
    results, not_checked = [], []

    def run():
        try:
            results.extend(lab.check(work, learner, answers))
        except starters.NotChecked as error:
            not_checked.append(str(error))
        except Exception as error:  # ours: say so, and do not blame the learner
            traceback.print_exc(file=(log := (WORK / "error.log").open("w")))
            log.close()
            text = f"the check itself has failed, {error!r}: please report {WORK / 'error.log'}"
            results.append(starters.Result("check", False, text))

    starters.ends = time.monotonic() + lab.LIMIT
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(lab.LIMIT + SLACK)
    if thread.is_alive():
        starters.end_all()
        return [starters.Result("time", False, f"the check took more than {lab.LIMIT} s")]
    if not_checked:
        fail(not_checked[0])
    return results


def report_card(results, mine, lab, labs):
    print()
    words = {True: "passed", False: "NOT YET", None: "skipped"}
    for result in results:
        print(f"{words[result.passed]:8} {result.name:16} {result.text}")
    tried = [result.passed for result in results if result.passed is not None]
    good, skipped = sum(tried), len(results) - len(tried)
    more = f", {skipped} not tried here" if skipped else ""
    more += ", and there may be more checks behind these" if good < len(tried) else ""
    print(f"\n{lab.TITLE}: {good} of {len(tried)} hold{more}; {mine['seconds']} s, ", end="")
    print(f"tries: {mine['tries']}, hints: {mine['hints']} of {len(lab.HINTS)}")
    if good < len(tried):
        print("Stuck? The same command with --hint." * (mine["hints"] < len(lab.HINTS)))
    else:
        passed = sum(bool(one.get("passed")) for one in labs.values())
        print(f"Passed: {passed} of {len(starters.folders())} labs.")


def main():
    args = parse_args()
    labs = read_progress()
    if not args.lab:
        table(labs)
        return 0
    folder = find(args.lab)
    if not importlib.util.find_spec("torch"):
        fail("this Python has no torch: activate the environment (source .venv/bin/activate)")
    lab, work = starters.load(folder), WORK / folder.name
    before = labs.get(folder.name, {})
    name = args.learner or before.get("learner") or getpass.getuser()
    if args.reset and work.exists():
        backup = work.with_name(f"{work.name}.backup-{time.strftime('%Y%m%d-%H%M%S')}")
        os.rename(work, backup)
        before = {}
        print(f"your files are in {shown(backup)}/ now")
    elif before and before["learner"] != name and work.exists():
        fail(f"{shown(work)} is of {before['learner']}: --learner {name} needs --reset")
    mine = {"learner": name, "tries": 0, "hints": 0, "passed": False, "seconds": 0} | before
    learner, labs[folder.name] = starters.Learner(name), mine
    try:
        new = hand_out(lab, work, learner)
        keep(labs)
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")
    if args.hint:
        mine["hints"] = min(mine["hints"] + 1, len(lab.HINTS))
        keep(labs)
        for number, hint in enumerate(lab.HINTS[: mine["hints"]], 1):
            print(f"hint {number} of {len(lab.HINTS)}: {hint}")
        return 0
    answers = read_answers(work, lab)
    task(folder, lab, work, new)
    print(f"\nchecking, for {lab.LIMIT} s at most ...", flush=True)
    begun = time.monotonic()
    results = check(lab, work, learner, answers)
    mine["seconds"], mine["tries"] = round(time.monotonic() - begun, 1), mine["tries"] + 1
    passed = bool(results) and all(result.passed is not False for result in results)
    mine["passed"] = passed or mine["passed"]
    keep(labs)
    report_card(results, mine, lab, labs)
    if args.json:
        report = {"version": 1, "lab": folder.name, "title": lab.TITLE, "limit": lab.LIMIT}
        report |= mine | {"passed": passed, "checks": [vars(result) for result in results]}
        write(Path(args.json), json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


def interrupted(number, frame):
    starters.end_all()
    print(f"run.py: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    sys.exit(main())
