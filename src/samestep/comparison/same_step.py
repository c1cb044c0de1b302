"""Whether a method takes the step of one process in float64: its first losses held against that one's."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.job import Job
from samestep.proof import FLOAT32_TOLERANCE, TOLERANCE, relative

STEPS = 5

# bfloat16 keeps 8 bits of a number: 2^-7 lies between 1 and the next larger one. A forward rounds to that a few
# hundred times, up and down, and a loss is a mean over a batch, so that most of it cancels: two such gaps, 1.6 %.
BFLOAT16_TOLERANCE = 2 * 2.0**-7

TOLERANCES = {"fp64": TOLERANCE, "fp32": FLOAT32_TOLERANCE, "bf16": BFLOAT16_TOLERANCE}


@dataclass(frozen=True, kw_only=True)
class SameStep:
    """A method's first losses beside those of one process in float64."""

    precision: str
    losses: Sequence[float]
    reference: Sequence[float]

    @property
    def difference(self) -> float:
        """The largest relative difference; infinite where there are not as many losses, or one is no number."""
        if len(self.losses) != len(self.reference):
            return math.inf
        return max((relative(a, b) for a, b in zip(self.losses, self.reference, strict=True)), default=math.inf)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.precision]

    @property
    def same(self) -> bool:
        return self.difference < self.tolerance

    def to_json(self) -> dict[str, Any]:
        difference = self.difference if math.isfinite(self.difference) else None  # JSON has no infinity
        return {**asdict(self), "difference": difference, "tolerance": self.tolerance, "same_step": self.same}


def short_job(job: Job, precision: str) -> Job:
    """The job as its steps are compared: a few of them, without dropout and evaluation, in that precision."""
    evaluation = replace(job.recipe.evaluation, every=None, at_end=False)
    recipe = replace(job.recipe, steps=STEPS, epochs=None, dropout=False, precision=precision, evaluation=evaluation)
    return replace(job, recipe=recipe)


def best(precisions: frozenset[str]) -> str:
    """The precision in which steps are compared most sharply."""
    return "fp64" if "fp64" in precisions else "fp32"
