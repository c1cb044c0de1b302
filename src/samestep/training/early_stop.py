"""Early stopping: ends a training once its evaluations have not improved for a number of times."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from samestep.errors import CheckpointError, UserError
from samestep.recipe import EarlyStop
from samestep.tasks.base import Task
from samestep.training.evaluation import scalars
from samestep.training.result import agreed


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Where and why a training was stopped early."""

    step: int  # optimizer steps taken
    reason: str
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the evaluation after `step`


class EarlyStopper:
    """Counts evaluations since the best one; does nothing without a spec."""

    def __init__(self, spec: EarlyStop | None) -> None:
        self._spec = spec
        self._best: float | None = None
        self._best_step = 0
        self._worse = 0  # evaluations since the best one
        self._step = 0  # step of the last evaluation

    def check(self, task: Task) -> None:
        """Raise UserError if the task has no held-out samples or doesn't have the metric."""
        if self._spec is None:
            return
        samples = task.eval_set()
        if samples is None or len(samples) == 0:
            raise UserError(
                f"recipe.early_stop is given, and task {type(task).__name__} has no held-out samples to evaluate; "
                "use recipe.data.held_out or an eval_set() of the task, or no early_stop"
            )
        _check_name(self._spec.metric, task.metrics())

    def look(self, step: int, metrics: Mapping[str, Any]) -> Stopped | None:
        """Count an evaluation made after `step` steps; return the early stop once patience is exhausted.

        Every rank must call it; rank 0's value decides. Raises UserError where the metric is not one number.
        """
        spec = self._spec
        if spec is None:
            return None
        check_number(spec, metrics)
        value = agreed(float(metrics[spec.metric]))
        self._step = step
        if self._is_better(value, spec):
            self._best, self._best_step, self._worse = value, step, 0
        else:
            self._worse += 1
        return self.stopped(metrics)

    def _is_better(self, value: float, spec: EarlyStop) -> bool:
        """Whether a value improves on the best by more than `min_delta`; NaN never does."""
        if math.isnan(value):
            return False
        sign = -1 if spec.mode == "lowest" else 1
        return self._best is None or sign * (value - self._best) > spec.min_delta

    def stopped(self, metrics: Mapping[str, Any] | None = None) -> Stopped | None:
        """The early stop after the last evaluation, perhaps one of the run whose checkpoint was loaded; else None."""
        spec = self._spec
        if spec is None or self._worse < spec.patience:
            return None
        way = "below" if spec.mode == "lowest" else "above"
        best = "been a number" if self._best is None else f"come {way} {self._best:.6g} (step {self._best_step:,})"
        by = f" by more than {spec.min_delta:g}" if spec.min_delta and self._best is not None else ""
        return Stopped(
            step=self._step,
            reason=f"stopped early after step {self._step:,}: {spec.metric} has not {best}{by} in {self._worse} "
            f"evaluation{'s' * (self._worse != 1)}",
            metrics=metrics or {},
        )

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        if self._spec is None:
            return {}
        return {"best": self._best, "best_step": self._best_step, "worse": self._worse, "step": self._step}

    def restore(self, state: Mapping[str, Any], taken: int) -> None:
        """Restore the counts from a checkpoint of `taken` steps; does nothing if it has none.

        Raises CheckpointError for values that are no counts of so many steps.
        """
        if self._spec is None or not state:
            return
        best: Any = None
        counts: list[Any] = [None]
        with suppress(KeyError, TypeError):
            best, counts = state["best"], [state[name] for name in ("best_step", "worse", "step")]
        of_steps = all(type(count) is int and 0 <= count <= taken for count in counts)
        if type(best) not in (float, int, type(None)) or not of_steps:
            raise CheckpointError(
                f"the checkpoint's counts of evaluations are {str(state)[:80]}; resume without recipe.early_stop"
            )
        self._best = best
        self._best_step, self._worse, self._step = counts


def check_number(spec: EarlyStop, metrics: Mapping[str, Any]) -> None:
    """Raise UserError where the metric is missing from an evaluation, or is not one number."""
    numbers = scalars(metrics)
    if spec.metric in metrics and spec.metric not in numbers:
        use = ", ".join(numbers) or "one that is a number"
        raise UserError(f"recipe.early_stop.metric is {spec.metric}, which is not one number; use {use}")
    _check_name(spec.metric, numbers)


def _check_name(metric: str, metrics: Mapping[str, Any]) -> None:
    """Raise UserError for a metric that is not in the evaluation."""
    if metric not in metrics:
        names = ", ".join(metrics) or "a task with metrics()"
        raise UserError(f"recipe.early_stop.metric is {metric}, which the evaluation does not give; use {names}")
