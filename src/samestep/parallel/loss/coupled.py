"""Losses that couple the samples of a batch: each call of the loss sees the rows of all ranks and micro-batches.

The loss of a step is the sum over ranks and micro-batches of loss(x, G), where x is the output of the micro-batch and
G holds the rows that all of them have gathered, themselves functions of the outputs. The gradient of an output is
then

    d loss(x, G) / dx  +  sum over all calls of d loss / dG, the rows of this micro-batch, times dG / dx

The second term is taken in here, from the last `gather` to the first, with messages between the ranks outside of
autograd. What is left is a backward of each micro-batch by itself.

Where a rank has several micro-batches, a loss needs the outputs of all of them before the first backward. They are
then computed once without graphs, the gradients of the outputs are taken, and each micro-batch's forward is run again
with a graph, whose backward begins with these gradients (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch
Size under Memory Limited Setup", section 3.2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.data.loader import MicroBatch
from samestep.data.nests import map_tensors, tensors_in
from samestep.data.types import Batch
from samestep.errors import UserError
from samestep.tasks.base import sum_and_count
from samestep.tasks.losses import Gather

CoupledLoss = Callable[..., tuple[Tensor, Tensor | int]]  # (output, batch, gather=...)


class _Unknown(BaseException):
    """Raised in a call of the loss at the first `gather` whose rows are not exchanged yet; holds its tensors.

    A BaseException, since a loss may catch any Exception.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """The rows of the global batch that the samples of a call are."""

    numbers: Tensor  # [samples of the call] int64, on the CPU
    counted: bool = True  # False: another rank has these samples too, and gathers them


@dataclass(frozen=True)
class _Kind:
    """The shape of a row and the dtype of a gathered tensor, which must be the same in all calls."""

    shape: tuple[int, ...]  # of a row
    dtype: torch.dtype


class _Answers(Gather):
    """The `gather` of one call of the loss: returns rows that are already exchanged, otherwise raises `_Unknown`."""

    def __init__(self, answers: "Sequence[_Gathered]", rows: CallRows) -> None:
        self._known = answers
        self._rows = rows
        self.given: list[list[Tensor]] = []  # by `gather`: this call's own tensors
        self.leaves: list[list[Tensor]] = []  # and those that it got in their place

    def __call__(self, nest: Any) -> Any:
        """Gather the tensors of all calls of the loss; raises `_Unknown` if they are not exchanged yet.

        `nest`: tensors [samples of the call, ...]. Returns it with [samples of the batch, ...], as leaves of this
        call's own graph, so that their gradients can be computed for this call alone.
        """
        tensors: list[Tensor] = tensors_in(nest)
        samples = len(self._rows.numbers)
        for tensor in tensors:
            if tensor.ndim == 0 or len(tensor) != samples:
                raise UserError(
                    f"gather was given a tensor of shape {list(tensor.shape)} for {samples} samples; use one row a "
                    f"sample, such as .view({samples}, -1), and leave out what has none, such as a temperature"
                )
        number = len(self.given)
        if number == len(self._known):
            raise _Unknown(tensors)
        leaves = self._known[number].leaves()
        self.given.append(tensors)
        self.leaves.append(leaves)
        remaining = iter(leaves)
        return map_tensors(lambda _: next(remaining), nest)

    def rows(self, tensor: Tensor) -> Tensor:
        return self._rows.numbers.to(tensor.device)


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """The tensors of all calls at one `gather`, in the order of the global batch."""

    values: Sequence[Tensor]  # [samples of the batch, ...] each
    needs_gradient: Sequence[bool]  # whether any call's tensor requires a gradient

    def leaves(self) -> list[Tensor]:
        """Copies of the values as leaves of a call's graph."""
        return [
            value.clone().requires_grad_(needed)
            for value, needed in zip(self.values, self.needs_gradient, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A completed call of the loss."""

    loss_sum: Tensor
    count: Tensor | int
    gather: _Answers
    counted: bool
    ends: list[Tensor]  # the tensors that it gathered, from which backward starts as well as from the loss
    gradients: list[Tensor]  # their gradients

    def roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors from which backward starts, and their gradients."""
        roots, gradients = list(self.ends), list(self.gradients)
        if self.loss_sum.requires_grad:
            roots.append(self.loss_sum)
            gradients.append(torch.ones_like(self.loss_sum))
        return roots, gradients


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch, and the gradients of its output."""

    loss_sum: Tensor
    count: Tensor | int
    gradients: Sequence[Tensor | None]  # of the output's tensors, in the order of `tensors_in`

    def of(self, output: Any) -> tuple[Tensor, Tensor | int]:
        """The sum and count, with a backward that passes the gradients to a recomputed output."""
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors_in(output), self.gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        return _begin(self.loss_sum, [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]), self.count


class Coupling:
    """Calls a loss for the micro-batches of a step with the rows of the whole batch. The same calls on every rank.

    How many times a loss is called: with k `gather`s, k + 1 times for each micro-batch. Call i ends at gather i + 1,
    whose rows are then exchanged between all ranks; the last call has all of them. All ranks do the same number of
    rounds, since each round agrees on what is gathered (`_agreed`) before it exchanges it.
    """

    def __init__(self, loss: CoupledLoss, group: dist.ProcessGroup | None) -> None:
        """`group`: the ranks that have the other samples; None: this process has all of them."""
        self._loss = loss
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None

    def of_one(self, output: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | int]:
        """Compute the loss of a rank's only micro-batch, whose output has its graph."""
        return self.of_output(output, micro_batch.batch, rows_of(micro_batch))

    def of_output(self, output: Any, batch: Batch, rows: CallRows) -> tuple[Tensor, Tensor | int]:
        """Compute the loss of one output with its graph, for the given rows of the global batch."""
        (call,) = self._calls([output], [batch], [rows])
        roots, gradients = call.roots()
        return _begin(call.loss_sum, roots, gradients), call.count

    def of_all(self, outputs: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> list[MicroBatchLoss]:
        """Compute the losses of a rank's micro-batches, and the gradients of their outputs, which have no graphs."""
        rows = [rows_of(micro_batch) for micro_batch in micro_batches]
        return self.of_parts(outputs, [micro_batch.batch for micro_batch in micro_batches], rows)

    def of_parts(
        self, outputs: Sequence[Any], batches: Sequence[Batch], rows: Sequence[CallRows]
    ) -> list[MicroBatchLoss]:
        """As `of_all`, for parts of a batch; `rows`: of the global batch, for each part."""
        with torch.enable_grad():
            apart = [map_tensors(_leaf, output) for output in outputs]
            calls = self._calls([map_tensors(_changeable, output) for output in apart], batches, rows)
            return [
                MicroBatchLoss(
                    loss_sum=call.loss_sum.detach(),
                    count=call.count,
                    gradients=_gradients(*call.roots(), tensors_in(output), keep=False),
                )
                for call, output in zip(calls, apart, strict=True)
            ]

    def _calls(self, outputs: Sequence[Any], batches: Sequence[Batch], rows: Sequence[CallRows]) -> list[_Call]:
        """Call the loss for each micro-batch until all rows are exchanged, then compute the rows' gradients."""
        order = self._order(rows)
        answers: list[_Gathered] = []
        # In each round every micro-batch's call proceeds to the first gather whose rows are not exchanged yet.
        while True:
            calls: list[_Call] = []
            to_gather: list[list[Tensor]] = []
            for output, batch, own_rows in zip(outputs, batches, rows, strict=True):
                gather = _Answers(answers, own_rows)
                try:
                    loss_sum, count = sum_and_count(self._loss(output, batch, gather=gather))
                except _Unknown as unknown:
                    to_gather.append(unknown.tensors)
                    continue
                calls.append(
                    _Call(
                        loss_sum=loss_sum, count=count, gather=gather, counted=own_rows.counted, ends=[], gradients=[]
                    )
                )
            kinds = self._agreed(to_gather, calls=len(outputs))
            if kinds is None:
                break
            answers.append(self._gathered(to_gather, rows, kinds, order))
        # From the last gather to the first, since the gradient of the tensors of gather i may pass through all later
        # ones.
        for number in reversed(range(len(answers))):
            self._hand_back(number, answers[number], calls, rows)
        return calls

    def _agreed(self, to_gather: Sequence[Sequence[Tensor]], *, calls: int) -> list[tuple[_Kind, bool]] | None:
        """Agree with all ranks on the tensors to gather next, and whether each needs a gradient; None: no more."""
        wants: set[tuple[_Kind, ...] | None] = {
            tuple(_Kind(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors) for tensors in to_gather
        }
        if len(to_gather) < calls:
            # Some call has completed without a further gather.
            wants.add(None)
        needed = [
            any(tensors) for tensors in zip(*([t.requires_grad for t in some] for some in to_gather), strict=False)
        ]
        everyone = self._from_all((wants, needed))
        kinds_wanted = set().union(*(theirs for theirs, _ in everyone))
        if len(kinds_wanted) > 1:
            kinds = sorted("nothing more" if want is None else _in_words(want) for want in kinds_wanted)
            raise UserError(
                f"the calls of the loss in one step gather different things ({' and '.join(kinds)}), for each its "
                "own samples; gather tensors of the same kinds in every call"
            )
        (want,) = kinds_wanted
        if want is None:
            return None
        return [(kind, any(flags[number] for _, flags in everyone)) for number, kind in enumerate(want)]

    def _order(self, rows: Sequence[CallRows]) -> Tensor:
        """The permutation of the result of `_all_rows` into the order of the global batch. [samples of the batch]"""
        numbers_here = torch.cat(
            [of_call.numbers for of_call in rows if of_call.counted] or [torch.zeros(0, dtype=torch.int64)]
        )
        self._counts, numbers = [], []
        for theirs in self._from_all(numbers_here.tolist()):
            self._counts.append(len(theirs))
            numbers += theirs
        return torch.tensor(numbers, dtype=torch.int64).argsort()

    def _gathered(
        self,
        to_gather: Sequence[Sequence[Tensor]],
        rows: Sequence[CallRows],
        kinds: Sequence[tuple[_Kind, bool]],
        order: Tensor,
    ) -> _Gathered:
        """Exchange the tensors of all calls: one tensor [samples of the batch, ...] for each that is gathered."""
        values: list[Tensor] = []
        for number in range(len(kinds)):
            tensors = [some[number].detach() for some in to_gather]
            counted = [tensor for tensor, of_call in zip(tensors, rows, strict=True) if of_call.counted]
            together = torch.cat(counted) if counted else tensors[0][:0]
            values.append(self._all_rows(together)[order.to(together.device)])
        return _Gathered(values=values, needs_gradient=[needed for _, needed in kinds])

    def _hand_back(self, number: int, gathered: _Gathered, calls: Sequence[_Call], rows: Sequence[CallRows]) -> None:
        """Sum the gradients of gathered rows over all calls and ranks, and give each call those of its own rows."""
        for index, value in enumerate(gathered.values):
            if not gathered.needs_gradient[index]:
                continue
            # [samples of the batch, ...]: dL / d(gathered rows), summed over the calls of this rank and then over
            # ranks.
            total = torch.zeros_like(value)
            for call in calls:
                if call.counted:
                    leaf = call.gather.leaves[number][index]
                    (gradient,) = _gradients(*call.roots(), [leaf], keep=True)
                    total += 0 if gradient is None else gradient
            if self._group is not None:
                dist.all_reduce(total, group=self._group)
            for call, of_call in zip(calls, rows, strict=True):
                tensor = call.gather.given[number][index]
                if call.counted and tensor.requires_grad:
                    call.ends.append(tensor)
                    # This call's rows of the sum.
                    call.gradients.append(total[of_call.numbers.to(total.device)])

    def _all_rows(self, rows_here: Tensor) -> Tensor:
        """All-gather rows, in the order of ranks."""
        if self._group is None:
            return rows_here
        real = torch.view_as_real(rows_here) if rows_here.is_complex() else rows_here
        # all_gather wants parts of one length; ranks may have unlike numbers of samples.
        padded = real.new_zeros(max(self._counts), *real.shape[1:])
        padded[: len(real)] = real
        of_ranks = [torch.empty_like(padded) for _ in self._counts]
        dist.all_gather(of_ranks, padded, group=self._group)
        rows = torch.cat([theirs[:count] for theirs, count in zip(of_ranks, self._counts, strict=True)])
        return torch.view_as_complex(rows) if rows_here.is_complex() else rows

    def _from_all(self, value: Any) -> list[Any]:
        """All-gather any picklable object, in the order of ranks."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone


def rows_of(micro_batch: MicroBatch) -> CallRows:
    """The rows of the global batch that a micro-batch's samples are."""
    moment = micro_batch.moment
    numbers = torch.arange(len(moment.samples)) if moment.rows is None else moment.rows
    return CallRows(numbers=numbers, counted=not moment.zero_weight)


def _in_words(kinds: Sequence[_Kind]) -> str:
    """Kinds of tensors for a message, such as "[samples, 512] of float32"."""
    described = (f"[samples{''.join(f', {size}' for size in kind.shape)}] of {kind.dtype}" for kind in kinds)
    return ", ".join(described).replace("torch.", "") or "no tensor"


def _leaf(tensor: Tensor) -> Tensor:
    """A detached tensor that requires a gradient, if its dtype allows one."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _changeable(tensor: Tensor) -> Tensor:
    """A copy of a leaf, since a loss may change its arguments in place, which autograd forbids for leaves."""
    return tensor.clone() if tensor.requires_grad else tensor


def _gradients(
    roots: Sequence[Tensor], root_gradients: Sequence[Tensor], of: Sequence[Tensor], *, keep: bool
) -> list[Tensor | None]:
    """The gradients of some tensors; None where a root does not depend on one. `keep`: the graph is needed again."""
    sources = [tensor for tensor in of if tensor.requires_grad]
    gradients: list[Tensor | None] = [None] * len(sources)
    if roots and sources:
        gradients = list(torch.autograd.grad(roots, sources, root_gradients, retain_graph=keep, allow_unused=True))
    remaining = iter(gradients)
    return [next(remaining) if tensor.requires_grad else None for tensor in of]


def _begin(value: Tensor, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A value whose backward passes each root its gradient, times the value's own gradient."""
    if not roots:
        return value
    return _Begin.apply(value.detach(), gradients, *roots)  # pyright: ignore[reportReturnType]


class _Begin(torch.autograd.Function):
    """Forward: the value. Backward: for each root its known gradient times that of the value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *roots: Tensor) -> Tensor:  # pyright: ignore
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return None, None, *((gradient * of_root).to(of_root.dtype) for of_root in ctx.gradients)
