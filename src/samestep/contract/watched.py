"""One training forward and its loss, watched for all that the contract asks of a forward."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from samestep.contract.second_gradients import GradientCall, GradientCalls
from samestep.contract.step import first_loss
from samestep.contract.trial import Trial, Writes
from samestep.parallel.exact.generators import State, state


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A loss of the first samples, with its graph, and what computing it did besides."""

    total: Tensor  # 0-dim
    count: float
    writes: Writes  # to parameters
    gradient_calls: Sequence[GradientCall]  # of torch.autograd.grad; empty unless asked for
    generators: tuple[State, State]  # of random numbers: their states before it and after it


def watch(trial: Trial, *, gradient_calls: bool) -> Watched:
    """Take a training forward and loss of all samples of a trial.

    `gradient_calls`: also record calls of torch.autograd.grad. The modules that draw are in `trial.dropout.answered`.
    """
    calls = GradientCalls()
    trial.dropout.notes = True
    trial.listener = calls if gradient_calls else nullcontext()
    try:
        before = state(trial.device)
        with Writes(trial.model) as writes:
            total, count = first_loss(trial)
        states = before, state(trial.device)
    finally:
        trial.dropout.notes = False
        trial.listener = nullcontext()
    return Watched(total=total, count=count, writes=writes, gradient_calls=calls.taken, generators=states)
