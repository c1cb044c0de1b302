"""The check of a task's contract, part by part, in the order in which one rests on the other."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from samestep.contract.coupling import SUM, check_sum_of_parts
from samestep.contract.errors import ContractError, TooLargeError, said
from samestep.contract.samples import COLLATE, DATA, check_collate, take_samples
from samestep.contract.scores import EVALUATION, check_evaluation
from samestep.contract.second_gradients import Passed, can_lack_gradients, check_second_gradients, gradients_passed
from samestep.contract.step import (
    DRAWS,
    PARAMETERS,
    REPEATABLE,
    check_draws,
    check_linear_backward,
    check_loss,
    check_no_draws_compiled,
    check_parameters,
    check_repeatable,
)
from samestep.contract.trial import FORWARD, LOSS, MODEL, Trial
from samestep.engines.ordered import check_model as check_ordered
from samestep.job import Job
from samestep.launch.device import DeviceChoice
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.context.ring import check_ring
from samestep.parallel.trace import follow
from samestep.tasks.base import Task
from samestep.tasks.turns import Turn, turns_of
from samestep.tasks.turns import check_parameters as check_turns
from samestep.training.optimizer import plans_of

# Each part of the contract, and what is true of a task that keeps it.
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
class Finding:
    """What was found of one part."""

    part: str
    kept: bool | None  # None: not looked at, since a part before it is broken or there is no memory for it
    text: str  # what is true of it, or how it is broken


def check_contract(job: Job, task: Task) -> None:
    """Raise ContractError for the first part of its contract that a job's task breaks.

    Takes one forward and backward and a few forwards of at most 12 samples in this process, whatever the layout.
    A model that is too large for one process is not checked, which is said on standard error.
    """
    try:
        for _ in _kept(job, task):
            pass
    except TooLargeError as error:
        print(f"samestep: the task's contract was not checked: {error}", file=sys.stderr)


def find_gradients_passed(job: Job, task: Task) -> list[Passed]:
    """What gradients a task takes through blocks of its model, for layouts that are tried without the contract."""
    task = copy.copy(task)
    try:
        with (
            join(alone=True, device=job.run.device, threads=job.run.threads) as world,
            torch.random.fork_rng(devices=[]),
        ):
            sampled = take_samples(task)
            trials = (Trial(job, task, sampled, world.device, turn) for turn in turns_of(task) or (None,))
            return [each for trial in trials for each in gradients_passed(trial)]
    except (ContractError, TooLargeError):
        return []


def examine(job: Job, task: Task) -> list[Finding]:
    """What holds of each part of the contract; behind the first that is broken, nothing is known."""
    found: dict[str, Finding] = {}
    why = "a part before it is broken"
    try:
        for part in _kept(job, task):
            found[part] = Finding(part=part, kept=True, text=PARTS[part])
        why = "the loss is not finite, and nothing can be compared"
    except ContractError as error:
        if error.part == LOSS:  # of what the forward gave
            found[FORWARD] = Finding(part=FORWARD, kept=True, text=PARTS[FORWARD])
        found[error.part] = Finding(part=error.part, kept=False, text=error.text)
    except TooLargeError as error:
        why = str(error)
    unknown = (Finding(part=part, kept=None, text=f"not looked at: {why}") for part in PARTS)
    return [found.get(finding.part, finding) for finding in unknown]


def _kept(job: Job, task: Task) -> Iterator[str]:
    """The parts that are kept, one after the other, until the first that isn't."""
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
            trial = Trial(job, task, sampled, world.device, first)
        with said(MODEL, "turns()"):
            check_turns(turns, trial.model)
        if job.run.reduction == "ordered":
            check_ordered(trial.model)
        plans_of(job.recipe, trial.model, turns)  # what it says of parameters that the model has not
        yield MODEL
        with _named(first):
            yield from _kept_in(trial)
        for turn in others:
            with _named(turn):
                yield from _kept_in(Trial(job, task, sampled, world.device, turn))


@contextmanager
def _named(turn: Turn | None) -> Iterator[None]:
    """Name the turn in which a part of the contract is broken."""
    try:
        yield
    except ContractError as error:
        if turn is None:
            raise
        told = str(error) == error.text
        raise ContractError(error.part, f"turn {turn.name}: {error.text}", told=told) from error


def _kept_in(trial: Trial) -> Iterator[str]:
    """The parts that are kept by a task's steps, or in one of their turns."""
    total, count = check_loss(trial)
    total = total.detach()  # what was kept for its backward may go
    yield FORWARD
    yield LOSS
    if not math.isfinite(total.item()):
        return  # the job goes on without such steps, and nothing can be compared
    check_parameters(trial, count)
    layout, engine = Layout.parse(trial.job.run.layout), trial.job.run.engine
    if can_lack_gradients(layout, engine):
        check_second_gradients(gradients_passed(trial), layout, engine)
    if layout.attention == "ring":
        check_ring(layout, follow(trial.model, trial.sampled.batch(0, 1).inputs))
    yield PARAMETERS
    check_draws(trial)
    if trial.job.run.compile:
        check_no_draws_compiled(trial)
    yield DRAWS
    yield from _rest(trial, total, count)


def _rest(trial: Trial, total: torch.Tensor, count: float) -> Iterator[str]:
    """The parts of the contract that need a loss already computed; gives the name of each that is kept."""

    def repeatable() -> None:
        check_repeatable(trial, total)
        check_linear_backward(trial, count)  # of a forward that is not repeatable, gradients can't be compared

    parts: tuple[tuple[str, Callable[[], None]], ...] = (
        (REPEATABLE, repeatable),
        (EVALUATION, lambda: check_evaluation(trial)),
        (SUM, lambda: check_sum_of_parts(trial)),
    )
    for part, check in parts:
        check()
        yield part
