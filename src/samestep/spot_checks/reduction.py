"""How the gradients of a step were reduced: held against the mean of what each rank's own loss gives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from samestep.spot_checks.fingerprints import Fingerprint, mean_of
from samestep.spot_checks.records import Ranks

_ROUNDING = 1e-2  # of a gradient, relative: a mean over ranks in bfloat16 is within it


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What was made of ranks' own gradients in one step."""

    world: int
    scale: float  # of the GradScaler
    parameters: int  # whose gradients were compared
    ratio: float  # of most reduced gradients to what they should be
    own: Mapping[str, float]  # parameters of which each rank has its own gradient, and how far it is from the mean
    others: Mapping[str, float]  # parameters whose gradient is neither

    def is_near(self, ratio: float) -> bool:
        return abs(self.ratio / ratio - 1) < _ROUNDING

    @property
    def is_explained(self) -> bool:
        """Whether the ratio follows from the number of ranks or the scaler, or not all gradients have it."""
        known = (1.0, float(self.world), 1 / self.world, self.scale)
        return bool(self.own or self.others) or any(map(self.is_near, known))


def judge_reduction(ranks: Ranks) -> Reduction | None:
    """Compare a step's reduced gradients with ranks' own; None where there are none of both."""
    gradients = [_Gradient.of(ranks, name) for name in ranks[0].reduced if _is_known(ranks, name)]
    if not gradients:
        return None
    world, first = len(ranks), ranks[0]
    usual = (world if first.reduction == "sum" else 1) * first.clipped / first.scale
    candidates = [usual, usual * world, usual / world, usual * first.scale]
    candidates += [median(ratios)] if (ratios := [one.ratio for one in gradients if one.ratio is not None]) else []
    # The first of those that most gradients have.
    factor = max(candidates, key=lambda each: sum(one.rest(each) <= _ROUNDING for one in gradients))
    apart = {one.name: rest for one in gradients if (rest := one.rest(factor)) > _ROUNDING}
    scaled = (factor, *(step.clipped / step.scale for step in ranks))
    own = {one.name for one in gradients if one.name in apart and any(map(one.is_own, scaled))}
    return Reduction(
        world=world,
        scale=first.scale,
        parameters=len(gradients),
        ratio=factor / usual,
        own={name: rest for name, rest in apart.items() if name in own},
        others={name: rest for name, rest in apart.items() if name not in own},
    )


def _is_known(ranks: Ranks, name: str) -> bool:
    """Whether all ranks have this gradient, finite, and some rank's loss gives one that isn't 0."""
    reduced = [step.reduced.get(name) for step in ranks]
    own = [step.own[name] for step in ranks if name in step.own]
    return all(one is not None and one.finite for one in (*reduced, *own)) and any(one.norm > 0 for one in own)


@dataclass(frozen=True, kw_only=True)
class _Gradient:
    """One parameter's gradient on each rank: from its own loss, and reduced."""

    name: str
    own: list[Fingerprint]  # 0 where a rank's samples don't use the parameter
    reduced: list[Fingerprint]
    mean: Fingerprint  # of ranks' own

    @classmethod
    def of(cls, ranks: Ranks, name: str) -> "_Gradient":
        own = [step.own.get(name, Fingerprint.zero()) for step in ranks]
        return cls(name=name, own=own, reduced=[step.reduced[name] for step in ranks], mean=mean_of(own))

    @property
    def ratio(self) -> float | None:
        """The ratio of rank 0's reduced gradient to the mean, by least squares; None where the mean is 0."""
        squares = math.fsum(value * value for value in self.mean.numbers)
        products = (a * b for a, b in zip(self.mean.numbers, self.reduced[0].numbers, strict=True))
        return math.fsum(products) / squares if squares else None

    def rest(self, factor: float) -> float:
        """How far reduced gradients are from so many times the mean, on the rank where it is most."""
        expected = self.mean.times(factor)
        return max(one.distance(expected) for one in self.reduced)

    def is_own(self, factor: float) -> bool:
        """Whether each rank's reduced gradient is so many times its own."""
        pairs = zip(self.reduced, self.own, strict=True)
        return all(reduced.distance(own.times(factor)) <= _ROUNDING for reduced, own in pairs)
