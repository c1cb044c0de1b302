"""Learning-rate schedules: the fraction of the full rate at each step, as a recipe's `schedule` says.

A schedule is a function of the step and the number of steps alone, so it is the same on every rank, and a training
that is resumed needs nothing of it from the checkpoint.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from samestep.errors import UserError
from samestep.recipe import Decline, Recipe, Schedule, steps_of
from samestep.tasks.registry import find_callable

SCHEDULE = "schedule"  # key of a parameter group's own schedule
_WHAT = "a function of the step and the number of steps, such as path/to/file.py:function"
_TIMESCALE = 10_000  # steps, of inverse_sqrt without a warm-up


def make_schedule(spec: Schedule, total_steps: int, optimizer: Optimizer) -> LambdaLR:
    """Make the learning-rate schedule. Step s of a warm-up of W has the factor (s + 1) / W, so no step has zero."""
    return LambdaLR(
        optimizer, [_rate_by_step(group.get(SCHEDULE) or spec, total_steps) for group in optimizer.param_groups]
    )


def rate(spec: Schedule, total_steps: int, step: int) -> float:
    """The fraction of the full learning rate at a step, counted from 0."""
    return _rate_by_step(spec, total_steps)(step)


def _rate_by_step(spec: Schedule, total_steps: int) -> Callable[[int], float]:
    """The function from a step to its fraction. A function of one's own is looked up here, not in each step."""
    if spec.function is None:
        return partial(_fraction, spec, total_steps)
    return partial(_own_fraction, _OwnFunction.of(spec.function, "recipe.schedule.function"), total_steps)


def _fraction(spec: Schedule, total_steps: int, step: int) -> float:
    """The fraction by a schedule's settings.

    `done` below is the share of the decay's steps that were taken, from 0 to 1. Sources of the decays: cosine with
    restarts, Loshchilov & Hutter 2017 (SGDR), equation 5, with cycles of one length; inverse square root, Vaswani et
    al. 2017, section 5.3; a while at the full rate before the decay (warm-up, stable, decay), Hu et al. 2024
    (MiniCPM), section 4.
    """
    warmup = steps_of(spec.warmup, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    begins = warmup + steps_of(spec.hold, total_steps)
    if step < begins:
        return 1.0
    if spec.decay == "inverse_sqrt":
        timescale = warmup or _TIMESCALE
        shape = math.sqrt(timescale / (timescale + step - begins))
    else:
        done = min(1.0, (step - begins) / max(1, total_steps - begins))
        shape = _DECAYS[spec.decay](spec, done)
    return spec.final + (1 - spec.final) * shape


def check_schedules(recipe: Recipe, samples: int) -> None:
    """Check the functions of one's own in a recipe with so many training samples, as `_check_function` says."""
    total_steps = recipe.total_steps(-(-samples // recipe.batch))
    _check_function(recipe.schedule, "recipe.schedule", total_steps)
    for index, group in enumerate(recipe.groups):
        if group.schedule is not None:
            _check_function(group.schedule, f"recipe.groups.{index}.schedule", total_steps)


def _check_function(spec: Schedule, where: str, total_steps: int) -> None:
    """Raise UserError for a function that isn't there, fails, gives no rate, or gives another the second time.

    `where`: the schedule's key in the recipe, for messages.
    """
    if spec.function is None:
        return
    function = _OwnFunction.of(spec.function, f"{where}.function")
    tried = {*range(min(total_steps, _FIRST)), *range(0, total_steps, max(1, total_steps // _FIRST)), total_steps - 1}
    for step in sorted(tried):
        once, again = (_own_fraction(function, total_steps, step) for _ in range(2))
        if once != again:
            raise UserError(
                f"{where}.function is {spec.function}, which gave {once:g} and then {again:g} for step {step}; ranks "
                "would train with different rates; let it depend on the step alone"
            )


_FIRST = 1000  # steps that are tried, and as many spread over the others


@dataclass(frozen=True, kw_only=True)
class _OwnFunction:
    """A user's function, with what messages call it."""

    call: Callable[..., Any]
    name: str
    where: str  # its key in the recipe

    @classmethod
    def of(cls, name: str, where: str) -> Self:
        return cls(call=find_callable(name, where, _WHAT), name=name, where=where)


def _own_fraction(function: _OwnFunction, total_steps: int, step: int) -> float:
    """What a user's function gives for a step. PyTorch asks for one more than there are: it gets the last one's."""
    step = min(step, total_steps - 1)
    try:
        fraction = float(function.call(step, total_steps))
    except UserError:
        raise
    except Exception as error:  # whatever a user's function raises
        raise UserError(
            f"{function.where} is {function.name}, which failed for step {step} of {total_steps}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (math.isfinite(fraction) and fraction >= 0):
        raise UserError(
            f"{function.where} is {function.name}, which gave {fraction:g} for step {step} of {total_steps}; it must "
            "give the fraction of the full rate, 0 or above"
        )
    return fraction


def _restarting(spec: Schedule, done: float) -> float:
    """A cosine that begins anew at the full rate `cycles` - 1 times."""
    return 0.0 if done >= 1 else 0.5 * (1 + math.cos(math.pi * ((spec.cycles * done) % 1.0)))


_DECAYS: Mapping[Decline, Callable[[Schedule, float], float]] = {
    "none": lambda spec, done: 1.0,
    "linear": lambda spec, done: 1.0 - done,
    "cosine": lambda spec, done: 0.5 * (1 + math.cos(math.pi * done)),
    "cosine_with_restarts": _restarting,
    "polynomial": lambda spec, done: (1.0 - done) ** spec.power,
}
