"""Samples: whether the split run trains in each step on those of the run alone, and what it looks like where not.

A sample is its number in a data set, if all runs have the same one; else a hash of its row. Samples are compared as
multisets: of a step, over all its forwards and ranks. So neither the order of rows nor how they are cut into batches
plays a part. Ranks that share samples (tensor or pipeline parallel) count once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.errors import UserError
from samestep.recording.forward import GIVEN, NUMBERED, Keys, first_module_apart, rows_of_forward
from samestep.recording.record import RankRecord, Row, RunRecord
from samestep.script_proof.kinds import Finding

Rows = Counter[Row]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Comparison of the samples of two runs."""

    same: int  # number of first steps with the same samples
    finding: Finding | None = None  # what is wrong in the next step
    mistake: str | None = None  # why steps can't be compared, and what to pass
    seen: bool = True  # whether samples were seen at all
    drawn: bool = False  # whether hardly any comes twice, and none from a DataLoader: each rank may draw its own


def sampling(alone: RunRecord, split: RunRecord, again: RunRecord, *, prescribed: bool = False) -> Sampling:
    """Compare the samples of each step. `prescribed`: the run alone was given the split run's batches."""
    steps = min(alone.steps, split.steps)
    keys = keys_of(alone, split)
    if keys is None:
        return Sampling(same=steps, seen=False)
    alone_rows = [_rows(alone, number, keys.alone) for number in range(alone.steps)]
    theirs = [_rows(split, number, keys.split) for number in range(split.steps)]
    if drawn := _drawn_anew(alone_rows, [_rows(again, number, keys.alone) for number in range(again.steps)]):
        return Sampling(same=0, mistake=drawn)
    if has_other_data(alone.ranks[0], again.ranks[0]):
        return Sampling(same=0, mistake=_UNSEEDED_DATA)
    if (other := _other_data(alone, split)) is not None:
        return Sampling(same=0, finding=other)
    for number in range(steps):
        if alone_rows[number] != theirs[number]:
            finding, mistake = _judged(alone, split, number, alone_rows, theirs, keys)
            mistake = _GIVEN if prescribed and mistake is not None else mistake
            drawn = mistake is not None and _all_drawn(alone, split, theirs)
            return Sampling(same=number, finding=finding, mistake=mistake, drawn=drawn)
    if split.steps < alone.steps and alone.ranks[0].end.get("how") != "failed":
        missing = sum((alone_rows[split.steps]).values())
        if missing and not _continues(split):
            return Sampling(same=steps, finding=_ends_early(split, alone_rows, theirs, missing))
    return Sampling(same=steps)


def _all_drawn(alone: RunRecord, split: RunRecord, theirs: Sequence[Rows]) -> bool:
    """Whether no DataLoader has given samples, and the split run has hardly any of them twice."""
    loaded = any(rank.end.get("batches") or rank.iterations for run in (alone, split) for rank in run.ranks)
    total: Rows = sum(theirs, Counter())
    same_size = sum(theirs[0].values()) == rows_in_step(alone, 0)
    repeated = sum(count - 1 for count in total.values())
    return not loaded and same_size and repeated <= _BY_CHANCE * sum(total.values())


_BY_CHANCE = 0.05


def _ends_early(split: RunRecord, alone_rows: Sequence[Rows], split_rows: Sequence[Rows], missing: int) -> Finding:
    """Judge a run that ends before the other: its samples ran out, or it was ended."""
    left, begun = alone_rows[split.steps], alone_rows[0]
    new = not left.keys() <= set().union(*split_rows)
    ran_out = split.steps in split.ranks[0].exhausted or sum(left.values()) < sum(begun.values())
    if new and ran_out:
        return _samples("lost-samples", split.steps, missing, left)
    facts = {"split": split.steps}
    relative = 1 - split.steps / len(alone_rows)
    return Finding(kind="ends-early", step=split.steps + 1, what="steps", relative=relative, facts=facts)


def _continues(split: RunRecord) -> bool:
    """Whether the run was stopped before its end."""
    return any(rank.end.get("how") == "stopped" for rank in split.ranks)


def keys_of(alone: RunRecord, split: RunRecord) -> Keys | None:
    """Return the inputs that identify samples; None if no model's forward was seen, or none with rows."""
    if not alone.steps or not split.steps:
        return None
    for name in (NUMBERED, GIVEN):
        if _all_have(alone, name) and _all_have(split, name) and _same_data(alone, split):
            return Keys(alone=[name], split=[name])
    return hashed_keys_of(alone, split)


def hashed_keys_of(alone: RunRecord, split: RunRecord) -> Keys | None:
    """Return the inputs by whose hashes samples are known."""
    alone_inputs, split_inputs = _first_inputs(alone), _first_inputs(split)
    if not alone_inputs or not split_inputs:
        return None
    shared = [name for name in alone_inputs if name in split_inputs]
    if shared and any(set(alone_inputs[name]) & set(split_inputs[name]) for name in shared):
        return Keys(alone=shared, split=shared)
    # A framework may call the whole model where the other run calls a part, with the batch in another argument.
    best = max(
        ((a, s) for a in alone_inputs for s in split_inputs),
        key=lambda pair: len(set(alone_inputs[pair[0]]) & set(split_inputs[pair[1]])),
    )
    if set(alone_inputs[best[0]]) & set(split_inputs[best[1]]):
        return Keys(alone=[best[0]], split=[best[1]])
    return Keys(alone=shared or list(alone_inputs), split=shared or list(split_inputs))


def _all_have(run: RunRecord, name: str) -> bool:
    """Whether the samples of every step have numbers: in every forward, or among what loaders gave before them."""
    for rank in run.ranks:
        for step in rank.steps:
            has_rows = [name in forward["rows"] for forward in step.forwards]
            if not (all(has_rows) if name == NUMBERED else any(has_rows)) or not has_rows:
                return False
    return True


def _same_data(alone: RunRecord, split: RunRecord) -> bool:
    """Whether a number means the same sample in both runs: data sets have one length, and most samples are equal."""
    sizes: dict[int, set[int | None]] = {}
    for rank in (*alone.ranks, *split.ranks):
        for iteration in rank.iterations:
            sizes.setdefault(iteration.get("data", 0), set()).add(iteration["size"])
    if any(len(of_key) > 1 for of_key in sizes.values()):
        return False
    return not any(has_other_data(alone.ranks[0], rank) for rank in split.ranks)


def has_other_data(one: RankRecord, other: RankRecord) -> bool:
    """Whether most samples that two ranks have made are unlike, though they have the same numbers."""
    own_hashes, other_hashes = _hashes(one), _hashes(other)
    shared = own_hashes.keys() & other_hashes.keys()
    return 2 * sum(own_hashes[key] != other_hashes[key] for key in shared) > len(shared)


def _hashes(rank: RankRecord) -> dict[tuple[int, int, int], str]:
    return {(sample["data"], sample["index"], sample["passed"]): sample["hash"] for sample in rank.samples}


def _other_data(alone: RunRecord, split: RunRecord) -> Finding | None:
    """Find ranks whose data sets, of one length, have other samples than the run alone, and rank 0 has not."""
    ranks = [number for number, rank in enumerate(split.ranks) if has_other_data(alone.ranks[0], rank)]
    runs = (*alone.ranks, *split.ranks)
    sizes = {iteration["size"] for rank in runs for iteration in rank.iterations if not iteration.get("data")}
    if not ranks or 0 in ranks or len(sizes) > 1:
        return None
    told = ", ".join(map(str, ranks))
    return Finding(kind="data-differs", step=1, what="samples", relative=1.0, facts={"ranks": told})


def _first_inputs(run: RunRecord) -> dict[str, list[str]]:
    """The hashes of the first step's rows, by the name of the input."""
    inputs: dict[str, list[str]] = {}
    for step in run.step(0):
        for forward in step.forwards:
            for name, hashes in forward["rows"].items():
                if name in (NUMBERED, GIVEN):
                    continue
                inputs.setdefault(name, []).extend(hashes)
    return inputs


def rows_in_step(run: RunRecord, number: int) -> int:
    """How many rows all ranks put into their models in one step."""
    return sum(forward["batch"] or 0 for step in run.step(number) for forward in step.forwards) // sharers_of(run)


def sharers_of(run: RunRecord) -> int:
    """Count the ranks that train on one sample together, as in tensor parallelism.

    Without DTensors they are detected by communication in a model's forward, or by parameters that ranks have cut by
    hand, and by the same samples as rank 0's: of each the whole row, or a part, as of a sequence.
    """
    if not run.steps:
        return 1
    forwards = [step.forwards for step in run.step(0)]
    if forwards[0] and (forwards[0][0].get("sends") or run.cuts):
        first = forwards[0][0]["rows"]
        name = NUMBERED if NUMBERED in first else None
        return sum(
            len(forwards_of_rank) > 0 and _has_rows(forwards_of_rank[0]["rows"], first, name)
            for forwards_of_rank in forwards
        )
    return max((forward.get("sharers", 1) for forward in forwards[0]), default=1)


def _has_rows(rows: Mapping[str, Any], first: Mapping[str, Any], name: str | None) -> bool:
    return rows == first if name is None else rows.get(name) == first[name]


def _each_once(rows: Rows, sharers: int) -> Rows:
    """Count rows that several ranks share only once."""
    return Counter({row: -(-count // sharers) for row, count in rows.items()}) if sharers > 1 else rows


def _of_rank(run: RunRecord, rank: int, number: int, keys: Sequence[str]) -> Rows:
    """The rows of one rank in one step, with how often each came."""
    return Counter(
        row for forward in run.ranks[rank].steps[number].forwards for row in rows_of_forward(forward, keys)
    )


def _rows(run: RunRecord, number: int, keys: Sequence[str]) -> Rows:
    """Return the rows of all ranks in one step; ranks that share samples count once."""
    if _share_out(run, number, keys):
        return _of_rank(run, 0, number, keys)
    total: Rows = Counter()
    for rank in range(len(run.ranks)):
        total += _of_rank(run, rank, number, keys)
    return _each_once(total, sharers_of(run))


def _share_out(run: RunRecord, number: int, keys: Sequence[str]) -> bool:
    """Whether all ranks are given one batch, and put as many rows as it has into their models together.

    Then each takes its rows out of it, which can't be known by their hashes where the script has changed them.
    """
    if list(keys) != [GIVEN] or len(run.ranks) == 1:
        return False
    first, *others = (_of_rank(run, rank, number, keys) for rank in range(len(run.ranks)))
    count = sum(first.values())
    return count > 0 and all(rows == first for rows in others) and rows_in_step(run, number) == count


def _drawn_anew(first: Sequence[Rows], repeated: Sequence[Rows]) -> str | None:
    """What to tell where two runs alone have no sample in common: unseeded draws."""
    pairs = list(zip(first, repeated, strict=False))
    if any(a != b for a, b in pairs) and pairs and not pairs[0][0] & pairs[0][1]:
        return (
            "two runs alone train on different samples in step 1: the script draws their order, or what it makes of "
            "them, from an unseeded generator; seed it, or pass --seed 0"
        )
    return None


def _samples(kind: str, number: int, count: int, of: Rows, **facts: Any) -> Finding:
    """Build a finding about `count` samples of those in `of`."""
    return Finding(
        kind=kind,
        step=number + 1,
        what="samples",
        relative=count / max(1, sum(of.values())),
        facts={"count": count, **facts},
    )


_UNSEEDED_DATA = (
    "two runs alone have other samples in the same places of their data set: it is made, split or augmented by an "
    "unseeded generator; seed it, or pass --seed 0"
)
_GIVEN = (
    "one process that is given the same places of the data set as all ranks together puts other rows into its model: "
    "what the script makes of a sample depends on the others in its batch, or on the process"
)


def _judged(
    alone: RunRecord,
    split: RunRecord,
    number: int,
    alone_rows: Sequence[Rows],
    split_rows: Sequence[Rows],
    keys: Keys,
) -> tuple[Finding | None, str | None]:
    """Classify the first step with different samples; or return why that isn't possible."""
    a, s = alone_rows[number], split_rows[number]
    missing, extra = sum((a - s).values()), sum((s - a).values())
    for judge in (
        _skipped(alone, split, number, a, s, keys),
        _carried(alone, split, number, alone_rows, split_rows),
        _same_on_ranks(split, number, keys, split_rows),
        _resumed(split, number, alone_rows, split_rows),
        _epoch_again(number, alone_rows, split_rows),
        _padded_or_lost(number, alone_rows, split_rows),
        _shorter_epoch(number, alone_rows, split_rows),
        _shuffled_apart(number, alone_rows, split_rows, keys),
        _never_seen(alone, split, number, alone_rows, split_rows),
    ):
        if judge is not None:
            return judge, None
    if sum(a.values()) != sum(s.values()):
        return None, (
            f"batch sizes differ: {sum(a.values())} alone, {sum(s.values())} split, in step {number + 1}; pass "
            f"--alone with the arguments by which one process takes batches of {sum(s.values())}"
        )
    return None, (
        f"step {number + 1} trains on other samples: {missing} of {sum(a.values())} are not those of the run alone, "
        f"and {extra} others are; {_hint(alone_rows, split_rows)}"
    )


def _hint(alone_rows: Sequence[Rows], split_rows: Sequence[Rows]) -> str:
    """What to do about samples whose order can't be matched."""
    alone_seen, split_seen = set().union(*alone_rows), set().union(*split_rows)
    if not alone_seen & split_seen:
        return (
            "no sample of either run is in the other: rows are changed or drawn at random in each process, or read "
            "from other files; make a row a function of its sample, such as by augmentation seeded with its index"
        )
    order = (
        "both runs train on the same samples in another order" if alone_seen == split_seen else "the order is another"
    )
    return (
        f"{order}; use one order for any number of processes (DistributedSampler also with one, and one seed for all "
        "ranks), or pass --alone with arguments that give the same order"
    )


def _skipped(alone: RunRecord, split: RunRecord, number: int, a: Rows, s: Rows, keys: Keys) -> Finding | None:
    """Find a batch that one run trains on, and of which the other's forward has no step."""
    for who, run, names, missing in (("alone", alone, keys.alone, s - a), ("split", split, keys.split, a - s)):
        left: Rows = Counter()
        for step in run.step(number):
            for forward in step.skipped:
                left.update(rows_of_forward(forward, names))
        if missing and not missing - left:
            kind = "step-not-skipped" if who == "alone" else "step-skipped"
            return _samples(kind, number, sum(missing.values()), a)
    return None


def _carried(
    alone: RunRecord, split: RunRecord, number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]
) -> Finding | None:
    """Find a step with micro-batches left over from the epoch before, whose gradients were never stepped."""
    counts = [len(step.losses) for step in split.ranks[0].steps]
    usual = max(set(counts), key=counts.count)
    more = counts[number] - usual
    if more <= 0 or number == 0 or len(alone.ranks[0].steps[number].losses) > len(alone.ranks[0].steps[0].losses):
        return None
    count = sum((split_rows[number] - alone_rows[number]).values())
    return _samples("leftover-carried", number, count, split_rows[number], batches=more)


def _same_on_ranks(split: RunRecord, number: int, keys: Keys, theirs: Sequence[Rows]) -> Finding | None:
    """The finding that all ranks train on the same samples: no sampler shares them out."""
    if _share_out(split, number, keys.split):
        return None
    ranks = [_of_rank(split, rank, number, keys.split) for rank in range(len(split.ranks))]
    if len(ranks) <= sharers_of(split) or not ranks[0] or any(rank != ranks[0] for rank in ranks):
        return None
    total = theirs[number]
    return Finding(
        kind="same-samples",
        step=number + 1,
        what="samples",
        relative=1.0 - len(total) / sum(total.values()),
        facts={"samples": len(total), "rows": sum(total.values())},
    )


def _resumed(split: RunRecord, number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]) -> Finding | None:
    """Steps that train, from a resumption on, on the samples of earlier or later ones."""
    loaded = [at for rank in split.ranks for at in rank.loaded if at <= number]
    if not loaded:
        return None
    later = range(number, min(len(split_rows), number + 3))
    for by in sorted(range(-len(alone_rows), len(alone_rows)), key=abs):
        if by and any(0 <= at - by < len(alone_rows) for at in later):
            pairs = [(split_rows[at], alone_rows[at - by]) for at in later if 0 <= at - by < len(alone_rows)]
            if all(a == b for a, b in pairs):
                kind = "resume-repeats" if by > 0 else "resume-skips"
                facts = {"step": number + 1, "other": number + 1 - by}
                return _samples(
                    kind, number, sum((alone_rows[number] - split_rows[number]).values()), alone_rows[number], **facts
                )
    if set(split_rows[number]) & set().union(*alone_rows):
        missing = sum((alone_rows[number] - split_rows[number]).values())
        return _samples("resume-other-order", number, missing, alone_rows[number])
    return None


def _epoch(rows: Sequence[Rows]) -> int | None:
    """Return the steps in an epoch: up to the first one whose samples mostly occurred before; None if none has."""
    seen: set[Row] = set()
    for number, step in enumerate(rows):
        before = sum(1 for row in step if row in seen)
        if number and step and before * 2 > len(step):
            return number
        seen |= step.keys()
    return None


def _epoch_again(number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]) -> Finding | None:
    """The finding that each epoch has the order of the one before: set_epoch isn't called."""
    length = _epoch(split_rows)
    if length is None or number < length or not split_rows[number]:
        return None
    if split_rows[number] != split_rows[number - length] or alone_rows[number] == alone_rows[number - length]:
        return None
    return _samples(
        "same-order-each-epoch", number, sum((alone_rows[number] - split_rows[number]).values()), alone_rows[number]
    )


def _padded_or_lost(number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]) -> Finding | None:
    """Find samples that were added to fill the end of an epoch, or dropped there."""
    a, s = alone_rows[number], split_rows[number]
    missing, extra = sum((a - s).values()), sum((s - a).values())
    seen = set().union(*alone_rows[: number + 1])
    at_end = (
        number == (_epoch(alone_rows) or len(alone_rows)) - 1
        or number + 1 == len(alone_rows)
        or sum(a.values()) < sum(alone_rows[0].values())
    )
    if extra and not missing and number and set(s - a) <= seen:
        return _samples("padded-sampler", number, extra, a)
    if missing and not extra and at_end:
        return _samples("lost-samples", number, missing, a)
    return None


def _shorter_epoch(number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]) -> Finding | None:
    """An epoch of the split run that has each of its samples once, and begins again before it has had all."""
    length, whole = _epoch(split_rows), _epoch(alone_rows)
    if length is None or whole is None or number >= length:
        return None
    epoch, split_epoch = sum(alone_rows[:whole], Counter()), sum(split_rows[:length], Counter())
    if max(split_epoch.values(), default=2) > 1 or not split_epoch.keys() < epoch.keys():
        return None
    return _samples("lost-samples", number, len(epoch) - len(split_epoch), epoch)


def _shuffled_apart(
    number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows], keys: Keys
) -> Finding | None:
    """Samples that come twice in the split run within a stretch in which the run alone has each once.

    Rows without numbers may be draws from very many, of which some come twice by chance: they have to be the others.
    """
    length = _epoch(alone_rows) or min(len(alone_rows), len(split_rows))
    alone: Rows = sum(alone_rows[:length], Counter())
    split: Rows = sum(split_rows[:length], Counter())
    if number >= length or not alone or sum(alone.values()) != sum(split.values()):
        return None
    repeated = sum(count - 1 for count in split.values())
    if repeated <= sum(count - 1 for count in alone.values()):
        return None
    if keys.split[0] not in (NUMBERED, GIVEN) and len(split.keys() & alone.keys()) < _MOSTLY * len(split):
        return None
    return _samples("repeated-samples", number, repeated, alone)


_MOSTLY = 0.75


def _never_seen(
    alone: RunRecord, split: RunRecord, number: int, alone_rows: Sequence[Rows], split_rows: Sequence[Rows]
) -> Finding | None:
    """Find samples of the run alone that never occur in the split run, though both completed their epoch."""
    for run, rows in ((alone, alone_rows), (split, split_rows)):
        if _continues(run) and _epoch(rows) is None:
            return None
    alone_seen, split_seen = set().union(*alone_rows), set().union(*split_rows)
    if not split_seen < alone_seen:
        return None
    return _samples("lost-samples", number, len(alone_seen - split_seen), Counter(alone_seen))


def evaluation_finding(alone: RunRecord, split: RunRecord, keys: Keys | None) -> Finding | None:
    """Evaluation's samples, phase by phase. What Accelerate cuts off before a metric sees it doesn't count."""
    hashed = hashed_keys_of(alone, split)
    if keys is None or hashed is None:
        return None
    alone_rows, split_rows = _evaluated(alone, hashed.alone), _evaluated(split, hashed.split)
    for after in sorted(alone_rows.keys() & split_rows.keys()):
        a, s = alone_rows[after], split_rows[after]
        if not a or a == s or not set(a) & set(s):
            continue
        further = [row for row in s if row not in a]  # of an evaluation of so many batches of each rank
        repeated, lost = sum((s - a).values()) - len(further), sum((a - s).values())
        if further and not repeated and len(further) > lost:
            continue
        if repeated and not lost and (_cut(split, after) >= repeated or _each_for_itself(split, after, a, s)):
            continue
        kind = "evaluation-loses" if lost and not repeated else "evaluation-repeats"
        count = lost if kind == "evaluation-loses" else repeated
        relative = count / sum(a.values())
        return Finding(kind=kind, step=after, what="evaluation", relative=relative, facts={"count": count})
    return None


def _evaluated(run: RunRecord, keys: Sequence[str]) -> dict[int, Rows]:
    """The samples of each evaluation, by the number of steps before it."""
    by_place: dict[int, Rows] = {}
    for rank in run.ranks:
        for forward in rank.evaluations:
            by_place.setdefault(forward["after"], Counter()).update(_evaluation_rows(forward, keys))
    return {after: _each_once(rows, sharers_of(run)) for after, rows in by_place.items()}


def _evaluation_rows(forward: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Row]:
    inputs = [name for name in forward["rows"] if name not in (NUMBERED, GIVEN)]
    rows = rows_of_forward(forward, keys) or rows_of_forward(forward, inputs)
    yield from rows


def _each_for_itself(split: RunRecord, after: int, alone_rows: Rows, split_rows: Rows) -> bool:
    """Whether every rank evaluates all samples, and its number is its own: right, if slow."""
    whole = split_rows == Counter({row: count * len(split.ranks) for row, count in alone_rows.items()})
    return whole and not any(
        value["after"] == after for rank in split.ranks for value in (*rank.joined, *rank.gathered)
    )


def _cut(split: RunRecord, after: int) -> int:
    """Return the number of rows cut off after the gather over ranks, in evaluations after `after` steps."""
    ranks = len(split.ranks)
    return sum(
        value["given"] * ranks - value["kept"]
        for value in split.ranks[0].gathered
        if value["after"] == after and value["given"] is not None and value["kept"] is not None
    )


# Relative to a row's norm. Rounding, also that of bfloat16, makes less of one row in another place.
_PLACED = 0.02


def places_matter(alone: RunRecord, again: RunRecord) -> bool:
    """Whether a module makes something else of a sample in another place of its batch, with the first weights."""
    keys = keys_of(alone, again)
    if keys is None:
        return False
    return first_module_apart(alone.step(0)[:1], again.step(0)[:1], keys, eps=_PLACED / 100) is not None


def check_steps(alone: RunRecord, split: RunRecord) -> None:
    """Raise UserError where a run left no step."""
    for run, title in ((alone, "alone"), (split, "split")):
        if run.steps:
            continue
        ends = [rank.end for rank in run.ranks]
        if any(end.get("processes") for end in ends):
            raise UserError(
                f"the script, {title}, took no step of an optimizer in its own process, and started others; use a "
                "script that is one rank, as torchrun starts it, without torch.multiprocessing.spawn"
            )
        raise UserError(f"the script, {title}, ended without a step of a torch.optim optimizer; use one that trains")
