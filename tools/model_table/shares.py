"""What part of all types the measured ones speak for: shares with confidence intervals.

Pairs of one type fail together, so the interval is of types: a bootstrap that draws types anew within each stratum,
weighted by how many types of its stratum one stands for; and Wilson's interval of the types under which all works.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from model_table.result import Result, rate

_RESAMPLES, _LEVEL = 4000, 0.95
_NORMAL = 1.96  # of 95 %


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share, and the interval in which it lies with 95 % confidence. Of 1."""

    value: float
    low: float
    high: float


def of_pairs(results: Sequence[Result], seed: int = 0, *, of_draw: Mapping[str, float] | None = None) -> Share:
    """The share of possible pairs that take the same step, weighted by type.

    `of_draw`: by stratum, how many types were drawn for one that is measured.
    """
    of_draw = of_draw or {}
    strata: dict[str, list[tuple[float, int, int]]] = {}
    for group in by_model(results).values():
        same, possible = rate(group)
        if possible:
            weight = group[0].weight * of_draw.get(group[0].kind, 1.0)
            strata.setdefault(group[0].kind, []).append((weight, same, possible))
    generator = random.Random(seed)
    drawn = sorted(
        _ratio([each for types in strata.values() for each in generator.choices(types, k=len(types))])
        for _ in range(_RESAMPLES)
    )
    tail = int(_RESAMPLES * (1 - _LEVEL) / 2)
    return Share(
        value=_ratio([each for types in strata.values() for each in types]), low=drawn[tail], high=drawn[-1 - tail]
    )


def _ratio(types: Sequence[tuple[float, int, int]]) -> float:
    return sum(weight * same for weight, same, _ in types) / sum(weight * possible for weight, _, possible in types)


def of_types(results: Sequence[Result]) -> tuple[int, int, Share]:
    """How many types take the same step in each possible pair, of how many, and their share by Wilson's interval."""
    rates = [rate(group) for group in by_model(results).values()]
    count, whole = sum(possible > 0 for _, possible in rates), sum(same == possible > 0 for same, possible in rates)
    return whole, count, wilson(whole, count)


def wilson(part: int, whole: int) -> Share:
    """The share of `part` in `whole` with its score interval (Wilson 1927)."""
    share, square = part / whole, _NORMAL**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = _NORMAL / (1 + square / whole) * sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    return Share(value=share, low=max(0.0, middle - half), high=min(1.0, middle + half))


def by_model(results: Sequence[Result]) -> Mapping[str, Sequence[Result]]:
    """The results of each model that could be made."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        if each.verdict != "not made":
            groups.setdefault(each.model, []).append(each)
    return groups
