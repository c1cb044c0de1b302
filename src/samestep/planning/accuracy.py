"""Errors of predicted step times against published ones: by group, and of the order of steps within each model."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.layout import Layout
from samestep.planning.hardware import device_of
from samestep.planning.published import PredictedRow, PublishedRow, kendall_tau

_FEWEST = 4  # rows that a model needs for its order to count


@dataclass(frozen=True, kw_only=True)
class GroupErrors:
    """The errors of a group of rows, relative to the published seconds."""

    name: str
    rows: int
    mean_error: float
    largest_error: float  # signed: positive if the prediction is too slow
    bias: float
    mean_tau: float | None  # Kendall's tau-b, over models with at least `_FEWEST` rows
    least_tau: float | None
    least_ceiling: float | None = None  # the lowest of the models' `ceilings_of`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def errors_of(name: str, rows: Sequence[PredictedRow]) -> GroupErrors:
    """The errors of `rows`, (predicted - measured) / measured, and Kendall's tau within each model."""
    errors = [row.error for row in rows]
    taus = [tau for tau in taus_of(rows).values() if tau is not None]
    return GroupErrors(
        name=name,
        rows=len(rows),
        mean_error=statistics.mean(map(abs, errors)),
        largest_error=max(errors, key=abs),
        bias=statistics.mean(errors),
        mean_tau=statistics.mean(taus) if taus else None,
        least_tau=min(taus) if taus else None,
        least_ceiling=min(ceilings_of(rows).values(), default=None),
    )


def taus_of(rows: Sequence[PredictedRow]) -> Mapping[str, float | None]:
    """Kendall's tau of predicted and published step times within each model that has enough rows."""
    models = grouped(rows, lambda row: row.row.model_name)
    return {
        name: kendall_tau([row.seconds for row in some], [row.row.seconds for row in some])
        for name, some in models.items()
        if len(some) >= _FEWEST
    }


def ceilings_of(rows: Sequence[PredictedRow]) -> Mapping[str, float]:
    """The largest tau that a prediction can have that gives less work less time, of each model with enough rows.

    That is 1 - 2 c / pairs, where c counts the pairs in which the row with no more work was published slower.
    """
    models = grouped(rows, lambda row: row.row.model_name)
    return {
        name: 1 - 4 * len(contradictions(some)) / (len(some) * (len(some) - 1))
        for name, some in models.items()
        if len(some) >= _FEWEST
    }


def contradictions(rows: Sequence[PredictedRow]) -> list[tuple[PredictedRow, PredictedRow]]:
    """Pairs of rows of one model in which the first has no more work than the second but was published slower."""
    return [
        (one, other)
        for one in rows
        for other in rows
        if one.row.seconds > other.row.seconds and _no_more_work(one, other) and not _no_more_work(other, one)
    ]


def _no_more_work(one: PredictedRow, other: PredictedRow) -> bool:
    """Whether nothing in the step `one` should take longer than in `other`.

    The steps have the same number of tokens per device. In `one`, devices are no slower, samples no longer,
    micro-batches no smaller and data ranks no more; all else is the same.
    """
    row, other_row = one.row, other.row
    devices = device_of(row.gpu), device_of(other_row.gpu)
    return (
        _tokens_a_device(row) == _tokens_a_device(other_row)
        and replace(row.model, seq=1, positions=0) == replace(other_row.model, seq=1, positions=0)
        and (row.precision, row.software) == (other_row.precision, other_row.software)
        and _without_data_ranks(row.layout) == _without_data_ranks(other_row.layout)
        and row.layout.data_ranks <= other_row.layout.data_ranks
        and row.model.seq <= other_row.model.seq
        and one.micro_batch * row.model.seq >= other.micro_batch * other_row.model.seq
        and devices[0].bandwidth >= devices[1].bandwidth
        and devices[0].flops[row.precision] >= devices[1].flops[row.precision]
    )


def _tokens_a_device(row: PublishedRow) -> float:
    return row.global_batch * row.model.seq / row.layout.size


def _without_data_ranks(layout: Layout) -> Layout:
    """The layout with the number of data ranks removed; it keeps whether parameters are sharded."""
    return replace(layout, replicate=1, shard=2 if layout.shard > 1 else 1)


def grouped(rows: Iterable[PredictedRow], key: Callable[[PredictedRow], str]) -> Mapping[str, list[PredictedRow]]:
    """Group rows by a key."""
    groups: dict[str, list[PredictedRow]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def group_name(row: PredictedRow) -> str:
    """The group of a row in the table of errors: the table that it is from, and its precision."""
    return f"{row.row.group} {row.row.precision}"


def table(rows: Sequence[PredictedRow]) -> list[GroupErrors]:
    """The errors of each group and, if there are several, of all rows."""
    rows_of_groups = [errors_of(name, some) for name, some in sorted(grouped(rows, group_name).items())]
    return [*rows_of_groups, errors_of("all", rows)] if len(rows_of_groups) > 1 else rows_of_groups
