"""Proof: a layout's first steps compared with those of one process in float64.

What is held against one process, all in float64: losses and gradient norms of each step, parameters and changed
buffers after the last, metrics. Differences are relative: of a tensor the largest difference over the largest number
of one process's. Sums in another order differ by some 1e-15; a mistake in a layout (a mean of means, a mask, a
gradient that wasn't sent) by far more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.engines.registry import resolve as resolve_engine
from samestep.errors import UserError
from samestep.fault_tolerance.nonfinite import without_nonfinite
from samestep.job import Job
from samestep.launch.device import device_of, release_memory
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.parallel_model import Findings
from samestep.progress import phases
from samestep.ranks import DeviceChoice
from samestep.recipe import SGD
from samestep.script_proof.kinds import Finding
from samestep.tasks.base import Task
from samestep.training.as_built import AsBuilt, FirstStep, hold_as_built
from samestep.training.fit import Training
from samestep.training.nonfinite_values import (
    ONE_PROCESS,
    NonFiniteValue,
    first_metric,
    first_of_steps,
    first_parameter,
    of_sides,
)
from samestep.training.rounding import (
    Allowed,
    Rounding,
    RoundingFound,
    difference,
    largest,
    pairs,
    relative,
    worst_of,
)
from samestep.training.update_rule import UpdateRule
from samestep.verification.noise import NoiseFound, NoiseMeasurement
from samestep.verification.steps import (
    STATE_KEYS,
    Reference,
    RoundedRuns,
    Taken,
    buffers_of,
    clipping,
    gradients_of,
    in_one_process,
    save,
    settings_of,
    states_of,
    take,
    weights_of,
)
from samestep.verification.tensors import TOLERANCE, compare_buffers, compare_parameters, shares_of_rounding

# For engines without float64. Losses and gradient norms, which are sums over many numbers, have this tolerance;
# parameters and optimizer state are judged by measured rounding. Metrics are only shown: a sample at the border of
# two classes may change class.
FLOAT32_TOLERANCE = 1e-4
_JUDGED_IN_LOW_PRECISION = ("loss", "grad_norm")
_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
# Multiple of the measured rounding of losses and norms that passes, if it exceeds `FLOAT32_TOLERANCE`.
_TIMES_MEASURED = 20.0


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The largest relative differences between a layout's steps and one process's."""

    layout: str
    dtype: str
    steps: int
    max_relative_difference: Mapping[str, float]  # of loss, grad_norm, parameters, metrics
    tolerance: float
    worst_parameter: str
    by_step: Mapping[str, Sequence[float]] = field(default_factory=dict)  # relative differences of loss and grad_norm
    as_built: AsBuilt | None = None  # comparison of one process with the model as its task built it
    nonfinite: Sequence[NonFiniteValue] = ()
    communication: str | None = None  # the recipe's compressed communication, which takes another step by design
    # In float32 and bfloat16: parameters and optimizer state compared with measured rounding.
    rounding: RoundingFound | None = None
    departure: Finding | None = None  # the first difference, if it was searched for
    # In float64: parameters and buffers that differ by more than the tolerance, and what of it is rounding.
    beyond: Mapping[str, float] = field(default_factory=dict)
    noise: NoiseFound | None = None

    @property
    def same_step(self) -> bool:
        """Whether all differences are rounding. Never with compressed communication, which takes another step."""
        if self.communication is not None:
            return False
        if self.nonfinite or not (self.as_built is None or self.as_built.same):
            return False
        if self.rounding is not None and not self.rounding.same:
            return False
        if self.noise is not None:
            return self.noise.verdict == "rounding"
        judged = tuple(self.max_relative_difference) if self.dtype == "float64" else _JUDGED_IN_LOW_PRECISION
        return all(self.max_relative_difference[name] < self.tolerance for name in judged)

    @property
    def undecided(self) -> bool:
        """Whether the differences may be rounding, and may be a mistake."""
        return self.noise is not None and self.noise.verdict == "can't tell"

    @property
    def failed_by_steps(self) -> bool:
        """Whether the layout takes another step by mistake, whose first difference can be searched for."""
        return not (self.same_step or self.undecided or self.communication is not None or self.nonfinite)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.same_step:
            return "the same step"
        return "can't tell whether it is the same step" if self.undecided else "NOT the same step"

    def wants_noise(self) -> bool:
        """Whether differences above the fixed tolerance in float64 are all that speaks against the same step."""
        finite = all(value < math.inf for value in (*self.max_relative_difference.values(), *self.beyond.values()))
        apart = self.communication is None and not self.nonfinite and (self.as_built is None or self.as_built.same)
        return self.dtype == "float64" and self.noise is None and apart and finite and not self.same_step

    def held_against_noise(self, noise: NoiseMeasurement) -> "Proof":
        """Return the proof with what of its differences is rounding."""
        quantities = {name: value for name, value in self.max_relative_difference.items() if name != "parameters"}
        return replace(self, noise=noise.judge({**quantities, **self.beyond}, self.tolerance))

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON, with the words on non-finite values."""
        values = asdict(self)
        del values["worst_parameter"]
        values["nonfinite"] = [{**asdict(value), "words": value.words()} for value in self.nonfinite]
        if self.departure is not None:
            values["departure"] = self.departure.to_json()
        if self.as_built is not None:
            values["as_built"] |= {"same": self.as_built.same, "words": self.as_built.words()}
        if self.rounding is not None:
            values["rounding"] = self.rounding.to_json()
        if self.noise is not None:
            values["noise"] |= {"words": self.noise.words()}
        # JSON has no infinity: NaN, or the difference of lists of unequal length, becomes null.
        return {**without_nonfinite(values), "same_step": self.same_step}

    def words(self) -> Sequence[str]:
        """Remarks on the differences: a line for each non-finite value, and on the model as built."""
        model = [self.as_built.words()] if self.as_built is not None else []
        rounding = [self.rounding.words()] if self.rounding is not None else []
        noise = [self.noise.words()] if self.noise is not None and (self.same_step or self.undecided) else []
        return [
            *(value.words() for value in self.nonfinite),
            *noise,
            *rounding,
            *model,
            *self._of_communication(),
        ]

    def _of_communication(self) -> Sequence[str]:
        """Describe how far the steps of a compressed communication are from one process's."""
        if self.communication is None:
            return []
        # Gradient norms are left out: with local steps each rank has its own.
        loss, parameters = (self.max_relative_difference[name] for name in ("loss", "parameters"))
        return [
            f"recipe.communication is {self.communication}, which does not take the same step as one process; in "
            f"these {self.steps} steps the largest relative difference of losses was {loss:.1e}, of parameters "
            f"{parameters:.1e}"
        ]


def proof_job(job: Job, *, dropout: bool = False, precision: str | None = None) -> Job:
    """Return the job for a proof: in float64 if the engine supports it, without dropout unless requested.

    `precision`: another one, such as bf16. Raises UserError for an engine that can't take the same step.
    """
    recipe, engine = job.recipe, resolve_engine(job.run.engine)
    if not engine.abilities.same_step:
        raise UserError(
            f'engine "{engine.name}" does not take the same step as one process, so there is nothing to prove; '
            "samestep train shows what it reaches"
        )
    engine.check_proof(job)
    if precision is None:
        precision = "fp64" if "fp64" in engine.abilities.precisions else "fp32"
    elif precision not in _DTYPES:
        raise UserError(f"a proof in {precision}: use {', '.join(_DTYPES)}")
    elif precision not in engine.abilities.precisions:
        precisions = ", ".join(name for name in _DTYPES if name in engine.abilities.precisions)
        raise UserError(f'a proof in {precision}, which engine "{engine.name}" does not have; use {precisions}')
    return replace(job, recipe=replace(recipe, precision=precision, dropout=recipe.dropout and dropout))


@phases.status(lambda: "taking the steps of one process")
def reference(
    job: Job,
    task: Task,
    steps: int,
    folder: Path,
    *,
    held_out: int | None = None,
    device: DeviceChoice = "auto",
) -> Reference:
    """The steps of one process in float64: the whole global batch in one forward, on the native engine.

    `job` is one that `proof_job` made; `held_out` is how many held-out samples are evaluated, None: all.
    `device`: "cpu" takes the steps there, whatever the job's device is. In float64 with Adam they take 32 bytes a
    parameter and what a whole batch's forward keeps.
    The parameters after the last step are written into `folder`. The device's memory is given back: ranks that take
    the steps under a layout may start on it while this process lives.
    """
    if device == "cpu":
        job = replace(job, run=replace(job.run, device="cpu"))
    try:
        return _reference(job, task, steps, folder, held_out)
    finally:
        release_memory(device_of(0, job.run.device))


def _reference(job: Job, task: Task, steps: int, folder: Path, held_out: int | None) -> Reference:
    """Take the steps in one process, in float64, and save what ranks compare with.

    Also records the first step as the model's own PyTorch takes it (`as_built`), how far rounding alone may move an
    update that divides by a small number (`rounding`), and the rounding of the recipe's own precision (`allowed`).
    """
    exact = in_one_process(job)
    recipe = exact.recipe
    with join(alone=True, device=exact.run.device, threads=exact.run.threads) as world:
        training = Training(exact, task, world, Layout(), held_out=held_out)
        first: list[FirstStep] = []
        optimizers = [recipe.optimizer, *(group.optimizer for group in recipe.groups if group.optimizer)]
        divides = any(not isinstance(optimizer, SGD) for optimizer in optimizers)
        rounding = Rounding() if divides else None
        rounded = RoundedRuns(job, task, folder) if job.recipe.precision != "fp64" else None
        if rounded is not None:
            rounded.begin(training)

        def after(_: StepBatch, report: StepReport) -> None:
            if not first:
                first.append(_first(training, report))
            if rounding is not None:
                norm = report.grad_norm.item()
                rounding.add(
                    gradients_of(training), norm * clipping(training, norm), settings_of(training, report.lr)
                )
            if rounded is not None:
                rounded.note(training, report)

        before = buffers_of(training.session.trainer)
        taken = take(training, steps, ONE_PROCESS, after)
        buffers = buffers_of(training.session.trainer)
        parameters = {name: value.cpu().clone() for name, value in weights_of(training.session.trainer, recipe)}
        nonfinite = first_of_steps(ONE_PROCESS, taken.losses, taken.grad_norms, taken.gradient)
        last = len(taken.losses) - 1
        state = states_of(training.session.trainer) if rounded is not None else {}
        tensors = {name: as_real(value) for name, value in {**parameters, **state}.items()}
        save(tensors, folder / "parameters.safetensors")
        if rounding is not None:
            save(rounding.moves, folder / "rounding.safetensors")
        return Reference(
            losses=taken.losses,
            grad_norms=taken.grad_norms,
            parameters=folder / "parameters.safetensors",
            rounding=folder / "rounding.safetensors" if rounding is not None else None,
            most_rounding=largest(move.max().item() for move in rounding.moves.values()) if rounding else 0.0,
            metrics=taken.metrics,
            held_out=held_out,
            buffers={name: value for name, value in buffers.items() if not torch.equal(value, before[name])},
            as_built=hold_as_built(job.recipe, task, training.samples, world.device, first[0]) if first else None,
            nonfinite=nonfinite or first_parameter(ONE_PROCESS, last, parameters),
            allowed=rounded.measured(world, tensors, taken) if rounded is not None else None,
            state_keys=STATE_KEYS if state else (),
        )


def _first(training: Training, report: StepReport) -> FirstStep:
    """Return a reference's first step, with its gradients before clipping."""
    norm = report.grad_norm.item()
    gradients = {name: gradient / clipping(training, norm) for name, gradient in gradients_of(training)}
    return FirstStep(loss=report.loss.item(), grad_norm=norm, gradients=gradients)


def hold_against(
    job: Job,
    task: Task,
    world: World,
    layout: Layout,
    steps: int,
    reference: Reference | None,
    findings: Findings | None = None,
) -> Proof:
    """Take the same steps on this rank under a layout, and compare them; rank 0 has the reference.

    Every rank compares the parameters that it holds, and the largest difference over all ranks counts. `findings`:
    about the model, which proofs of the job's other layouts in this process share.
    """
    parts: list[Any] = [reference]
    dist.broadcast_object_list(parts)
    expected: Reference = parts[0]
    training = Training(job, task, world, layout, held_out=expected.held_out, findings=findings)
    in_float64 = job.recipe.precision == "fp64"
    rule = None if in_float64 else UpdateRule(job.recipe, training.total_steps, training.session.trainer)
    taken = take(training, steps, str(layout), None if rule is None else lambda *_: rule.after_step())
    weights = list(weights_of(training.session.trainer, job.recipe))
    with phases.status(lambda: "comparing parameters"):
        compared = compare_parameters(weights, reference, world.device, expected.rounding is not None)
    if expected.buffers:
        compared = compare_buffers(training.session.trainer, expected, compared)
    by_step = {
        "loss": [relative(a, b) for a, b in pairs(taken.losses, expected.losses)],
        "grad_norm": [relative(a, b) for a, b in pairs(taken.grad_norms, expected.grad_norms)],
    }
    differences_of_rank = {
        **{name: largest(values) for name, values in by_step.items()},
        "parameters": compared.worst,
        "metrics": difference(taken.metrics, expected.metrics),
    }
    rounding = None
    if rule is not None and expected.allowed is not None:
        rounding = shares_of_rounding(training.session.trainer, weights, expected, reference, world.device)
        if rule.found is not None:
            rounding = replace(rounding, update=rule.found.worst, worst_update=rule.found.parameter)
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, (differences_of_rank, compared.where, taken.gradient, rounding, compared.beyond))
    most = {name: largest(differences[name] for differences, *_ in everyone) for name in differences_of_rank}
    _, worst_parameter, *_ = max(everyone, key=lambda of_rank: of_rank[0]["parameters"])
    # A stage watches its own parameters; the last one is the nearest to the loss.
    gradient = next((name for _, _, name, *_ in reversed(everyone) if name is not None), None)
    return Proof(
        layout=str(layout),
        dtype=_DTYPES[job.recipe.precision],
        steps=len(taken.losses),
        max_relative_difference=most,
        tolerance=TOLERANCE if in_float64 else tolerance_of(expected.allowed),
        worst_parameter=worst_parameter,
        by_step=by_step,
        as_built=expected.as_built,
        nonfinite=_nonfinite_values(str(layout), taken, gradient, compared.nonfinite, expected),
        communication=job.recipe.communication and job.recipe.communication.kind,
        beyond=_largest_of_each(of_rank for *_, of_rank in everyone) if in_float64 else {},
        rounding=worst_of([share for _, _, _, share, _ in everyone if share is not None]),
    )


def _largest_of_each(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest value of each name over all ranks."""
    most: dict[str, float] = {}
    for of_rank in ranks:
        for name, value in of_rank.items():
            most[name] = max(most.get(name, 0.0), value)
    return most


def _nonfinite_values(
    side: str, taken: Taken, gradient: str | None, parameter: NonFiniteValue | None, expected: Reference
) -> tuple[NonFiniteValue, ...]:
    """The first value that isn't finite of the reference and of this layout; if both have none, of the metrics.

    `gradient`: the name of the first gradient that isn't finite, on any rank; `parameter`: the first such parameter.
    """
    last = len(taken.losses) - 1
    first = first_of_steps(side, taken.losses, taken.grad_norms, gradient)
    if first is None and parameter is not None:
        first = replace(parameter, side=side, step=last)
    if values := of_sides(expected.nonfinite, first):
        return values
    metric = first_metric(side, last, taken.metrics, expected.metrics)
    return () if metric is None else (metric,)


def tolerance_of(allowed: Allowed | None) -> float:
    """Return the tolerance of losses and gradient norms, given the measured rounding."""
    measured = allowed.steps if allowed is not None else 0.0
    return max(FLOAT32_TOLERANCE, _TIMES_MEASURED * measured)
