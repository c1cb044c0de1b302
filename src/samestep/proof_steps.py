"""A few steps of a training as a proof looks at them: losses, gradients, what steps them, and what they leave."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep.engines.base import StepReport, Trainer
from samestep.engines.native.trainer import NativeTrainer
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.state_shards import innermost
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.training.as_built import dense
from samestep.training.fit import Training
from samestep.training.metrics_log import Bar
from samestep.training.nonfinite_values import watched
from samestep.training.optimizer import SCHEDULE
from samestep.training.rounding import Allowed, GradientFiles, GradientNoise, measure, relative, state_name

AVERAGE = " (its average)"
_EPS = 2.0**-52  # an optimizer that divides by less than the rounding of a gradient follows the rounding alone


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What some steps gave, on one side."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    metrics: Mapping[str, Any]  # after the last of them
    gradient: str | None  # the first parameter, in the order of backward, whose gradient was not finite


def buffers_of(trainer: Trainer) -> dict[str, Tensor]:
    """What of a whole model's state is no parameter, on the CPU."""
    parameters = {name for name, _ in trainer.parameters()}
    return {name: value.clone() for name, value in trainer.state().items() if name not in parameters}


def gradients_of(training: Training) -> Iterator[tuple[str, Tensor]]:
    """The gradients of a reference as its last step left them: clipped."""
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            yield name, dense(parameter.grad)


def settings_of(training: Training, lr: float) -> dict[str, tuple[float, float]]:
    """Learning rate and eps of each parameter whose gradient its optimizer divides by its size, such as AdamW."""
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    first = trainer.optimizer.param_groups[0]
    found: dict[str, tuple[float, float]] = {}
    for optimizer in innermost(trainer.optimizer):
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD):
                continue
            # The group's own rate of this step, where it has the recipe's schedule.
            own = SCHEDULE in group or not first["initial_lr"]
            rate = group["initial_lr"] * (1.0 if own else lr / first["initial_lr"])
            found |= {names[parameter]: (float(rate), _floor(group, parameter)) for parameter in group["params"]}
    return found


def _floor(group: Mapping[str, Any], parameter: Tensor) -> float:
    """What is added to the size by which a parameter's gradient is divided, so that the size may be zero.

    Adafactor has two: one for the gradient, of which None is the gap between 1 and the next number, and one for the
    parameter. A matrix it divides by means over rows and columns, which are as small as rounding nowhere.
    """
    eps = group.get("eps", _EPS)
    if not isinstance(eps, tuple):
        return max(float(eps), _EPS)
    if parameter.dim() > 1:
        return next((max(float(each), _EPS) for each in eps if each is not None), _EPS)
    return float(torch.finfo(parameter.dtype).eps if eps[0] is None else eps[0])


def clipping(training: Training, norm: float) -> float:
    """What a step multiplied a gradient of this norm with."""
    clip = training.recipe.clip
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def weights_of(trainer: Trainer, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, and after it what their average is where the recipe keeps one."""
    yield from trainer.parameters()
    if recipe.average is not None:
        with trainer.averaged():
            yield from ((f"{name}{AVERAGE}", value.clone()) for name, value in trainer.parameters())


def take(training: Training, steps: int, title: str, after: Callable[[StepReport], None] | None = None) -> Taken:
    """Losses and gradient norms of the first steps, and the metrics after them.

    There is an evaluation after the first step as well: the steps that follow must not know of it.
    """
    losses: list[float] = []
    grad_norms: list[float] = []
    model = getattr(training.session.trainer, "model", None)
    with (
        Bar(f"verify: {title}", min(steps, training.total_steps), shown=training.session.is_main) as bar,
        watched(model if isinstance(model, nn.Module) else None) as gradients,
    ):
        for _, report in training.steps(stop=steps):
            losses.append(report.loss.item())
            grad_norms.append(report.grad_norm.item())
            bar.advance()
            if after is not None:
                after(report)
            if len(losses) == 1:
                training.evaluate(bar)
        return Taken(
            losses=losses,
            grad_norms=grad_norms,
            metrics=training.evaluate(bar),
            gradient=next(iter(gradients), None),
        )


# Of the optimizers that engines have by name; others keep what they will, and their parameters are compared alone.
STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def states_of(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer's state of each parameter that is whole on this rank, on the CPU, by its name in files."""
    return {state_name(name, key): value.cpu().clone() for name, key, value in trainer.optimizer_state(STATE_KEYS)}


def save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors to a file of safetensors."""
    # A parameter may be a transposed view, and what is computed from it has its strides.
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


class RoundedRuns:
    """The steps of one process in the job's precision, several times, beside those in float64 that it is told of."""

    def __init__(self, job: Job, task: Task, folder: Path) -> None:
        self._job = job
        self._task = task
        self._folder = folder
        self._files = GradientFiles(folder=folder)
        self._before: dict[str, Tensor] = {}
        self._of_steps = 0.0  # the largest relative difference of losses and norms

    def begin(self, exact: Training) -> None:
        """Take notice of the parameters before the first step."""
        self._before = {name: value.cpu().clone() for name, value in exact.session.trainer.parameters()}

    def note(self, exact: Training, report: StepReport) -> None:
        """Take notice of a step in float64."""
        self._files.add(gradients_of(exact), settings_of(exact, report.lr))

    def measured(self, world: World, exact: Mapping[str, Tensor], taken: Taken) -> Allowed:
        """Take the steps, and say how far rounding takes them from `exact`."""
        noise = GradientNoise(self._files)
        runs = [found for way in range(_RUNS) if (found := self._run(world, way, noise, taken)) is not None]
        moves = {name: move for name, move in noise.moves().items() if name in exact}
        place = self._folder / "moves.safetensors"
        save(moves, place)
        return Allowed(typical=measure(exact, self._before, runs, moves), moves=place, steps=self._of_steps)

    def _run(self, world: World, way: int, noise: GradientNoise, taken: Taken) -> dict[str, Tensor] | None:
        """Parameters and state after the steps: the batch in its order or another, and in more micro-batches.

        None for a model that takes no micro-batches.
        """
        given = self._job.run
        micro_batch = -(-self._job.recipe.batch // way) if way > 1 else None
        run = Run(device=given.device, threads=given.threads, workers=given.workers, micro_batch=micro_batch)
        recipe = replace(self._job.recipe, communication=None)
        training = Training(
            replace(self._job, recipe=recipe, run=run), self._task, world, Layout(), shuffled_within=way or None
        )
        try:
            for number, (batch, report) in enumerate(training.steps(stop=len(taken.losses))):
                noise.add(batch.step, gradients_of(training))
                apart = relative(report.loss.item(), taken.losses[number])
                norms_apart = relative(report.grad_norm.item(), taken.grad_norms[number])
                self._of_steps = max(self._of_steps, apart, norms_apart)
        except UserError:
            if micro_batch is None:
                raise
            return None
        trainer = training.session.trainer
        weights = {name: as_real(value).cpu().clone() for name, value in weights_of(trainer, recipe)}
        return {**weights, **states_of(trainer)}


_RUNS = 4
