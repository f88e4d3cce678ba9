"""Devices, ports, the end of the ranks, and a run that was killed and started again."""

import re

from judge.collectives import last_line
from judge.data import samples
from judge.schedule import precision
from judge.steps import samples_of
from judge.trace import BROKEN, HOLDS, NOT_SEEN
from judge.weights import gradients, wrapper


def devices(trace):
    if trace.nodes < 2:
        return NOT_SEEN, "one node: local and global rank are equal (--nodes 2 tells)", None
    pattern = r"set_device(?:_index)?\(.*?\)|device\(\s*f?[\"']cuda[^)]*?\)"
    pattern += r"|device_ids\s*=\s*\[.*?\]|\.cuda\(\w.*?\)"
    for place, text in trace.lines:
        if text.lstrip().startswith("#") or not (found := re.search(pattern, text)):
            continue
        names = re.findall(r"[A-Za-z_]\w*", found[0])
        for name in names:
            kinds = {of_rank(v) for v in re.findall(rf"\b{name}\b\s*=\s*([^=\n].*)", trace.source)}
            if name == "rank" and not kinds - {None}:
                kinds = {"global"}
            if "local" in kinds or "local" in name.lower():
                return HOLDS, f"the source takes the device by {name}, the local rank", place
            if "global" in kinds and "device_count" not in found[0]:
                return BROKEN, f"the source takes the device by {name}, the global rank", place
    return NOT_SEEN, "the source names no device by number", None


def of_rank(text):
    if "LOCAL_RANK" in text or "local_rank" in text.lower() or "device_count" in text:
        return "local"
    return "global" if re.search(r"get_rank\(|[\"']RANK[\"']", text) else None


def teardown(trace):
    if trace.left:
        return BROKEN, f"left behind: {'; '.join(trace.left)[:120]}", None
    if trace.hang or trace.timed_out or any(trace.codes.values()):
        return NOT_SEEN, "the run did not end by itself", None
    missing = [r.number for r in trace.ranks if not any(d["whole"] for d in r.all("destroy"))]
    place = trace.ranks[0].last("init")["where"] if trace.ranks else None
    if missing and trace.ranks[0].last("init")["library"]:
        return NOT_SEEN, "a library made the group, and leaves it to the end of the process", place
    if missing:
        return BROKEN, f"no destroy_process_group on ranks {missing}", place
    return HOLDS, "all ranks destroyed the group, no process was left", place


def port(trace):
    for rank in trace.ranks:
        init = rank.last("init")
        fixed = re.search(r"tcp://.*?:(\d+)", init["method"] or "")
        if fixed and fixed[1] in trace.source:
            return BROKEN, f"init_method has port {fixed[1]}", init["where"]
        changed = rank.last("port")
        if init["port"] and init["port"] != init["given"]:
            place = changed["where"] if changed else init["where"]
            lines = [(at, x) for at, x in trace.lines if init["port"] in x]
            lines = [at for at, x in lines if not re.search("add_argument|setdefault|get", x)]
            if lines:
                return BROKEN, f"the script sets MASTER_PORT to {init['port']}", lines[0]
            return HOLDS, f"the script chose port {init['port']}, which it does not name", place
    if not trace.ranks:
        return NOT_SEEN, "no process group", None
    return HOLDS, "the launcher's port is used", trace.ranks[0].last("init")["where"]


def resume(trace):
    runs = trace.resumed
    if not runs:
        return NOT_SEEN, "no run was killed and started again", None
    if isinstance(runs, str):
        return NOT_SEEN, runs, None
    whole, killed, again, saved = (runs[k] for k in ("whole", "killed", "again", "saved"))
    place = saved["where"]
    if killed.timed_out or again.timed_out:
        return NOT_SEEN, "a stop and a resume take more than twice the time of the first run", place
    first, steps = whole.ranks[0].steps, again.ranks[0].steps if again.ranks else []
    if not steps and again.ranks and not any(again.codes.values()):
        text = f"skips all {len(first) - saved['steps']} steps that were left, and ends with 0"
        return BROKEN, text, place
    if not steps:
        return NOT_SEEN, "the second run made no step: " + last_line(again), place
    total, done = len(first), saved["steps"]
    if len(steps) != total - done:
        word = "repeats" if len(steps) > total - done else "skips"
        text = f"{word} {abs(len(steps) - total + done)} steps: {done} were saved, "
        return BROKEN, text + f"then {len(steps)} made, of {total} in one go", place
    causes = {"wrapper": wrapper, "gradients": gradients, "precision": precision}
    for name, check in (causes | {"samples": samples}).items():
        if check(whole)[0] == BROKEN:
            text = f"see {name}: it would not go on as before without a stop either"
            return NOT_SEEN, text, place
    before = killed.ranks[0].steps
    pairs = [(r.steps, k.steps[done:]) for r, k in zip(again.ranks, killed.ranks, strict=False)]
    if len(pairs) < whole.world or not all(one and two for one, two in pairs):
        return NOT_SEEN, "the first run was killed too early", place
    for index, (one, two) in enumerate(pairs):
        if one[0]["weights"] != two[0]["weights"]:
            return BROKEN, f"rank {index} does not go on from the saved weights", place
    for index, (one, two) in enumerate(pairs):
        states = [{s["optimizer"]: s["state"] for s in reversed(part)} for part in (one, two)]
        if any(states[0][n] != states[1][n] for n in states[0].keys() & states[1].keys()):
            return BROKEN, f"rank {index} does not go on from the saved optimizer state", place
    for index, (one, two) in enumerate(pairs):
        drawn = [[e["indices"] for e in s["before"].get("batch", ())] for s in (one[0], two[0])]
        if drawn[0] != drawn[1] and drawn[0] != [[None]]:
            begun = [e["indices"] for e in before[0]["before"].get("batch", ())]
            text = f"the first step of rank {index} reads other samples than it would have"
            return BROKEN, text + " (those of the first epoch)" * (drawn[0] == begun), place
    one, two = pairs[0]
    # A schedule that goes by the loss is another one where random numbers are.
    by_loss = any(e["metric"] for e in whole.ranks[0].all("scheduler"))
    for number, (step, old) in enumerate(zip(steps, first[done:], strict=True), done + 1):
        if [f"{x:.6g}" for x in step["lr"]] != [f"{x:.6g}" for x in old["lr"]] and not by_loss:
            text = f"learning rate {step['lr'][0]:.4g} instead of {old['lr'][0]:.4g}"
            return BROKEN, f"{text} in step {number}: the scheduler is forgotten", place
    if one[0].get("applied") != two[0].get("applied"):
        text = "same weights and samples, another gradient: random numbers"
        if samples_of(one[0]) != samples_of(two[0]):
            text = "same weights, other samples: they are drawn by random numbers"
        return NOT_SEEN, text, place
    return HOLDS, f"killed after step {len(before)}, goes on from step {done + 1} as before", place
