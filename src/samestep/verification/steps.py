"""Takes a few steps of a training for a proof: losses, gradients, optimizer settings, and final state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport, Trainer
from samestep.engines.native.trainer import NativeTrainer
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.state_shards import innermost
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.ranks import DeviceChoice
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.training.as_built import AsBuilt, dense
from samestep.training.fit import Training
from samestep.training.nonfinite_values import NonFiniteValue, watched
from samestep.training.rounding import Allowed, GradientFiles, GradientNoise, measure, relative, state_name
from samestep.training.schedule import SCHEDULE

AVERAGE = " (its average)"
_EPS = 2.0**-52  # smallest eps: an optimizer that divides by less than a gradient's rounding follows the rounding


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Results of some steps on one side."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    metrics: Mapping[str, Any]  # after the last of them
    gradient: str | None  # the first parameter, in backward order, with a non-finite gradient


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Results of the reference steps in one process."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    parameters: Path  # safetensors
    rounding: Path | None  # safetensors: how far rounding alone may have moved each number; None if unknown
    most_rounding: float  # the largest of those
    metrics: Mapping[str, Any]
    held_out: int | None  # how many held-out samples were evaluated; None: all
    buffers: Mapping[str, Tensor]  # those of the model's buffers that the steps have changed
    as_built: AsBuilt | None = None
    nonfinite: NonFiniteValue | None = None
    allowed: Allowed | None = None  # measured rounding, for layouts that don't compute in float64
    state_keys: Sequence[str] = ()  # keys of the optimizer's state that is compared then


def in_one_process(job: Job, *, device: DeviceChoice | None = None) -> Job:
    """The job of one process's steps in float64. `device`: another one than the job's."""
    run = Run(device=device or job.run.device, threads=job.run.threads, workers=job.run.workers)
    return replace(job, recipe=replace(job.recipe, precision="fp64", communication=None), run=run)


def buffers_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the state of a whole model that is no parameter, on the CPU."""
    parameters = {name for name, _ in trainer.parameters()}
    return {name: value.clone() for name, value in trainer.state().items() if name not in parameters}


def gradients_of(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Yield the clipped gradients of a reference's last step."""
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            yield name, dense(parameter.grad)


def settings_of(training: Training, lr: float) -> dict[str, tuple[float, float]]:
    """Return learning rate and eps of the parameters whose optimizer normalizes gradients, such as AdamW."""
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    first = trainer.optimizer.param_groups[0]
    settings: dict[str, tuple[float, float]] = {}
    for optimizer in innermost(trainer.optimizer):
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD):
                continue
            # The group's own rate at this step, if it follows the recipe's schedule.
            own = SCHEDULE in group or not first["initial_lr"]
            rate = group["initial_lr"] * (1.0 if own else lr / first["initial_lr"])
            settings |= {names[parameter]: (float(rate), _floor(group, parameter)) for parameter in group["params"]}
    return settings


def _floor(group: Mapping[str, Any], parameter: Tensor) -> float:
    """Return the eps that is added to the size by which a parameter's gradient is divided.

    Adafactor has two: one for the gradient (None: the dtype's epsilon), and one for the parameter. A matrix is
    divided by means over rows and columns, which are nowhere as small as rounding.
    """
    eps = group.get("eps", _EPS)
    if not isinstance(eps, tuple):
        return max(float(eps), _EPS)
    if parameter.dim() > 1:
        return next((max(float(part), _EPS) for part in eps if part is not None), _EPS)
    return float(torch.finfo(parameter.dtype).eps if eps[0] is None else eps[0])


def clipping(training: Training, norm: float) -> float:
    """Return the factor by which a step scales a gradient of this norm."""
    clip = training.recipe.clip
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def weights_of(trainer: Trainer, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter in full, and then its moving average if the recipe keeps one."""
    yield from trainer.parameters()
    if recipe.average is not None:
        with trainer.averaged():
            yield from ((f"{name}{AVERAGE}", value.clone()) for name, value in trainer.parameters())


def take(
    training: Training, steps: int, title: str, after: Callable[[StepBatch, StepReport], None] | None = None
) -> Taken:
    """Take the first steps; return losses, gradient norms, and the metrics after them.

    There is an evaluation after the first step as well: the steps that follow must not know of it.
    """
    losses: list[float] = []
    grad_norms: list[float] = []
    model = getattr(training.session.trainer, "model", None)
    with (
        Bar(
            f"{phases.work('verify')}: {title}",
            min(steps, training.total_steps),
            shown=training.session.is_main,
            unit="step",
        ) as bar,
        watched(model if isinstance(model, nn.Module) else None) as gradients,
    ):
        for batch, report in training.steps(stop=steps):
            losses.append(report.loss.item())
            grad_norms.append(report.grad_norm.item())
            bar.advance(told=f"loss {losses[-1]:.6g}")
            if after is not None:
                after(batch, report)
            if len(losses) == 1:
                training.evaluate(bar)
        return Taken(
            losses=losses,
            grad_norms=grad_norms,
            metrics=training.evaluate(bar),
            gradient=next(iter(gradients), None),
        )


# State of optimizers that engines know by name; others' state is unknown, and only parameters are compared.
STATE_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def states_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter held in full by this rank, on the CPU, by name."""
    return {state_name(name, key): value.cpu().clone() for name, key, value in trainer.optimizer_state(STATE_KEYS)}


def save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors to a file of safetensors."""
    # A parameter may be a transposed view, and what is computed from it has its strides.
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


class RoundedRuns:
    """Repeats the steps of one process in the job's precision, to measure rounding against float64."""

    def __init__(self, job: Job, task: Task, folder: Path) -> None:
        self._job = job
        self._task = task
        self._folder = folder
        self._files = GradientFiles(folder=folder)
        self._before: dict[str, Tensor] = {}
        self._of_steps = 0.0  # the largest relative difference of losses and norms

    def begin(self, exact: Training) -> None:
        """Record the parameters before the first step."""
        self._before = {name: value.cpu().clone() for name, value in exact.session.trainer.parameters()}

    def note(self, exact: Training, report: StepReport) -> None:
        """Record a step in float64."""
        self._files.add(gradients_of(exact), settings_of(exact, report.lr))

    def measured(self, world: World, exact: Mapping[str, Tensor], taken: Taken) -> Allowed:
        """Run the steps, and measure how far rounding moves them from `exact`."""
        noise = GradientNoise(self._files)
        with phases.phase("measuring what rounding does to these steps"):
            runs = [run for way in range(_RUNS) if (run := self._run(world, way, noise, taken)) is not None]
        moves = {name: move for name, move in noise.moves().items() if name in exact}
        place = self._folder / "moves.safetensors"
        save(moves, place)
        return Allowed(typical=measure(exact, self._before, runs, moves), moves=place, steps=self._of_steps)

    def _run(self, world: World, way: int, noise: GradientNoise, taken: Taken) -> dict[str, Tensor] | None:
        """Run the steps; return the final state. `way` 0 keeps the batch's order, 1 shuffles it, more also split it.

        From 2 on there are `way` micro-batches. None for a model that can't split its batch into micro-batches.
        """
        micro_batch = -(-self._job.recipe.batch // way) if way > 1 else None
        exact = in_one_process(self._job)
        recipe = replace(exact.recipe, precision=self._job.recipe.precision)
        job = replace(exact, recipe=recipe, run=replace(exact.run, micro_batch=micro_batch))
        training = Training(job, self._task, world, Layout(), shuffled_within=way or None)
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
