"""Evaluations that are shared out: whether the number that ranks make of their shares is that of one process."""

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.recording.record import RankRecord, RunRecord
from samestep.script_proof.kinds import Finding

_RELATIVE = 1e-5  # rounding of a sum in float32 is below, if the weights are the same
_RELATIVE_OF_COUNTS = 1e-3  # a sample between two classes may count in one run, and not in the other
_TIMES_NOISE = 20


def joined_finding(alone: RunRecord, again: RunRecord, split: RunRecord) -> Finding | None:
    """Find numbers that ranks join after an evaluation, and of which neither sum nor mean is what one process has.

    `again`: another run alone, by which rounding moves these numbers.
    """
    for after in sorted({value["after"] for value in alone.ranks[0].joined}):
        alone_numbers = _numbers(alone.ranks[0], after)
        repeated = _numbers(again.ranks[0], after)
        ranks = [_numbers(rank, after) for rank in split.ranks]
        for number, value in enumerate(alone_numbers):
            shares = [rank[number] for rank in ranks if number < len(rank)]
            noise = _apart(value, repeated[number]) if number < len(repeated) else 0.0
            limit = max(_limit([value, *shares]), _TIMES_NOISE * noise)
            usual = (sum(shares), sum(shares) / len(shares), max(shares), min(shares))
            if len(shares) < len(ranks) or any(_apart(value, other) <= limit for other in usual):
                continue
            mean = sum(shares) / len(shares)
            facts = {"alone": value, "split": mean, "shares": ", ".join(f"{share:.6g}" for share in shares)}
            relative = abs(mean - value) / max(abs(value), 1e-300)
            return Finding(kind="evaluation-joined", step=after, what="evaluation", relative=relative, facts=facts)
    return None


def _numbers(rank: RankRecord, after: int) -> list[float]:
    return [value for event in rank.joined if event["after"] == after for value in event["values"]]


def _limit(values: Sequence[float]) -> float:
    return _RELATIVE_OF_COUNTS if all(value.is_integer() for value in values) else _RELATIVE


def _apart(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def own_share_finding(split: RunRecord) -> Finding | None:
    """Find an evaluation by the trained model that is shared out, after which no rank sends anything."""
    trained = {
        row for rank in split.ranks for step in rank.steps for forward in step.forwards for row in _rows(forward)
    }
    models = {forward["model"] for step in split.step(0) for forward in step.forwards}
    for after in sorted({evaluation["after"] for rank in split.ranks for evaluation in rank.evaluations}):
        if any(value["after"] == after for rank in split.ranks for value in (*rank.joined, *rank.gathered)):
            continue
        shares = [_share(rank, after, models) for rank in split.ranks]
        together = set().union(*shares)
        if (
            len(shares) > 1
            and all(shares)
            and not together & trained
            and not any(map(set.__and__, shares, shares[1:]))
        ):
            facts = {"count": len(together)}
            return Finding(kind="evaluation-own-share", step=after, what="evaluation", relative=1.0, facts=facts)
    return None


def _share(rank: RankRecord, after: int, models: set[str]) -> set[tuple[str, ...]]:
    return {
        row
        for forward in rank.evaluations
        if forward["after"] == after and forward.get("model") in models
        for row in _rows(forward)
    }


def _rows(forward: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a forward, by the hashes of its inputs."""
    columns = [hashes for name, hashes in forward["rows"].items() if not name.startswith("#")]
    return list(zip(*columns, strict=True)) if columns else []
