"""Do the planner's efficiencies overfit the published steps? Fitted to half of the models, tried on the other half.

`python tools/planner.py --cross-validation` writes the errors into docs/planning.md, in minutes.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samestep.planning.hardware import device_of
from samestep.planning.published import PublishedRow, predict

# The efficiencies that are fitted for each kind of device, and the factors by which a fit may change them.
_FREE: Sequence[str] = ("matmul", "bandwidth", "launch_seconds", "collective_seconds", "link")
_FACTORS = (0.85, 0.93, 1.0, 1.07, 1.15)


@dataclass(frozen=True, kw_only=True)
class CrossValidation:
    """Mean errors for a kind of device: efficiencies fitted to the same models, to the other half, and as shipped."""

    kind: str
    rows: int
    fitted_error: float
    other_half_error: float
    shipped_error: float


def cross_validated(rows: Sequence[PublishedRow]) -> list[CrossValidation]:
    """For each kind of device, fit efficiencies to half of the models and evaluate on the other, and the reverse."""
    kinds: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        kinds[device_of(row.gpu).kind].append(row)
    found = []
    for kind, some in sorted(kinds.items()):
        models = sorted({row.model_name for row in some})
        if len(models) < 2:
            continue
        halves = [[row for row in some if models.index(row.model_name) % 2 == half] for half in (0, 1)]
        fitted, others = 0.0, 0.0
        for own, other in (halves, halves[::-1]):
            factors = _fit(own)
            fitted += _mean_error(own, factors) * len(own)
            others += _mean_error(other, factors) * len(other)
        found.append(
            CrossValidation(
                kind=kind,
                rows=len(some),
                fitted_error=fitted / len(some),
                other_half_error=others / len(some),
                shipped_error=_mean_error(some, {}),
            )
        )
    return found


def _fit(rows: Sequence[PublishedRow]) -> Mapping[str, float]:
    """Fit the factors of the free efficiencies to the least mean error: one after the other, in two rounds."""
    factors: dict[str, float] = dict.fromkeys(_FREE, 1.0)
    for _ in range(2):
        for name in _FREE:
            tried = {factor: _mean_error(rows, {**factors, name: factor}) for factor in _FACTORS}
            factors[name] = min(tried, key=lambda factor: tried[factor])
    return factors


def _mean_error(rows: Sequence[PublishedRow], factors: Mapping[str, float]) -> float:
    return statistics.mean(abs(predict(row, factors).error) for row in rows)
