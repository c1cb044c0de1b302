"""The check of a task's contract, part by part, in the order in which one rests on the other."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from samestep.contract.coupling import check_sum_of_parts
from samestep.contract.errors import ContractError, said
from samestep.contract.parts import SUM, WholeAndParts, whole_and_parts
from samestep.contract.samples import COLLATE, DATA, check_collate, take_samples
from samestep.contract.scores import EVALUATION, check_evaluation
from samestep.contract.second_gradients import (
    GradientThroughBlocks,
    can_lack_gradients,
    check_second_gradients,
    gradients_passed,
    through_blocks,
)
from samestep.contract.step import (
    DRAWS,
    PARAMETERS,
    REPEATABLE,
    check_draws,
    check_linear_backward,
    check_no_draws_compiled,
    check_reached,
    check_repeatable,
    check_total,
    check_writes,
    differs_from_first,
    first_loss,
)
from samestep.contract.trial import FORWARD, LOSS, MODEL, Trial
from samestep.engines.native.ordered import check_model as check_ordered
from samestep.job import Job
from samestep.launch.device import DeviceChoice
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.context.ring import check_ring
from samestep.parallel.exact.batch_norm import first_batch_norm
from samestep.parallel.trace import follow
from samestep.tasks.base import Task
from samestep.tasks.memory_budget import TooLargeError
from samestep.tasks.turns import Turn, turns_of
from samestep.tasks.turns import check_parameters as check_turns
from samestep.training.optimizer import plans_of

# The parts of the contract, and what each requires.
PARTS = {
    DATA: "samples are found by their index, and are the same each time",
    COLLATE: "the same samples are put together in the same way each time",
    MODEL: "the model is a function of the seed",
    FORWARD: "its forward runs on the first samples",
    LOSS: "the loss is a finite scalar that needs gradients, with a count above 0",
    PARAMETERS: "every parameter behind the loss is registered and only read, with a dense gradient",
    DRAWS: "random numbers are drawn by sample, or not at all",
    REPEATABLE: "the same samples give the same loss again",
    EVALUATION: "held-out samples are scored",
    SUM: "the loss of a batch is the sum of its parts'",
}


@dataclass(frozen=True, kw_only=True)
class ContractFinding:
    """The result of checking one part of the contract."""

    part: str
    kept: bool | None  # None: not checked, because an earlier part is broken or memory does not suffice
    text: str  # what holds, or how it is broken


def check_contract(job: Job, layout: Layout, task: Task, *, spread: Layout | None = None) -> None:
    """Raise ContractError for the first part of its contract that a job's task breaks under a layout.

    `spread`: a layout of several processes, where the contract is held once for one process and for such.

    Takes four forwards and three backwards of at most 12 samples in this process, whatever the layout, and one of
    held-out samples in evaluation mode; more only to find the cause of what is broken.
    A model that is too large for one process is not checked, which is said on standard error.
    """
    try:
        for _ in _kept(job, layout, task, spread):
            pass
    except TooLargeError as error:
        print(f"samestep: the task's contract was not checked: {error}", file=sys.stderr)


def find_gradients_passed(job: Job, task: Task) -> list[GradientThroughBlocks]:
    """Find the gradients that a task takes through blocks of its model, for layouts tried without a contract."""
    task = copy.copy(task)
    try:
        with (
            join(alone=True, device=job.run.device, threads=job.run.threads) as world,
            torch.random.fork_rng(devices=[]),
        ):
            sampled = take_samples(task)
            trials = (Trial(job, Layout(), task, sampled, world.device, turn) for turn in turns_of(task) or (None,))
            return [gradient for trial in trials for gradient in gradients_passed(trial)]
    except (ContractError, TooLargeError):
        return []


def examine(job: Job, layout: Layout, task: Task) -> list[ContractFinding]:
    """Check each part of the contract and return a finding for each; parts after the first broken one are unknown."""
    findings: dict[str, ContractFinding] = {}
    why = "a part before it is broken"
    try:
        for part in _kept(job, layout, task):
            findings[part] = ContractFinding(part=part, kept=True, text=PARTS[part])
        why = "the loss is not finite, and nothing can be compared"
    except ContractError as error:
        if error.part == LOSS:  # the loss is checked after a forward has passed
            findings[FORWARD] = ContractFinding(part=FORWARD, kept=True, text=PARTS[FORWARD])
        findings[error.part] = ContractFinding(part=error.part, kept=False, text=error.text)
    except TooLargeError as error:
        why = str(error)
    unknown = (ContractFinding(part=part, kept=None, text=f"not looked at: {why}") for part in PARTS)
    return [findings.get(finding.part, finding) for finding in unknown]


def _kept(job: Job, layout: Layout, task: Task, spread: Layout | None = None) -> Iterator[str]:
    """Yield each part of the contract that holds, up to the first broken one."""
    task = copy.copy(task)  # a loss may count its calls
    device: DeviceChoice = job.run.device
    with join(alone=True, device=device, threads=job.run.threads) as world, torch.random.fork_rng(devices=[]):
        sampled = take_samples(task)
        yield DATA
        check_collate(sampled)
        yield COLLATE
        turns = turns_of(task)
        first, *others = turns or (None,)
        with _named(first):
            trial = Trial(job, layout, task, sampled, world.device, first, spread=spread)
        with said(MODEL, "turns()"):
            check_turns(turns, trial.model)
        if job.run.reduction == "ordered":
            check_ordered(trial.model)
        plans_of(job.recipe, trial.model, turns)  # refuses patterns in the recipe that match no parameter
        yield MODEL
        with _named(first):
            yield from _kept_in(trial)
        for turn in others:
            with _named(turn):
                yield from _kept_in(Trial(job, layout, task, sampled, world.device, turn, spread=spread))


@contextmanager
def _named(turn: Turn | None) -> Iterator[None]:
    """Prefix a ContractError with the name of the turn in which it was raised."""
    try:
        yield
    except ContractError as error:
        if turn is None:
            raise
        complete = str(error) == error.text
        raise ContractError(error.part, f"turn {turn.name}: {error.text}", complete=complete) from error


def _kept_in(trial: Trial) -> Iterator[str]:
    """Check the parts of the contract about a step, or about one turn of it, and yield each that holds."""
    first = None if _tried(trial) else _loss_in_float32(trial)
    if first is not None:
        yield FORWARD
        yield LOSS
        if not math.isfinite(first):
            return  # a training skips or reports such steps; their gradients can't be compared
    layout, engine = trial.layout, trial.job.run.engine
    passes = can_lack_gradients(layout, engine)
    taken = whole_and_parts(trial, gradient_calls=passes)
    if first is None:
        yield FORWARD
        yield LOSS
        if not math.isfinite(first := taken.watched.total.item()):
            return
    check_writes(trial, taken.watched.writes)
    if trial.turn is not None:
        check_reached(trial.turn, taken.reached)
    if passes:
        check_second_gradients(through_blocks(trial, taken.watched.gradient_calls), layout, engine)
    if layout.attention == "ring":
        check_ring(layout, follow(trial.model, trial.sampled.batch(0, 1).inputs))
    yield PARAMETERS
    check_draws(trial, taken.watched.generators)
    if trial.job.run.compile:
        check_no_draws_compiled(trial)
    yield DRAWS
    yield from _rest(trial, taken, first)


def _tried(trial: Trial) -> bool:
    """Whether the task has run its model in float32 on its own, in a way that shows what a training forward would."""
    return trial.task.tried_model() and first_batch_norm(trial.model) is None


def _loss_in_float32(trial: Trial) -> float:
    """The loss of all samples as a training step takes it, checked; its graph is freed."""
    total, count = first_loss(trial)
    check_total(trial, total, count)
    return total.item()


def _rest(trial: Trial, taken: WholeAndParts, loss: float) -> Iterator[str]:
    """Check the parts that need a computed loss, and yield each that holds. `loss`: of the first forward, a sum."""

    def repeatable() -> None:
        if taken.sums.add_up and not differs_from_first(trial, taken.watched.total.item(), loss):
            return
        with trial.in_float32():
            count = check_repeatable(trial)
            # Of a forward that is not repeatable, gradients can't be compared.
            check_linear_backward(trial, count)

    def evaluation() -> None:
        with trial.in_float32():
            check_evaluation(trial)

    parts: tuple[tuple[str, Callable[[], None]], ...] = (
        (REPEATABLE, repeatable),
        (EVALUATION, evaluation),
        (SUM, lambda: check_sum_of_parts(trial, taken)),
    )
    for part, check in parts:
        check()
        yield part
