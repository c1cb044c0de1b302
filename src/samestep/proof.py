"""The proof: a layout's first steps held against those of one process in float64."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from samestep.cluster.world import World, join
from samestep.engines.base import Trainer
from samestep.engines.resolve import resolve as resolve_engine
from samestep.errors import UserError
from samestep.job import Job, Run
from samestep.layout import Layout
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.progress import Bar

TOLERANCE = 1e-10

# For engines that have no float64, from the rounding of float32. Rounding alone moves a parameter whose gradient is
# nearly zero by a whole step of Adam, and a sample at the border of two classes from one to the other; so parameters
# and metrics are shown, and losses and gradient norms, which sum over all of them, are judged.
FLOAT32_TOLERANCE = 1e-4
_JUDGED_IN_FLOAT32 = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far a layout's steps were from one process's: the largest relative differences."""

    layout: str
    dtype: str
    steps: int
    max_relative_difference: Mapping[str, float]  # of loss, grad_norm, parameters, metrics
    tolerance: float
    worst_parameter: str

    @property
    def same_step(self) -> bool:
        judged = _JUDGED_IN_FLOAT32 if self.dtype == "float32" else tuple(self.max_relative_difference)
        return all(self.max_relative_difference[name] < self.tolerance for name in judged)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["worst_parameter"]
        # JSON has no infinity: a value that is not a number, or a list of another length, is a null.
        values["max_relative_difference"] = {
            name: value if math.isfinite(value) else None for name, value in self.max_relative_difference.items()
        }
        return {**values, "same_step": self.same_step}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process did."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    parameters: Path  # safetensors
    metrics: Mapping[str, Any]


def proof_job(job: Job, *, dropout: bool = False) -> Job:
    """The job as it is proved: float64 where its engine has that, and no dropout unless it is asked for.

    Raises UserError for an engine that can't take the same step.
    """
    recipe, engine = job.recipe, resolve_engine(job.run.engine)
    if not engine.abilities.same_step:
        raise UserError(
            f'engine "{engine.name}" does not take the same step as one process, so there is nothing to prove; '
            "samestep train shows what it reaches"
        )
    engine.check_proof(job)
    precision = "fp64" if "fp64" in engine.abilities.precisions else "fp32"
    return replace(job, recipe=replace(recipe, precision=precision, dropout=recipe.dropout and dropout))


def reference(job: Job, task: Task, steps: int, folder: Path) -> Reference:
    """The steps of one process in float64: the whole global batch in one forward, on the native engine.

    `job` is one that `proof_job` made. The parameters after the last step are written into `folder`.
    """
    alone = Run(device=job.run.device, threads=job.run.threads, workers=job.run.workers)
    recipe = replace(job.recipe, precision="fp64")
    with join(alone=True, device=alone.device, threads=alone.threads) as world:
        training = Training(replace(job, recipe=recipe, run=alone), task, world, Layout())
        losses, grad_norms, metrics = _take(training, steps, "one process")
        parameters = {name: value.cpu().clone() for name, value in training.session.trainer.parameters()}
        save_file(parameters, folder / "parameters.safetensors")
        return Reference(
            losses=losses,
            grad_norms=grad_norms,
            parameters=folder / "parameters.safetensors",
            metrics=metrics,
        )


def hold_against(job: Job, task: Task, world: World, layout: Layout, steps: int, known: Reference | None) -> Proof:
    """Take the same steps on this rank under a layout, and compare; rank 0 knows the reference.

    Every rank compares the parameters that it holds, and the largest difference over all ranks counts.
    """
    training = Training(job, task, world, layout)
    losses, grad_norms, metrics = _take(training, steps, str(layout))
    parts: list[Any] = [known]
    dist.broadcast_object_list(parts)
    expected: Reference = parts[0]
    shared = load_file(known.parameters) if known is not None else None
    worst, worst_parameter = _compare_parameters(training.session.trainer, shared, world.device)
    mine = {
        "loss": _largest(relative(a, b) for a, b in _pairs(losses, expected.losses)),
        "grad_norm": _largest(relative(a, b) for a, b in _pairs(grad_norms, expected.grad_norms)),
        "parameters": worst,
        "metrics": difference(metrics, expected.metrics),
    }
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, (mine, worst_parameter))
    largest = {name: _largest(differences[name] for differences, _ in everyone) for name in mine}
    _, worst_parameter = max(everyone, key=lambda pair: pair[0]["parameters"])
    in_float64 = job.recipe.precision == "fp64"
    return Proof(
        layout=str(layout),
        dtype="float64" if in_float64 else "float32",
        steps=len(losses),
        max_relative_difference=largest,
        tolerance=TOLERANCE if in_float64 else FLOAT32_TOLERANCE,
        worst_parameter=worst_parameter,
    )


def _take(training: Training, steps: int, title: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses and gradient norms of the first steps, and the metrics after them.

    There is an evaluation after the first step as well: the steps that follow must not know of it.
    """
    losses, grad_norms = [], []
    with Bar(f"verify: {title}", min(steps, training.total_steps), shown=training.session.is_main) as bar:
        for _, report in training.steps(stop=steps):
            losses.append(report.loss.item())
            grad_norms.append(report.grad_norm.item())
            bar.advance()
            if len(losses) == 1:
                training.evaluate(bar)
        return losses, grad_norms, training.evaluate(bar)


def _compare_parameters(
    trainer: Trainer, reference: Mapping[str, Tensor] | None, device: torch.device
) -> tuple[float, str]:
    """The largest difference of this rank's parameters from those that rank 0 knows, and where it is.

    A parameter's difference is max|a - b| / max(max|b|, root mean square of all parameters). The floor is for
    parameters whose true gradient is zero, such as the biases of attention's keys: they start at zero, and all
    that moves them is rounding.
    """
    named = list(trainer.parameters())
    floor = _root_mean_square(trainer)
    worst, where = 0.0, named[0][0]
    for name, mine in named:
        theirs = reference[name].to(device) if reference is not None else torch.empty_like(mine, dtype=torch.float64)
        dist.broadcast(theirs, src=0)
        apart = _relative_tensors(mine, theirs, floor)
        if apart > worst:
            worst, where = apart, name
    return worst, where


def _root_mean_square(trainer: Trainer) -> float:
    squares = numbers = 0.0
    for _, parameter in trainer.parameters():
        squares += parameter.square().sum().item()
        numbers += parameter.numel()
    return math.sqrt(squares / numbers)


def _relative_tensors(mine: Tensor, theirs: Tensor, floor: float) -> float:
    if mine.shape != theirs.shape:
        return math.inf
    if mine.numel() == 0:
        return 0.0
    scale = max(theirs.abs().max().item(), floor)
    apart = (mine - theirs).abs().max().item()
    return _or_infinity(apart / scale if apart else apart)


def difference(mine: Any, theirs: Any) -> float:
    """The largest relative difference between two nests of numbers; infinite where their shapes differ.

    The thresholds of a curve are left out: they are predictions, rounded to float32 so that equal ones stay
    equal, and a difference in the sixteenth digit may round to another float32.
    """
    if isinstance(theirs, Mapping):
        if not isinstance(mine, Mapping) or mine.keys() != theirs.keys():
            return math.inf
        return _largest(difference(mine[name], theirs[name]) for name in theirs if name != "thresholds")
    if isinstance(theirs, (list, tuple)):
        if not isinstance(mine, (list, tuple)) or len(mine) != len(theirs):
            return math.inf
        return _largest(difference(a, b) for a, b in zip(mine, theirs, strict=True))
    if isinstance(theirs, (int, float)) and isinstance(mine, (int, float)):
        if math.isnan(theirs) and math.isnan(mine):
            return 0.0  # undefined for both, such as the recall of a class without samples
        return relative(float(mine), float(theirs))
    return 0.0 if mine == theirs else math.inf


def _pairs(mine: Sequence[float], theirs: Sequence[float]) -> Iterator[tuple[float, float]]:
    if len(mine) != len(theirs):
        yield math.nan, math.nan
    yield from zip(mine, theirs, strict=False)


def relative(mine: float, theirs: float) -> float:
    """|mine - theirs| / |theirs|; infinite where one is not a number."""
    apart = abs(mine - theirs)
    return _or_infinity(apart / abs(theirs) if apart and theirs else apart)


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(values: Iterator[float] | Any) -> float:
    return max(values, default=0.0)
