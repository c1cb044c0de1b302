"""The forwards and backwards on which most of the contract rests: the first samples at once, and in two parts.

12 samples are taken at once and as 5 and 7, forward and backward, in float64: three forwards in all. Before backward
the parts' losses are scaled 8 times as much as the whole's, since ranks and micro-batches scale theirs by other
factors than one process does. So one comparison shows a loss that is no sum over samples, a forward that keeps
something from call to call, and a gradient that is clamped on its way. The cause is looked for afterwards, where
something differs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from samestep.contract.errors import ContractError, said
from samestep.contract.step import PARAMETERS, TIMES, check_registered, check_total, loss_scale
from samestep.contract.trial import Trial
from samestep.contract.watched import Watched, watch
from samestep.parallel.own_backwards import own_backwards_refused
from samestep.torch_internals.modules import AnyBatchNorm

SUM = "sum of parts"


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Losses and counts of the whole batch, its first part and the rest, and the gradient error by parameter.

    Gradients are of losses that are scaled alike; a single sample has no rest.
    """

    losses: tuple[float, float, float]
    counts: tuple[float, float, float]
    tolerance: float
    gradient_norm: float  # that differences are relative to
    apart: Mapping[str, float]  # parameter -> norm of (gradient of the whole batch - gradients of the parts)

    @property
    def add_up(self) -> bool:
        """Whether counts, losses and gradients do."""
        return self.counts_add_up and self.losses_add_up and self.gradients_add_up

    @property
    def counts_add_up(self) -> bool:
        """Whether the count of the whole batch is the sum of its parts' counts."""
        whole, first, rest = self.counts
        return abs(whole - first - rest) <= 1e-6 * abs(whole)

    @property
    def losses_add_up(self) -> bool:
        """Whether the loss of the whole batch is the sum of its parts' losses, up to rounding."""
        return self.loss_error <= self.tolerance  # NaN does not pass

    @property
    def gradients_add_up(self) -> bool:
        """Whether gradients add up. Non-finite ones pass: they can't be compared, and a training stops at them."""
        return not math.isfinite(self.gradient_error) or self.gradient_error <= 10 * self.tolerance

    @property
    def loss_error(self) -> float:
        """The relative difference of the whole batch's loss from the sum of its parts'."""
        whole, first, rest = self.losses
        apart, size = abs(whole - first - rest), max(abs(first) + abs(rest), abs(whole))
        return apart / size if size else apart

    @property
    def gradient_error(self) -> float:
        """The same of the gradients of all parameters together."""
        apart, norm = math.hypot(*self.apart.values()), self.gradient_norm
        return apart / norm if norm else apart


@dataclass(frozen=True, kw_only=True)
class NormCounts:
    """How many numbers a feature a batch norm took its statistics over."""

    module: nn.Module
    whole: float
    first: float
    rest: float

    @property
    def add_up(self) -> bool:
        """Whether the parts' numbers are the whole's; a batch norm that takes no samples has the same in each."""
        return self.whole == self.first + self.rest or self.whole == self.first == self.rest


@dataclass(frozen=True, kw_only=True)
class WholeAndParts:
    """What the first samples gave at once and in parts."""

    watched: Watched  # the forward of the whole
    reached: Sequence[str]  # the parameters that the whole's backward gave a gradient
    sums: Sums
    batch_norms: Mapping[str, NormCounts]  # of a training model, by name


def whole_and_parts(trial: Trial, *, gradient_calls: bool) -> WholeAndParts:
    """Take the samples at once and in parts, in float64; in float32 where the model has operators without float64.

    Leaves the trial in the precision that it took. Raises ContractError where a forward or backward fails.
    """
    try:
        trial.widen()
        return _take(trial, gradient_calls)
    except ContractError:
        trial.narrow()
        return _take(trial, gradient_calls)


def _take(trial: Trial, gradient_calls: bool) -> WholeAndParts:
    """Take the samples at once and in parts, in the precision that the trial has.

    The whole's gradient is multiplied by minus the parts' scale before the parts' gradients are accumulated into it:
    what remains is the difference, parameter by parameter.
    """
    parts = parts_of(trial)
    parameters = {name: parameter for name, parameter in trial.model.named_parameters() if parameter.requires_grad}
    trial.model.zero_grad()
    with trial.without_batch_statistics(), _numbers_normed(trial.model) as numbers:
        watched = watch(trial, gradient_calls=gradient_calls)
        numbers[:] = numbers[-1:]  # where no sample counted, others were taken first
        check_total(trial, watched.total, watched.count)
        check_registered(trial, watched.total)
        scale = loss_scale(trial, watched.count)
        with said(PARAMETERS, "backward"), own_backwards_refused(trial.model, trial.spread):
            (watched.total * scale).backward()
        reached = [name for name, parameter in trial.model.named_parameters() if parameter.grad is not None]
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(-TIMES)
        norms = [gradient_norm(parameters)]
        losses: list[tuple[float, float]] = []
        for (first, last), (total, count) in zip(parts, trial.losses_of_parts(parts), strict=True):
            if total.requires_grad:
                with said(SUM, f"backward of samples {first} to {last - 1}"):
                    (total * (TIMES * scale)).backward()
            losses.append((total.item(), count))
            norms.append(gradient_norm(parameters))
    apart = gradient_norms(parameters)
    trial.model.zero_grad()
    whole = (watched.total.item(), watched.count)
    first, rest = losses if len(losses) == 2 else (*losses, (0.0, 0.0))
    sums = Sums(
        losses=(whole[0], first[0], rest[0]),
        counts=(whole[1], first[1], rest[1]),
        tolerance=trial.tolerance,
        gradient_norm=norms[0] + norms[1],  # of the whole, and of the whole less the first part
        apart=apart,
    )
    return WholeAndParts(watched=watched, reached=reached, sums=sums, batch_norms=_norm_counts(trial.model, numbers))


def parts_of(trial: Trial) -> list[tuple[int, int]]:
    """The first and last sample of each part; of a single sample it is the sample once more."""
    number, cut = len(trial.sampled), trial.sampled.cut
    return [(0, cut), (cut, number)] if number > 1 else [(0, 1)]


def gradient_norms(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each parameter's gradient, of those that have one."""
    return {
        name: parameter.grad.norm().item() for name, parameter in parameters.items() if parameter.grad is not None
    }


def gradient_norm(parameters: Mapping[str, Tensor]) -> float:
    """The norm of all gradients together."""
    return math.hypot(*gradient_norms(parameters).values())


def _training_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The batch norms of a model that take statistics of their batch, by name."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, AnyBatchNorm) and module.training
    }


@contextmanager
def _numbers_normed(model: nn.Module) -> Iterator[list[dict[str, float]]]:
    """Record how many numbers a feature each batch norm is given, for every forward of the model within the block."""
    forwards: list[dict[str, float]] = []

    def begin(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        forwards.append({})

    def counter(name: str) -> Any:
        """Return a hook that counts the numbers a feature of a batch norm's input."""

        def count(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            numbers = arguments[0].numel() / arguments[0].shape[1]
            forwards[-1][name] = forwards[-1].get(name, 0.0) + numbers

        return count

    norms = _training_norms(model)
    handles = [model.register_forward_pre_hook(begin)] if norms else []
    handles += [module.register_forward_pre_hook(counter(name)) for name, module in norms.items()]
    try:
        yield forwards
    finally:
        for handle in handles:
            handle.remove()


def _norm_counts(model: nn.Module, forwards: Sequence[Mapping[str, float]]) -> dict[str, NormCounts]:
    """The numbers that each batch norm was given in the forwards of the whole, of the first part and of the rest."""
    if len(forwards) != 3:  # there is no batch norm, or one sample alone
        return {}
    return {
        name: NormCounts(module=module, whole=whole, first=first, rest=rest)
        for name, module in _training_norms(model).items()
        for whole, first, rest in [[numbers.get(name, 0.0) for numbers in forwards]]
    }
