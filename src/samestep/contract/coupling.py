"""The part of the contract on which every split rests: the loss of a batch is the sum of the losses of its parts.

Where the sum, the count or the gradient of `parts` differ, the samples are compared on their way through collate, the
model's modules and the loss, so that the message names the code that couples them. The gradient shows what the loss
does not: a hook that scales gradients by the whole batch's, and samples that are coupled in a branch whose weights
begin at zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from samestep.contract.decisions import check_decisions
from samestep.contract.errors import ContractError, line_of
from samestep.contract.parts import SUM, NormCounts, Sums, WholeAndParts, whole_and_parts
from samestep.contract.trial import Trial
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import backward_hooks
from samestep.torch_internals.tensors import gradient_hooks


def check_sum_of_parts(trial: Trial, taken: WholeAndParts) -> None:
    """Raise ContractError where a batch's loss, count or gradient isn't the sum of its parts', and say why."""
    if len(trial.sampled) < 2:
        return
    _check_batch_norms(trial, taken.batch_norms)
    _check_sums(trial, taken)
    for sampled in trial.sampled.shorter_in_others():
        with trial.of(sampled):
            _check_sums(trial, whole_and_parts(trial, gradient_calls=False))


def _check_sums(trial: Trial, taken: WholeAndParts) -> None:
    """Raise ContractError for a loss that is no sum over samples, saying what couples them."""
    if (sums := taken.sums).add_up:
        check_decisions(trial, sums, taken.watched.asking)
        return
    number, cut = len(trial.sampled), trial.sampled.cut
    with trial.without_batch_statistics():
        if sums.counts_add_up and (coupled := _coupled(trial, sums, number, cut)) is not None:
            raise ContractError(SUM, coupled)
        if sums.counts_add_up and sums.losses_add_up:
            raise ContractError(SUM, _backward_at_fault(trial, sums, number, cut))
    raise ContractError(SUM, _loss_at_fault(trial, sums, number, cut))


def _check_batch_norms(trial: Trial, norms: Mapping[str, NormCounts]) -> None:
    """Raise ContractError where a batch norm includes padding in its statistics, which differs between groups."""
    number, cut = len(trial.sampled), trial.sampled.cut
    for name, counts in norms.items():
        if not counts.add_up:
            raise ContractError(
                SUM,
                f"{name or 'the model'} ({type(counts.module).__name__}) takes its statistics over {counts.whole:g} "
                f"numbers a feature for {number} samples, and over {counts.first:g} + {counts.rest:g} for {cut} and "
                f"{number - cut} of them: padding counts there, and is as long as the longest sample of a group; pad "
                f"all samples to one length, or use layer norm{line_of(trial.task.collate)}",
            )


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
        for hook in gradient_hooks(parameter):
            yield f"the hook on the gradient of {name}{line_of(hook)}"
    for name, module in model.named_modules():
        for hook in backward_hooks(module):
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
    for whole_end, part_end in zip(whole, part, strict=False):
        row = _differs(whole_end.given, part_end.given, number, cut, trial.tolerance)
        # A module whose inputs already differ is not the cause.
        innocent = row is None or _differs(whole_end.taken, part_end.taken, number, cut, trial.tolerance) is not None
        if whole_end.name != part_end.name or not innocent:
            return (
                f"{whole_end.name or 'the model'} ({type(whole_end.module).__name__}) couples the samples of a "
                f"batch: it gives another output for sample {indices[row or 0]} {others}; a rank has only some of a "
                f"batch's samples, so a sample's output must be computed from that sample alone{padded}"
                f"{line_of(type(whole_end.module).forward)}"
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
    ended: list[_Ended] = []

    def note(name: str) -> Any:
        """Return a forward hook that records a module's inputs and outputs."""

        def hook(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            taken = [tensor.detach().clone() for tensor in _tensors((arguments, keywords))]
            outputs = [tensor.detach().clone() for tensor in _tensors(output)]
            ended.append(_Ended(name=name, module=module, taken=taken, given=outputs))

        return hook

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True) for name, module in trial.model.named_modules()
    ]
    try:
        trial.output(first, last)
    finally:
        for handle in handles:
            handle.remove()
    return ended


def _differs(together: Any, apart: Any, number: int, cut: int, tolerance: float) -> int | None:
    """Return the first sample whose rows differ between the part and the whole batch; None if none does."""
    for whole, part in zip(_tensors(together), _tensors(apart), strict=False):
        whole_rows, part_rows = _rows(whole, number), _rows(part, cut)
        if whole_rows is None or part_rows is None or whole_rows.ndim != part_rows.ndim:
            continue
        # The larger group may have more padding: the common rows are compared.
        common = [min(a, b) for a, b in zip(whole_rows.shape[1:], part_rows.shape[1:], strict=True)]
        whole_rows, part_rows = (_front(rows[:cut], common).double().nan_to_num() for rows in (whole_rows, part_rows))
        if whole_rows.numel() == 0:
            continue
        apart_by = (whole_rows - part_rows).abs().amax(1)  # [samples of the part]
        worst = apart_by > tolerance * max(part_rows.abs().max().item(), 1e-12)
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
