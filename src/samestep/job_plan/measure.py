"""Measures steps of the best layouts, compares them with the predictions, and corrects the rates by them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from samestep.api import time_steps_job
from samestep.errors import RankFailedError, UserError
from samestep.job import Job
from samestep.job_plan.machine import CAUSES, TargetMachine
from samestep.job_plan.plan import JobPlan
from samestep.job_plan.predict import Prediction, peak_of
from samestep.progress import phases

_STIFFNESS = 0.003  # penalty on a factor's deviation from the common one, against a squared relative error of a step
_LEAST, _MOST = 0.05, 20.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One layout's step as predicted and as measured."""

    prediction: Prediction
    seconds: float | None  # None: it failed
    peak_bytes: int = 0
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if the layout failed."""
        return None if self.seconds is None else self.prediction.seconds / self.seconds - 1

    def to_json(self) -> dict[str, Any]:
        """Seconds and bytes, predicted and measured."""
        return {
            "layout": self.prediction.layout,
            "predicted_seconds": self.prediction.seconds,
            "measured_seconds": self.seconds,
            "relative_error": self.error,
            "predicted_peak_bytes": self.prediction.peak_bytes,
            "measured_peak_bytes": self.peak_bytes,
            "reason": self.reason,
        }


def measure(
    job: Job, predictions: Sequence[Prediction], *, steps: int = 6, say: Callable[[str], None] = lambda text: None
) -> list[Measured]:
    """Run some steps of each layout in new processes."""
    rows = []
    for prediction in predictions:
        say(prediction.layout)
        run = replace(job.run, layout=prediction.layout, micro_batch=prediction.micro_batch, processes=None)
        try:
            with phases.phase(f"measuring {prediction.layout}"):
                ranks = time_steps_job(replace(job, run=run), steps=steps)
        except (UserError, RankFailedError) as error:
            rows.append(Measured(prediction=prediction, seconds=None, reason=str(error)))
            continue
        seconds, peak = max(rank.seconds for rank in ranks), max(peak_of(rank.usage) for rank in ranks)
        rows.append(Measured(prediction=prediction, seconds=seconds, peak_bytes=peak))
    return rows


def corrections(measured: Sequence[Measured]) -> dict[str, float]:
    """Fit a factor for each cause's rate, so that predictions match the measurements.

    All causes start at the median of measured / predicted; ridge regression then adjusts each of them, as far as the
    relative errors of the steps require.
    """
    rows = [(row.prediction.parts, row.seconds) for row in measured if row.seconds]
    if not rows:
        return dict.fromkeys(CAUSES, 1.0)
    scale = median(seconds / sum(parts.values()) for parts, seconds in rows)
    shares = torch.tensor(
        [[parts[cause] / seconds for cause in CAUSES] for parts, seconds in rows], dtype=torch.float64
    )
    prior = torch.full((len(CAUSES),), scale, dtype=torch.float64)
    left = 1 - shares @ prior
    system = shares.T @ shares + _STIFFNESS / scale**2 * torch.eye(len(CAUSES), dtype=torch.float64)
    factors = (prior + torch.linalg.solve(system, shares.T @ left)).clamp(_LEAST * scale, _MOST * scale)
    return dict(zip(CAUSES, factors.tolist(), strict=True))


def corrected(machine: TargetMachine, factors: Mapping[str, float]) -> TargetMachine:
    """The machine with its rates multiplied."""
    assert machine.rates is not None
    return replace(machine, rates=machine.rates.corrected(factors))


def measured_plan(
    job: Job, plan: JobPlan, *, most: int, say: Callable[[str], None] = lambda text: None
) -> tuple[JobPlan, list[Measured]]:
    """Measure the fastest layouts of a plan, and rank all layouts again with corrected rates."""
    rows = measure(job, plan.fitting[:most], say=say)
    return plan.again(job, corrected(plan.machine, corrections(rows))), rows
