"""The part of the contract on which every split rests: the loss of a batch is the sum of the losses of its parts.

12 samples are taken at once and as 5 and 7, forward and backward, in float64. Where the sum, the count or the
gradient differ, the samples are compared on their way through collate, the model's modules and the loss, so that the
message names the code that couples them. The gradient shows what the loss does not: a hook that scales gradients by
the whole batch's, and samples that are coupled in a branch whose weights begin at zero.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.contract.errors import ContractError, line_of, said
from samestep.contract.trial import Trial

SUM = "sum of parts"


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Losses and counts of the whole batch, its first part and the rest, and the gradient error by parameter."""

    losses: tuple[float, float, float]
    counts: tuple[float, float, float]
    tolerance: float
    gradient_norm: float  # of the parts
    apart: Mapping[str, float]  # parameter -> norm of (gradient of the whole batch - gradients of the parts)

    @property
    def counts_add_up(self) -> bool:
        """Whether the count of the whole batch is the sum of its parts' counts."""
        whole, first, rest = self.counts
        return abs(whole - first - rest) <= 1e-6 * abs(whole)

    @property
    def losses_add_up(self) -> bool:
        """Whether the loss of the whole batch is the sum of its parts' losses, up to rounding."""
        whole, first, rest = self.losses
        # Written so that NaN does not pass.
        return abs(whole - first - rest) <= self.tolerance * max(abs(first) + abs(rest), abs(whole))

    @property
    def gradients_add_up(self) -> bool:
        """Whether gradients add up. Non-finite ones pass: they can't be compared, and a training stops at them."""
        found, norm = math.hypot(*self.apart.values()), self.gradient_norm
        return not math.isfinite(found + norm) or found <= 10 * self.tolerance * norm


def check_sum_of_parts(trial: Trial) -> None:
    """Raise ContractError where a batch's loss, count or gradient isn't the sum of its parts', and say why."""
    number, cut = len(trial.sampled), trial.sampled.cut
    if number < 2:
        return
    _check_batch_norms(trial, number, cut)
    _check_sums(trial)
    for sampled in trial.sampled.shorter_in_others():
        with trial.of(sampled):
            _check_sums(trial)


def _check_sums(trial: Trial) -> None:
    """Raise ContractError for a loss that is no sum over samples, saying what couples them."""
    number, cut = len(trial.sampled), trial.sampled.cut
    with trial.without_batch_statistics():
        sums = _in_float64(trial, number, cut)
        if sums.counts_add_up and sums.losses_add_up and sums.gradients_add_up:
            return
        if sums.counts_add_up and (coupled := _coupled(trial, sums, number, cut)) is not None:
            raise ContractError(SUM, coupled)
        if sums.counts_add_up and sums.losses_add_up:
            raise ContractError(SUM, _backward_at_fault(trial, sums, number, cut))
    raise ContractError(SUM, _loss_at_fault(trial, sums, number, cut))


def _check_batch_norms(trial: Trial, number: int, cut: int) -> None:
    """Raise ContractError where a batch norm includes padding in its statistics, which differs between groups."""
    counts: dict[str, list[float]] = {}
    norms = {
        name: module
        for name, module in trial.model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    }
    if not norms:
        return

    def counter(name: str) -> Any:
        """Return a hook that counts the elements per feature of a batch norm's input."""

        def count(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            given = arguments[0]
            counts[name][-1] += given.numel() / given.shape[1]

        return count

    without_graph = trial.without_graph  # found out by a forward, which is not to be counted
    handles = [module.register_forward_pre_hook(counter(name)) for name, module in norms.items()]
    try:
        for first, last in ((0, number), (0, cut), (cut, number)):
            for name in norms:
                counts.setdefault(name, []).append(0)
            with without_graph():
                trial.output(first, last)
    finally:
        for handle in handles:
            handle.remove()
    for name, (whole, first, rest) in counts.items():
        if whole != first + rest and not whole == first == rest:  # the latter: it takes no samples
            raise ContractError(
                SUM,
                f"{name or 'the model'} ({type(norms[name]).__name__}) takes its statistics over {whole:g} numbers a "
                f"feature for {number} samples, and over {first:g} + {rest:g} for {cut} and {number - cut} of them: "
                "padding counts there, and is as long as the longest sample of a group; pad all samples to one "
                f"length, or use layer norm{line_of(trial.task.collate)}",
            )


def _in_float64(trial: Trial, number: int, cut: int) -> Sums:
    """The sums in float64; in float32 where the model has operators without float64."""
    try:
        trial.widen()
        return _sums(trial, number, cut)
    except ContractError:
        trial.narrow()
        return _sums(trial, number, cut)


def _sums(trial: Trial, number: int, cut: int) -> Sums:
    """Compute loss, count and gradients of two parts of a batch and of the whole, in float64.

    The whole's gradient is taken with the opposite sign into what the parts have left: what remains (`apart`) is the
    difference, parameter by parameter.
    """
    parameters = {name: each for name, each in trial.model.named_parameters() if each.requires_grad}
    trial.model.zero_grad()
    norms: list[float] = []
    found: list[tuple[float, float]] = []
    # The gradient of the whole batch is subtracted from the accumulated gradients of the parts, which leaves zero.
    parts = ((0, cut), (cut, number))
    losses = chain(trial.losses_of_parts(parts), trial.losses_of_parts([(0, number)]))
    for (first, last), sign, (total, count) in zip((*parts, (0, number)), (1, 1, -1), losses, strict=True):
        if total.requires_grad:
            with said(SUM, f"backward of samples {first} to {last - 1}"):
                (sign * total).backward()
        found.append((total.item(), count))
        norms.append(math.hypot(*_norms(parameters).values()))
    apart = _norms(parameters)
    trial.model.zero_grad()
    (first, rest, whole), size = found, norms[0] + norms[1]
    return Sums(
        losses=(whole[0], first[0], rest[0]),
        counts=(whole[1], first[1], rest[1]),
        tolerance=trial.tolerance,
        gradient_norm=size,
        apart=apart,
    )


def _norms(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: each.grad.norm().item() for name, each in parameters.items() if each.grad is not None}


def _backward_at_fault(trial: Trial, sums: Sums, number: int, cut: int) -> str:
    """Describe a backward that couples samples, given that losses add up and no forward couples them."""
    worst = max(sums.apart, key=lambda name: sums.apart[name])
    hook = next(_gradient_hooks(trial.model), None)
    forward = line_of(type(trial.model).forward)
    cause = hook or f"a hook, an autograd function or a branch that begins at zero{forward}"
    return (
        f"the gradient of {number} samples is not the sum of those of {cut} and {number - cut} of them, although the "
        f"losses add up ({worst} differs most): {cause} couples the samples of a batch; a rank has only some of "
        "them, so compute each sample's gradient from that sample alone, and clip with recipe.clip"
    )


def _gradient_hooks(model: nn.Module) -> Iterator[str]:
    """The hooks on the gradients of parameters and modules, and where they are written."""
    for name, parameter in model.named_parameters():
        for hook in (parameter._backward_hooks or {}).values():
            yield f"the hook on the gradient of {name}{line_of(hook)}"
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            yield f"the backward hook of {name or 'the model'} ({type(module).__name__}){line_of(hook)}"


def _loss_at_fault(trial: Trial, sums: Sums, number: int, cut: int) -> str:
    """Describe what is wrong with a loss whose parts don't add up: a mean, a wrong count, or a coupling."""
    where = line_of(trial.loss_function)
    whole, first, rest = sums.losses
    parts = f"{cut} and {number - cut} of them"
    if not sums.counts_add_up:
        a, b, c = sums.counts
        return (
            f"the loss counts {a:g} terms for {number} samples, and {b:g} + {c:g} for {parts}; give the sum over the "
            f"batch's terms and how many terms those are, never a mean with a count of its own"
            f"{', and of what is gathered the terms of this call alone' * trial.coupled}{where}"
        )
    means = [loss / count if count else loss for loss, count in zip(sums.losses, sums.counts, strict=True)]
    weighted = (first * sums.counts[1] + rest * sums.counts[2]) / sums.counts[0]
    if abs(whole - weighted) <= 1e-3 * abs(whole):
        return (
            f"the loss is a mean: {whole:.6g} for {number} samples, {first:.6g} and {rest:.6g} for {parts}; give the "
            f'sum, with reduction="sum", and the count with it{where}'
        )
    if trial.coupled:
        return (
            f"the loss gathers the rows of all samples, and its sum over {number} of them is {whole:.6g}, while "
            f"{parts} give {first:.6g} + {rest:.6g}; hold each sample of the call against gathered rows alone, use "
            f"gather.rows(output) for where it stands among them, and give the terms of the call's samples{where}"
        )
    return (
        f"the loss couples the samples of a batch: its sum over {number} samples is {whole:.6g}, and {parts} give "
        f"{first:.6g} + {rest:.6g} (means {means[0]:.6g}, {means[1]:.6g} and {means[2]:.6g}); a rank has only some "
        "of a batch's samples, so compute each sample's term from that sample alone"
        f"{', with padding masked' * _padded(trial, number, cut)}, or write loss(self, output, batch, gather), where "
        f"gather(output) has the rows of the whole batch{where}"
    )


def _padded(trial: Trial, number: int, cut: int) -> bool:
    """Whether collate gives samples of another shape in the larger group."""
    together, apart = (_tensors(tuple(trial.sampled.batch(0, last))) for last in (number, cut))
    return any(a.shape[1:] != b.shape[1:] for a, b in zip(together, apart, strict=False))


def _coupled(trial: Trial, sums: Sums, number: int, cut: int) -> str | None:
    """Describe what couples samples before the loss; None if each sample's output is the same in both groups."""
    together, apart = trial.sampled.batch(0, number), trial.sampled.batch(0, cut)
    others = f"with {number - 1} others than with {cut - 1}"
    indices = trial.sampled.indices
    if (row := _differs(tuple(together), tuple(apart), number, cut, trial.tolerance)) is not None:
        return (
            f"collate gives other values for sample {indices[row]} {others}: what it makes of a "
            f"sample must not depend on the other samples of the batch, padding apart{line_of(trial.task.collate)}"
        )
    with trial.without_graph():
        whole, part = _ended(trial, 0, number), _ended(trial, 0, cut)
    same_output = _differs(whole[-1].given, part[-1].given, number, cut, trial.tolerance) is None
    if same_output and not sums.losses_add_up:
        return None
    padded = ", and padding must be masked, or all samples padded to one length" * _padded(trial, number, cut)
    for mine, theirs in zip(whole, part, strict=False):
        row = _differs(mine.given, theirs.given, number, cut, trial.tolerance)
        # A module whose inputs already differ is not the cause.
        innocent = row is None or _differs(mine.taken, theirs.taken, number, cut, trial.tolerance) is not None
        if mine.name != theirs.name or not innocent:
            return (
                f"{mine.name or 'the model'} ({type(mine.module).__name__}) couples the samples of a batch: it gives "
                f"another output for sample {indices[row or 0]} {others}; a rank has only some of a "
                f"batch's samples, so a sample's output must be computed from that sample alone{padded}"
                f"{line_of(type(mine.module).forward)}"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """One finished call of a module: its input and output tensors."""

    name: str
    module: nn.Module
    taken: list[Tensor]
    given: list[Tensor]


def _ended(trial: Trial, first: int, last: int) -> list[_Ended]:
    """Record the module calls of a forward in the order in which they finish: inner ones first, the model's last."""
    found: list[_Ended] = []

    def note(name: str) -> Any:
        """Return a forward hook that records a module's inputs and outputs."""

        def hook(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            taken = [each.detach().clone() for each in _tensors((arguments, keywords))]
            given = [each.detach().clone() for each in _tensors(output)]
            found.append(_Ended(name=name, module=module, taken=taken, given=given))

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True) for name, module in trial.model.named_modules()
    ]
    try:
        trial.output(first, last)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _differs(together: Any, apart: Any, number: int, cut: int, tolerance: float) -> int | None:
    """Return the first sample whose rows differ between the part and the whole batch; None if none does."""
    for whole, part in zip(_tensors(together), _tensors(apart), strict=False):
        mine, theirs = _rows(whole, number), _rows(part, cut)
        if mine is None or theirs is None or mine.ndim != theirs.ndim:
            continue
        # The larger group may have more padding: the common rows are compared.
        common = [min(a, b) for a, b in zip(mine.shape[1:], theirs.shape[1:], strict=True)]
        mine, theirs = (_front(each[:cut], common).double().nan_to_num() for each in (mine, theirs))
        if mine.numel() == 0:
            continue
        apart_by = (mine - theirs).abs().amax(1)  # [samples of the part]
        worst = apart_by > tolerance * max(theirs.abs().max().item(), 1e-12)
        if bool(worst.any()):
            return int(worst.nonzero()[0])
    return None


def _tensors(nest: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(dict(nest) if isinstance(nest, Mapping) else nest):
        if isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif isinstance(leaf, Tensor) and not leaf.is_complex():
            yield leaf


def _rows(tensor: Tensor, samples: int) -> Tensor | None:
    """Reshape a tensor to [samples, ...]; None if it doesn't have one row for each sample."""
    if tensor.ndim == 0 or tensor.shape[0] % samples or tensor.shape[0] == 0:
        return None
    return tensor.reshape(samples, -1, *tensor.shape[1:])


def _front(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Crop each dimension to `sizes`, the common size of two tensors with different padding; [samples, numbers]."""
    for dim, size in enumerate(sizes, start=1):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.reshape(len(tensor), -1)
