"""The first steps of a method versus those of one process in float64: losses, gradient norms and parameters.

Losses of a few steps say little of the update: a wrong decay hardly moves them. In float64 every parameter is held to
a proof's tolerance; in float32 and bfloat16 to what rounding was measured to make of this job's steps. AdamW makes
the same update of gradients that are twice as large, so their norms are held as well.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.job import Job
from samestep.parallel.complex_parameters import as_real
from samestep.tasks.base import Task
from samestep.training.rounding import largest, pairs, relative, relative_tensors, share_of_rounding
from samestep.verification.proof import FLOAT32_TOLERANCE, Reference, reference, tolerance_of
from samestep.verification.tensors import TOLERANCE

STEPS = 5

# bfloat16 keeps 8 bits of a number: 2^-7 lies between 1 and the next larger one. A forward rounds to that a few
# hundred times, up and down, and a loss is a mean over a batch, so that most of it cancels: two such gaps, 1.6 %.
BFLOAT16_TOLERANCE = 2 * 2.0**-7

TOLERANCES = {"fp64": TOLERANCE, "fp32": FLOAT32_TOLERANCE, "bf16": BFLOAT16_TOLERANCE}


@dataclass(frozen=True, kw_only=True)
class ParametersHeld:
    """The largest parameter error relative to its tolerance; below 1 it may be rounding."""

    worst: float
    parameter: str

    @property
    def same(self) -> bool:
        return self.worst < 1


@dataclass(frozen=True, kw_only=True)
class NormsHeld:
    """The largest relative difference of the gradients' norms, before clipping, from those of one process."""

    difference: float
    tolerance: float

    @property
    def same(self) -> bool:
        return self.difference < self.tolerance


@dataclass(frozen=True, kw_only=True)
class SameStep:
    """A method's first losses, gradient norms and parameters compared with those of one process in float64."""

    precision: str
    losses: Sequence[float]
    reference: Sequence[float]
    parameters: ParametersHeld | None = None  # after the last of these steps; None: the method saves no weights
    norms: NormsHeld | None = None  # of the gradients; None: the method records none

    @property
    def difference(self) -> float:
        """The largest relative difference of losses; infinite if their numbers differ or one is NaN."""
        if len(self.losses) != len(self.reference):
            return math.inf
        return max((relative(a, b) for a, b in zip(self.losses, self.reference, strict=True)), default=math.inf)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.precision]

    @property
    def same(self) -> bool:
        return self.difference < self.tolerance and all(
            part is None or part.same for part in (self.parameters, self.norms)
        )

    def to_json(self) -> dict[str, Any]:
        difference = self.difference if math.isfinite(self.difference) else None  # JSON has no infinity
        values = {**asdict(self), "difference": difference, "tolerance": self.tolerance, "same_step": self.same}
        return without_nonfinite(values)


class References:
    """Reference steps of one process in float64, with the rounding of each precision; computed on first use."""

    def __init__(self, job: Job, task: Task, steps: int, folder: Path) -> None:
        """Keep the job whose steps are compared; its own precision is ignored."""
        self._job = job
        self._task = task
        self._steps = steps
        self._folder = folder
        self._known: dict[str, Reference] = {}

    def hold(self, weights: Path, precision: str) -> ParametersHeld | None:
        """Compare a run's saved weights with the reference; None if it left no readable ones."""
        try:
            weights_here = load_file(weights)
        except (OSError, SafetensorError):
            return None
        expected = self._of(precision)
        theirs = load_file(expected.parameters)
        shared = {name: as_real(value) for name, value in weights_here.items() if name in theirs}
        if not shared:
            return None
        apart = _in_float64 if expected.allowed is None else _shares_of_rounding
        differences = apart(shared, theirs, expected)
        name = max(differences, key=lambda name: differences[name])
        return ParametersHeld(worst=differences[name], parameter=name)

    def hold_norms(self, norms: Sequence[float | None], precision: str) -> NormsHeld | None:
        """Compare a run's gradient norms with the reference; None if a step has none."""
        own_norms = [norm for norm in norms if norm is not None]
        if len(own_norms) < len(norms) or not own_norms:
            return None
        expected = self._of(precision)
        return NormsHeld(
            difference=largest(relative(a, b) for a, b in pairs(own_norms, expected.grad_norms)),
            tolerance=TOLERANCE if expected.allowed is None else tolerance_of(expected.allowed),
        )

    def _of(self, precision: str) -> Reference:
        """Return the reference for a precision, computed once."""
        if precision not in self._known:
            place = self._folder / f"reference-{precision}"
            place.mkdir()
            job = replace(self._job, recipe=replace(self._job.recipe, precision=precision))
            # Metrics aren't compared, so a few held-out samples are enough.
            self._known[precision] = reference(job, self._task, self._steps, place, held_out=job.recipe.batch)
        return self._known[precision]


def _in_float64(own: dict[str, Tensor], theirs: dict[str, Tensor], expected: Reference) -> dict[str, float]:
    """Return each parameter's difference in units of the proof's tolerance."""
    moves = load_file(expected.rounding) if expected.rounding is not None else {}
    squares = sum(theirs[name].double().square().sum().item() for name in own)
    floor = math.sqrt(squares / sum(value.numel() for value in own.values()))
    return {
        name: relative_tensors(value.double(), theirs[name], floor, rounding=moves.get(name)) / TOLERANCE
        for name, value in own.items()
    }


def _shares_of_rounding(own: dict[str, Tensor], theirs: dict[str, Tensor], expected: Reference) -> dict[str, float]:
    """Return each parameter's difference as a share of the measured rounding."""
    assert expected.allowed is not None
    moves = load_file(expected.allowed.moves)
    typical = expected.allowed.typical
    return {
        name: share_of_rounding(value, theirs[name], moves.get(name), typical.get(name, 0.0))
        for name, value in own.items()
    }


def short_job(job: Job, precision: str) -> Job:
    """Return the job for the comparison of steps: `STEPS` steps in this precision, without dropout and evaluation."""
    short = unevaluated(job)
    return replace(short, recipe=replace(short.recipe, steps=STEPS, epochs=None, dropout=False, precision=precision))


def unevaluated(job: Job) -> Job:
    """The job without evaluations."""
    evaluation = replace(job.recipe.evaluation, every=None, at_end=False)
    return replace(job, recipe=replace(job.recipe, evaluation=evaluation))


def best(precisions: frozenset[str]) -> str:
    """Return the precision with the smallest tolerance."""
    return "fp64" if "fp64" in precisions else "fp32"
