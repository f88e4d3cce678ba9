"""Lab 3: three scripts that somebody else has broken. Which rank, which line, what cause?

Who is guilty is decided by the data, and stands nowhere in clear text: see sealed(). Case 3 is a
row of labs/bugs, by the hash of its name.
"""

import difflib
import re

from labs.bugs import bugs
from labs.starters import Result, patched, sealed, unanswered

TITLE, MINUTES, LIMIT = "Detective work", 60, 60
FAILS = "not answered yet"
RULE = "cause: the rule of labs/check.py that is broken first"
QUESTIONS = {
    "case_1_rank": "case_1.py stops at its end. Which rank has done what the others have not?",
    "case_1_line": "The number of the line where it parts from the others",
    "case_1_cause": RULE,
    "case_2_rank": "case_2.py ends, and its ranks have different weights. Which rank is to blame?",
    "case_2_step": "After how many steps do the weights differ?",
    "case_2_line": "The number of the line where it parts from the others",
    "case_2_cause": RULE,
    "case_3_line": "case_3.py ends, and no rank is better than another. Which line is wrong?",
    "case_3_cause": RULE,
}
# seed of the order, tokens, who: this rank's batch is the only one with fewer tokens.
SKIPS = [
    (4, 27, "cc79af0e7b1d9881"),
    (6, 27, "80ca45f6abf97b0c"),
    (18, 27, "29404e3db3134d67"),
    (25, 33, "d451e8a50708690c"),
    (30, 32, "01daf158230bbd7b"),
    (57, 33, "5ce7fd82424439a0"),
]
# seed of the order, who, after how many steps: this rank gets the one outlier of the data.
OUTLIERS = [
    (1, "3661ff5c83e60ece", "2fc03ea3e19f4e52"),
    (2, "6bdcb3671582de4e", "210c647d2115094f"),
    (3, "132ce974a58601bf", "1422cce2fe7b76a3"),
    (5, "723f1d94a01cd3ed", "941d9aa8e1cae404"),
    (6, "d4ee2969f9536748", "77913680d2d51600"),
    (7, "46c3c921dcca6ee4", "ea288c6a9ad368ac"),
    (10, "e750e4889c9e057a", "751393849ae48535"),
    (13, "ca744326cfcc9545", "e13d7b2bce1d694a"),
    (27, "efb6a4443da88a7f", "6aea8d54eda3cb9e"),
]
ROWS = ["c64ae5dba48df9e9", "9f77574cea10be61", "fbcd536fbec4ff83", "b62f1e216fcb9668"]
ROWS += ["b2638ecce427eb93", "1448b5504a9b1f60", "f60d615e7861a85b", "ffd0d5c31270e93b"]
CAUSES = {1: "81280e1b183bfed2", 2: "f0cc6a7358b1d5c1"}
ALSO = {"case_1": (), "case_2": ("replicas",)}  # broken, but as a consequence
HINTS = [
    "Run each case and note what you see: does it end, with which exit code, do the numbers change "
    "from run to run? A script that stops: where is each rank? One that ends: what is unequal?",
    "python labs/check.py --nproc 3 labs/mine/3_detective/case_1.py tells which rank waits where, "
    "and in the others which rule is broken. For a process that hangs: py-spy dump --pid PID, or "
    "the flight recorder, as in topics/debugging.py.",
    "Case 1: the rank that waits in another line than the others is the one that has made fewer "
    "steps. Case 2: print a sum of the weights of each rank after each step; the step and the rank "
    "are where they part. Case 3: --explain the first rule that is broken, and read its line.",
    "Case 1: look for what takes a rank out of the loop before a collective. Case 2: all gradients "
    "are equal, so look at what happens between backward() and step(). Case 3: compare with the "
    "script of labs/bugs/twins that it was made of.",
]


def cases(learner):
    """Return the learner's variants of the three cases."""
    rows = {sealed(row.name): row for row in bugs.FAULTY}
    picked = learner.pick("case 3", ROWS)
    return learner.pick("case 1", SKIPS), learner.pick("case 2", OUTLIERS), rows[picked]


def files(learner):
    (seed, fewest, _), (other, _, _), row = cases(learner)
    start = "torchrun --standalone --nproc-per-node="
    skips = [
        (f'lengths: {start}2 texts.py"""', f'lengths: {start}3 case_1.py"""'),
        (
            "sampler = DistributedSampler(dataset,",
            f"sampler = DistributedSampler(dataset, seed={seed},",
        ),
        ('"--epochs", type=int, default=2', '"--epochs", type=int, default=1'),
        (
            "            all_tokens = tokens.clone()\n",
            f"            if tokens < {fewest}:\n"
            "                continue  # hardly anything to learn from\n"
            "            all_tokens = tokens.clone()\n",
        ),
    ]
    outliers = [
        (f'loop: {start}2 flat.py"""', f'loop: {start}3 case_2.py"""'),
        ('"--seed", type=int, default=0', f'"--seed", type=int, default={other}'),
        ('"--epochs", type=int, default=2', '"--epochs", type=int, default=1'),
        (
            "            loss.backward()\n",
            "            loss.backward()\n"
            "            if x.abs().max() > 3.7:  # an outlier: a small step only\n"
            "                nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n",
        ),
    ]
    name = row.twin.rpartition("/")[2]
    return {
        "case_1.py": patched("labs/bugs/twins/texts.py", skips),
        "case_2.py": patched("labs/bugs/twins/flat.py", outliers),
        "case_3.py": bugs.faulty(row).replace(f" {name}", " case_3.py", 1),
    }


def lines(learner):
    """Return {case: the numbers of its wrong lines}: of all that is not in the correct twin.

    Where the twin has a line more, it is the line before which that one is missing.
    """
    found, twins = {}, ("labs/bugs/twins/texts.py", "labs/bugs/twins/flat.py")
    twins += (bugs.path(cases(learner)[2].twin),)
    for (name, text), twin in zip(files(learner).items(), twins, strict=True):
        old, new = patched(twin, []).splitlines(), text.splitlines()
        changed = set()
        for kind, _, _, start, stop in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
            stop += kind == "delete"
            changed |= set(range(start + 1, stop + 1)) if kind != "equal" else set()
        options = r"^\"\"\"|add_argument|seed=\d+"  # what tells the variants apart
        found[name[:-3]] = {n for n in changed if not re.search(options, new[n - 1])}
    return found


def check(work, learner, answers):
    missing = [name for name in QUESTIONS if name not in answers]
    if missing:
        return [unanswered(name) for name in missing]
    skip, outlier, row = cases(learner)
    where = lines(learner)
    causes = {"case_1": CAUSES[1], "case_2": CAUSES[2], "case_3": sealed(row.check)}
    also, results = ALSO | {"case_3": row.also}, []
    for name, answer in answers.items():
        case, what = name.rsplit("_", 1)
        if what == "line":
            passed = str(answer) in map(str, where[case])
        elif what == "cause":
            passed = sealed(answer) == causes[case]
        else:
            seed, *seals = (skip[0], skip[2]) if case == "case_1" else outlier
            passed = sealed((case, seed, what, answer)) == seals[what == "step"]
        text = f"{answer} is right" if passed else f"it is not {answer}"
        if what == "cause" and answer in also[case]:
            text = f"{answer} is broken, but as a consequence"
        elif what == "cause" and not passed:
            text += ": labs/check.py says which rule is broken"
        results.append(Result(name, passed, text))
    return results


def SOLUTION(learner):
    """For the tests, which compare it with what the scripts do: rank and step by trying all."""
    skip, outlier, row = cases(learner)

    def tried(seal, *words):
        return next(n for n in range(50) if sealed((*words, n)) == seal)

    rules = {sealed(row.check): row.check for row in bugs.FAULTY}
    answers = {f"{case}_line": max(numbers) for case, numbers in lines(learner).items()}
    answers |= {f"case_{number}_cause": rules[seal] for number, seal in CAUSES.items()}
    answers |= {"case_1_rank": tried(skip[2], "case_1", skip[0], "rank")}
    answers |= {"case_2_rank": tried(outlier[1], "case_2", outlier[0], "rank")}
    answers |= {"case_2_step": tried(outlier[2], "case_2", outlier[0], "step")}
    return {}, answers | {"case_3_cause": row.check}


def WRONG(learner):
    right = SOLUTION(learner)[1]
    rank, other = (right[f"case_{n}_rank"] for n in (1, 2))
    neighbours = [n for n in range(3) if n != rank]
    answers = {"case_1_line": right["case_1_line"] + 1}
    return [
        ("another rank", {}, {"case_1_rank": neighbours[0]}, f"not {neighbours[0]}"),
        ("the victim", {}, {"case_2_rank": (other + 1) % 3}, "case_2_rank"),
        ("where it stops", {}, answers, "case_1_line"),
        ("the step after", {}, {"case_2_step": right["case_2_step"] + 1}, "case_2_step"),
        ("a consequence", {}, {"case_2_cause": "replicas"}, "replicas is broken, but as a"),
        ("another rule", {}, {"case_2_cause": "gradients"}, "it is not gradients: labs/check.py"),
        (
            "what follows from it",
            {},
            {"case_3_cause": (*cases(learner)[2].also, "port")[0]},
            "case_3",
        ),
    ]
