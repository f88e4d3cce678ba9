"""Which samples each rank read, and in which order."""

import itertools
from collections import Counter, defaultdict

from judge.trace import BROKEN, HOLDS, NOT_SEEN, local_rank


def rows_of(this):
    """Return {index: (row, label)} of a pass."""
    rows = {}
    for batch in this["batches"]:
        for i, index in enumerate(batch["indices"] or ()):
            row, label = (batch.get(k) or [] for k in ("rows", "labels"))
            if i < len(row):
                rows[index] = (row[i], label[i] if i < len(label) else None)
    return rows


def same_data(parts):
    """Say whether equal indices mean equal samples: a rank may have cut its own data set."""
    first, second = rows_of(parts[0]), rows_of(parts[1])
    common = first.keys() & second.keys()
    if not common:
        return True
    if sum(first[i][0] == second[i][0] for i in common) * 2 > len(common):
        return True
    labels = {first[i][1] for i in common}
    equal = all(first[i][1] == second[i][1] for i in common)
    return equal and len(labels) > 1 and len(common) >= 8  # another augmentation of the same


def identities(parts):
    """Return for each rank the samples of its pass, comparable between ranks; None if unknown."""
    if any(p["ids"] is None for p in parts):
        return None
    if len(parts) > 1 and parts[0]["known"] and not same_data(parts):
        lists = [[row for b in p["batches"] for row in b.get("rows") or ()] for p in parts]
        whole = all(len(x) == len(p["ids"]) for x, p in zip(lists, parts, strict=True))
        return lists if whole else None
    return [p["ids"] for p in parts]


def shared(lists):
    """Return how many samples more than one of these lists has."""
    sets = [set(x) for x in lists]
    return sum(map(len, sets)) - len(set().union(*sets))


def by_local_rank(trace, lists):
    """Say whether exactly the ranks of the same local rank read the same."""
    groups = defaultdict(list)
    for rank, ids in zip(trace.ranks, lists, strict=True):
        groups[local_rank(trace, rank)].append(set(ids))
    if trace.nodes < 2 or any(s != g[0] for g in groups.values() for s in g):
        return False
    return shared([g[0] for g in groups.values()]) < trace.world


def epochs(trace):
    """Yield for each epoch the ranks' passes over the training set."""
    return list(zip(*(rank.training for rank in trace.ranks), strict=False))


def samples(trace):
    if not any(rank.training for rank in trace.ranks):
        return samples_by_hand(trace)
    if len(trace.ranks) < 2 or not epochs(trace):
        return NOT_SEEN, "not all ranks trained from a DataLoader", None
    total = 0
    for number, parts in enumerate(epochs(trace), 1):
        lists, place = identities(parts), parts[0]["where"]
        if lists is None:
            return NOT_SEEN, "the samples have neither an index nor a tensor", place
        if by_local_rank(trace, lists) and shared(lists) >= trace.world:
            return NOT_SEEN, "see sharding: ranks of the same local rank read the same", place
        read, double = sum(map(len, lists)), shared(lists)
        repeated = sum(len(x) - len(set(x)) for x in lists)
        times = {n for x in lists for n in Counter(x).values()}
        if not parts[0]["known"] and len(times) == 1 and times != {1} and parts[0]["ended"]:
            text = f"epoch {number}: each rank reads each sample {times.pop()} times (workers?)"
            return BROKEN, text, place
        drawn = any(p["replacement"] for p in parts) or repeated > 0.02 * read + trace.world
        total += read
        if drawn and not all(x == lists[0] for x in lists):
            return NOT_SEEN, f"drawn with replacement: {repeated} of {read} twice by design", place
        if double >= trace.world and tensor_parallel(trace, lists):
            return NOT_SEEN, "ranks that share a layer's weights read the same samples", place
        if double >= trace.world and not all(len(set(x)) < 2 for x in lists):
            text = f"epoch {number}: {double} of {read} reads are of samples that another rank read"
            same = all(set(x) == set(lists[0]) for x in lists)
            return BROKEN, text + ("; every rank reads all of them" if same else ""), place
        sizes = [p["size"] for p in parts]
        if parts[0]["known"] and lists[0] is parts[0]["ids"] and all(p["ended"] for p in parts):
            split = parts[0]["subset"] and not parts[0]["replicas"]
            expected = sum(sizes) if split else sizes[0]
            batch = max((b["count"] for p in parts for b in p["batches"]), default=1)
            missing = expected - len(set().union(*lists))
            if missing >= batch * trace.world:
                return BROKEN, f"epoch {number}: {missing} of {expected} are never read", place
    first = epochs(trace)[0]
    if number := same_draws(trace):
        text = f"ranks 0 and 1 draw the same random numbers in loading, {number} times: equal seeds"
        return BROKEN, f"{text}, and so the same augmentation", first[0]["where"]
    if not first[0]["known"] and not come_back(trace):
        text = "an iterable data set whose samples never come back: nothing to tell them by"
        return NOT_SEEN, text, first[0]["where"]
    text = f"{total} reads in {len(epochs(trace))} epochs, no sample by two ranks in one"
    return HOLDS, text, first[0]["where"]


def same_draws(trace):
    """Return how often ranks 0 and 1 draw the same random numbers for a batch, if mostly."""
    drawn = [{state for e in r.all("drawn") for state in e["states"]} for r in trace.ranks[:2]]
    number = len(drawn[0] & drawn[1])
    return number if number > 1 and number * 2 > len(drawn[0]) else 0


def tensor_parallel(trace, lists):
    """Say whether layers are cut in different ways, and ranks read all alike or nothing in common.

    FSDP cuts all of them in the same way.
    """
    cut = any(s["sharded"] and s["layouts"] > 1 for r in trace.ranks for s in r.steps)
    return cut and not shared({tuple(x) for x in lists})


def come_back(trace):
    """Say whether most fingerprints of epoch 1 are seen again in epoch 2."""
    rounds = [identities(parts) for parts in epochs(trace)[:2]]
    if len(rounds) < 2 or None in rounds:
        return False
    one, two = (set().union(*lists) for lists in rounds)
    return len(one & two) * 2 > len(one)


def samples_by_hand(trace):
    """Compare the rows that entered the model: the script cuts its batches by hand."""
    batches = [[f for f in r.all("forward") if f["grad"] and f.get("rows")] for r in trace.ranks]
    steps = list(zip(*batches, strict=False))
    if len(trace.ranks) < 2 or len(steps) < 2:
        return NOT_SEEN, "neither a DataLoader nor rows that enter a model", None
    rows = [[step["rows"] for step in parts] for parts in steps]
    if all(len(set(parts[0])) < 2 < len(parts[0]) for parts in rows):
        return NOT_SEEN, "all rows are alike", steps[0][0]["where"]
    seen = [list(itertools.chain(*(parts[r] for parts in rows))) for r in range(trace.world)]
    if by_local_rank(trace, seen) and shared(seen) >= trace.world:
        return NOT_SEEN, "see sharding", steps[0][0]["where"]
    bad = sum(shared(parts) >= max(1, len(parts[0]) // 2) for parts in rows)
    if bad * 2 > len(rows):
        text = f"in {bad} of {len(rows)} steps two ranks train on the same rows"
        return BROKEN, text, steps[0][0]["where"]
    if found := read_in_turn(rows):
        text = "{} of the first {} rows of rank {} are also among those of rank {}".format(*found)
        return BROKEN, f"{text}, in other steps", steps[0][0]["where"]
    if bad:
        text = f"in {bad} of {len(rows)} steps two ranks have the same rows, in most they do not"
        return NOT_SEEN, text, steps[0][0]["where"]
    text = f"in {len(rows)} steps no two ranks have the same rows (batches cut by hand)"
    return HOLDS, text, steps[0][0]["where"]


def read_in_turn(rows):
    """Return (shared, all, rank, other rank) where two ranks read the same in different steps.

    Looked at is the begin of the steps in which a rank reads hardly a row of its own again: in the
    next epochs the ranks may take turns. Rows that are drawn with replacement come back by chance.
    """
    ranks, steps = range(len(rows[0])), 0
    read, distinct = [0 for _ in ranks], [set() for _ in ranks]
    for parts in rows:
        for rank in ranks:
            read[rank] += len(parts[rank])
            distinct[rank].update(parts[rank])
        if any((n - len(x)) * 10 > n for n, x in zip(read, distinct, strict=True)):
            break
        steps += 1
    begin = rows[: steps // len(ranks)]
    lists = [[row for parts in begin for row in parts[rank]] for rank in ranks]
    sets = [set(x) for x in lists]
    pairs = [(len(sets[a] & sets[b]), len(sets[a]), a, b) for a in ranks for b in ranks if a < b]
    shared_, all_, *_ = worst = max(pairs, default=(0, 0, 0, 0))
    once = all(len(x) == len(y) for x, y in zip(lists, sets, strict=True))
    many = shared_ * 2 > all_ or once and shared_ >= max(8, all_ / 10)
    return worst if steps > 5 and many else None


def order(trace):
    groups = defaultdict(list)
    for rank in trace.ranks[:1]:
        for this in rank.training:
            groups[this["where"], this["size"]].append(this)
    if not groups:
        return order_by_hand(trace)
    compared = 0
    for (place, _), passes in groups.items():
        for one, two in itertools.pairwise(passes):
            length = min(len(one["ids"] or ()), len(two["ids"] or ()))
            if length < 4 or not (one["ended"] or length >= 16):
                continue
            compared += 1
            a, b = one["ids"][:length], two["ids"][:length]
            if a == b and one["known"] and a == sorted(a):
                return NOT_SEEN, "the data are read in their own order, without shuffling", place
            if a == b and not one["known"] and one["counted"] is not None:
                text = (
                    f"the data set gives the same order twice: its epoch is {one['counted']} and "
                )
                return BROKEN, f"{text}{two['counted']}", place
            if a == b and not one["known"]:
                return NOT_SEEN, "an iterable data set gives the same order each time", place
            if a == b:
                where = f"epoch {one['epoch']} of the sampler twice"
                twice = one["epoch"] is not None and one["epoch"] == two["epoch"]
                text = f"two epochs read the same {length} samples in the same order"
                return BROKEN, text + (f": {where}; set_epoch?" if twice else ""), place
    if not compared:
        return NOT_SEEN, "fewer than two epochs whose samples are known", None
    return HOLDS, f"{compared + 1} epochs, each in another order", next(iter(groups))[0]


def order_by_hand(trace):
    for rank in trace.ranks[:1]:
        drawn = defaultdict(list)
        for event in rank.all("order"):
            drawn[event["where"], event["size"]].append(event["crc"])
        for (place, size), sums in drawn.items():
            if len(sums) > 1 and size > 3 and not any(rank.passes):
                if len(set(sums)) == 1:
                    return BROKEN, f"{len(sums)} permutations of {size} drawn, all equal", place
                return HOLDS, f"{len(set(sums))} different permutations of {size}", place
    return NOT_SEEN, "no DataLoader was read in two epochs", None


def sharding(trace):
    if trace.nodes < 2:
        return NOT_SEEN, "one node: local and global rank are equal (--nodes 2 tells)", None
    if not any(rank.training for rank in trace.ranks):
        forward = [[f for f in r.all("forward") if f.get("rows")] for r in trace.ranks]
        lists = [[row for f in fs if f["grad"] for row in f["rows"]] for fs in forward]
        place = forward and forward[0] and forward[0][0]["where"]
    elif epochs(trace):
        lists, place = identities(epochs(trace)[0]), epochs(trace)[0][0]["where"]
    else:
        lists, place = None, None
    if not lists or not all(lists):
        return NOT_SEEN, "which samples were read is unknown", None
    if by_local_rank(trace, lists) and shared(lists) >= trace.world:
        text = f"ranks of the same local rank on {trace.nodes} nodes read the same"
        return BROKEN, f"{text} {len(set(lists[0]))} samples: sharded by local rank", place
    if samples(trace)[0] != HOLDS:
        return NOT_SEEN, "see samples", place
    return HOLDS, f"{trace.world} ranks on {trace.nodes} nodes read different samples", place
