"""Listed experts: equal modules in an nn.ModuleList, of which their caller's forward calls some with some tokens.

The assignment of tokens to experts is only known after the caller's code has called the experts one by one, while an
all-to-all needs all tokens at once. So the caller's forward runs twice: a rehearsal records the rows of each expert
and returns zeros; then the ranks exchange these rows, compute, and send the outputs back; the second forward returns
these outputs. The caller's assignment may depend on its inputs only, and not on another expert's output.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.order import bounds
from samestep.errors import UserError
from samestep.parallel.collectives import all_to_all
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.trace import imagine
from samestep.parallel.unused_parameters import depending
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import own_buffers
from samestep.torch_internals.tensors import version_of

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """One recorded call of an expert in a rehearsal."""

    expert: int
    rows: Tensor  # [rows, features], or [rows, ...] for experts that don't work on the last dimension alone
    leading: torch.Size  # the leading dimensions of the call's tensor, which are flattened into rows


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The number of rows from each rank for each expert of this rank, and whether any rank calls it."""

    rows: Sequence[Sequence[int]]  # [ranks][experts here]
    called: Sequence[bool]  # [experts here]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The common shapes and module of all experts of a list."""

    flat: bool  # whether they work on the last dimension of their input only
    features: torch.Size  # the shape of one input row
    output: torch.Size  # the shape of one output row
    twin: nn.Module  # a copy of one of them without values, in evaluation mode


def rows_of(input_: Tensor, *, flat: bool) -> tuple[Tensor, torch.Size]:
    """Flatten a call's input into rows; returns them and the leading dimensions. `flat`: see `Form`."""
    leading = input_.shape[:-1] if flat else input_.shape[:1]
    return input_.reshape(-1, *input_.shape[len(leading) :]), leading


class ListedExperts:
    """The experts of a list, of which this rank holds some; handles the calls of all of them.

    Messages of a layer over the ranks of the expert axis, each of which has its own tokens: an all-to-all of counts
    [ranks, experts of a rank + 1, 2], one of rows to the experts' ranks, and one of outputs back; in backward the
    last two in reverse. Every rank runs all of them in every forward, also without any row, and `depending` makes
    backward reach them: a rank that skipped one would make the others hang.
    """

    def __init__(
        self,
        name: str,
        caller: nn.Module,
        container: nn.Module,
        *,
        form: Form,
        group: dist.ProcessGroup,
        forward_context: ForwardContext,
    ) -> None:
        """`container` holds the experts, and may be the caller itself."""
        self._name = name
        self._caller = caller
        self._container = container
        self._form = form
        self._group = group
        self._forward_context = forward_context
        self._count = len(list(container.children()))
        first, last = bounds(self._count, dist.get_rank(group), dist.get_world_size(group))
        self._mine = range(first, last)
        self._inner = {number: list(container.children())[number].forward for number in self._mine}
        self._caller_forward: Callable[..., Any] = caller.forward
        self._noted: list[ExpertCall] | None = None  # recorded calls, during a rehearsal
        self._answers: dict[int, list[tuple[torch.Size, Tensor]]] | None = None  # outputs, during the second forward
        self._output_dtypes: dict[Any, torch.dtype] = {}
        for number in self._mine:
            vars(list(container.children())[number])["forward"] = self.answer(number)
        vars(caller)["forward"] = self.forward
        if container is not caller:
            _make_callable(container, self.compute)

    @property
    def mine(self) -> range:
        """The numbers of the experts that this rank holds."""
        return self._mine

    def answer(self, number: int) -> Callable[..., Tensor]:
        """Make the replacement of an expert's forward."""
        return partial(self._answer, number)

    def _answer(self, number: int, *arguments: Any, **keywords: Any) -> Tensor:
        """An expert's replaced forward: records rows in a rehearsal, otherwise returns the exchanged outputs."""
        inputs = (*arguments, *keywords.values())
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or (self._noted is None and self._answers is None):
            how = "outside of its caller" if len(inputs) == 1 else "with more than one tensor"
            raise UserError(
                f"{self._name}.{number} is an expert that ranks share out, and is called {how}; use "
                f'run.expert_plan: {{"{self._name}": whole}}'
            )
        if self._noted is not None:
            rows, leading = rows_of(inputs[0], flat=self._form.flat)
            self._noted.append(ExpertCall(expert=number, rows=rows, leading=leading))
            dtype = self._output_dtype(rows.dtype)
            return inputs[0].new_zeros((*leading, *self._form.output), dtype=dtype)
        assert self._answers is not None
        waiting = self._answers.get(number)
        if not waiting or waiting[0][0] != inputs[0].shape:
            raise UserError(
                f"{self._name}.{number} is given other tokens when its caller's forward runs again with the experts' "
                f'outputs; use run.expert_plan: {{"{self._name}": whole}}'
            )
        return waiting.pop(0)[1]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Replacement of the caller's forward: rehearsal, exchange, and the second forward."""
        # The caller's forward is run twice. Which expert gets which rows is known once its router has run, and a
        # message for each expert in turn would make ranks wait for each other that have rows for different ones. So
        # the experts give zeros at first and note their rows, all rows are exchanged in one message, and in the
        # second run the experts give the outputs, which the model's own code combines as in one process.
        calls = self.rehearse(arguments, keywords)
        inputs = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        back, answers = self._answered(calls, [input_ for input_ in inputs if input_.requires_grad])
        self._answers = answers
        try:
            output = self._caller_forward(*arguments, **keywords)
        finally:
            self._answers = None
        return _reaching(output, back)

    def rehearse(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[ExpertCall]:
        """Run the caller's forward to record its calls of experts, without changing the caller's state."""
        noted: list[ExpertCall] = []
        copies = pytree.tree_map_only(Tensor, Tensor.clone, (arguments, keywords))  # it may change them in place
        before, self._noted = self._noted, noted
        try:
            with self._forward_context.rehearsing(), _buffers_kept(self._caller):
                self._caller_forward(*copies[0], **copies[1])
        finally:
            self._noted = before
        return noted

    def _answered(
        self, calls: Sequence[ExpertCall], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, dict[int, list[tuple[torch.Size, Tensor]]]]:
        """Exchange rows and run the experts. Returns the outputs in one tensor, and by expert in order of calls."""
        ranks = dist.get_world_size(self._group)
        per_rank = self._count // ranks
        # By expert, and so by rank, as ranks hold consecutive experts.
        ordered = sorted(calls, key=lambda call: call.expert)  # stable
        # [ranks, experts + 1, (calls, rows)]; the last entry has the rows' dtype and whether they require gradients,
        # which a rank without rows needs to know.
        header = torch.zeros(ranks, per_rank + 1, 2, dtype=torch.int64)
        for call in ordered:
            header[call.expert // per_rank, call.expert % per_rank] += torch.tensor([1, len(call.rows)])
        rows = torch.cat([call.rows for call in ordered]) if ordered else None
        if rows is not None:
            header[:, -1, 0], header[:, -1, 1] = _DTYPES.index(rows.dtype) + 1, int(rows.requires_grad)
        device = next(iter(self._container.parameters())).device
        heard = all_to_all(header.to(device), self._group).cpu()
        if rows is None:
            rows = self._nothing(heard, inputs, device)
        send, receive = header[:, :-1, 1].sum(1).tolist(), heard[:, :-1, 1].sum(1).tolist()
        counts = Counts(rows=heard[:, :-1, 1].tolist(), called=(heard[:, :-1, 0].sum(0) > 0).tolist())
        made = self._run(all_to_all(rows, self._group, send, receive), counts)
        back = all_to_all(made, self._group, receive, send)
        answers: dict[int, list[tuple[torch.Size, Tensor]]] = {}
        for call, part in zip(ordered, back.split([len(call.rows) for call in ordered]), strict=True):
            shape = torch.Size((*call.leading, *call.rows.shape[1:]))
            answers.setdefault(call.expert, []).append((shape, part.reshape(*call.leading, *back.shape[1:])))
        return back, answers

    def _nothing(self, heard: Tensor, inputs: Sequence[Tensor], device: torch.device) -> Tensor:
        """An empty tensor of rows, with the dtype and the gradient requirement of the other ranks' rows."""
        dtype = _DTYPES[max(int(heard[:, -1, 0].max()) - 1, 0)]
        rows = torch.zeros((0, *self._form.features), dtype=dtype, device=device)
        if not (torch.is_grad_enabled() and heard[:, -1, 1].any()):
            return rows
        return depending(rows, inputs) if inputs else rows.requires_grad_()

    def _run(self, rows: Tensor, counts: Counts) -> Tensor:
        """Call `compute` through the container, so that FSDP2 gathers the experts' parameters."""
        return self.compute(rows, counts) if self._container is self._caller else self._container(rows, counts)

    def compute(self, rows: Tensor, counts: Counts) -> Tensor:
        """Apply this rank's experts to the rows of all ranks; each expert is called once with all of its rows."""
        pieces = rows.split([count for of_rank in counts.rows for count in of_rank])
        experts, ranks = len(self._mine), len(counts.rows)
        made: dict[tuple[int, int], Tensor] = {}
        for own, number in enumerate(self._mine):
            if counts.called[own]:
                # [rows of a rank, features] of every rank for this expert.
                own_rows = [pieces[rank * experts + own] for rank in range(ranks)]
                parts = self._inner[number](torch.cat(own_rows)).split([len(part) for part in own_rows])
                made |= {(rank, own): part for rank, part in enumerate(parts)}
        outputs = [made[key] for rank in range(ranks) for own in range(experts) if (key := (rank, own)) in made]
        if outputs:
            output = torch.cat(outputs)
        else:
            output = rows.new_zeros((0, *self._form.output), dtype=self._output_dtype(rows.dtype))
        if len(rows) or not torch.is_grad_enabled():
            return output
        trained = [p for number in self._mine for p in self._expert(number).parameters() if p.requires_grad]
        return depending(output, [tensor for tensor in [rows, *trained] if tensor.requires_grad])

    def _expert(self, number: int) -> nn.Module:
        return list(self._container.children())[number]

    def _output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of an expert's output for rows of a dtype."""
        device = next(self._container.parameters()).device
        autocast = torch.is_autocast_enabled(device.type)
        key = dtype, autocast
        if key not in self._output_dtypes:
            # FSDP2 gathers parameters in the dtype of the activations; autocast casts in each product.
            twin = self._form.twin if autocast else deepcopy(self._form.twin).to(dtype)
            row = torch.empty((1, *self._form.features), dtype=dtype, device=device)
            self._output_dtypes[key] = imagine(twin, (row,), {}).dtype
        return self._output_dtypes[key]


def _make_callable(container: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a list of modules a forward, so that it can be an FSDP unit."""
    kind = type(container)
    container.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, rows, counts: forward(rows, counts)})


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers at the end of the block."""
    before = [
        (owner, key, buffer, version_of(buffer), buffer.clone())
        for owner in module.modules()
        for key, buffer in own_buffers(owner).items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, key, buffer, version, value in before:
                own_buffers(owner)[key] = buffer
                if version_of(buffer) != version:
                    buffer.copy_(value)


def _reaching(output: Any, back: Tensor) -> Any:
    """Make the output depend on the exchanged outputs, so that backward runs the exchange on every rank."""
    if not back.requires_grad:
        return output
    leaves, form = pytree.tree_flatten(output)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaves[number] = depending(leaf, [back])
            return pytree.tree_unflatten(leaves, form)
    return output
