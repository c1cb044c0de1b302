"""Compares the sliced model's output and gradients for an example with the whole one's; finds the module at fault.

Numbers are compared by `near`, in the model's dtype: a wrong slice changes the first digits of outputs, a correct one
only the last.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.comm.shared_memory.process_group import KernelGroup
from samestep.data.nests import tensors_in
from samestep.data.order import bounds
from samestep.errors import first_line
from samestep.layout import Layout
from samestep.parallel.attributes import in_mode
from samestep.parallel.calls import Trace
from samestep.parallel.layout_failure import failing_module, foreign_line
from samestep.parallel.loss.vocabulary import Vocabulary, agree, near
from samestep.parallel.sharding import ShardTable
from samestep.parallel.tensor.gradients import Digests, differing, digests_of, keeping_graph
from samestep.parallel.tensor.modules import pattern_of
from samestep.parallel.tensor.plan import TensorPlan
from samestep.parallel.tensor.sequence_parallel import Stream
from samestep.parallel.valueless import has_values
from samestep.tasks.base import call
from samestep.torch_internals import pytree
from samestep.torch_internals.groups import FakeWork, all_groups
from samestep.torch_internals.operators import TorchDispatchMode, schema


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A digest of a module's output: for each of its tensors, one number per index of dimension 1."""

    name: str
    tensors: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Output:
    """All tensors of numbers in a model's output, and a mark of each module's output, in the order of their ends."""

    numbers: Sequence[Tensor]
    marks: Sequence[Mark]
    in_nests: bool  # whether PyTorch's pytree finds the tensors


@dataclass(frozen=True, kw_only=True)
class SliceDeparture:
    """A difference of the sliced model's output from the whole model's, or a failure of its forward."""

    sentence: str  # for a user whose plan it was
    why: str  # what the module at fault does, such as "gives another output than whole"
    to_leave_whole: Sequence[str]  # modules; empty where this rank can't tell
    of_ours: bool  # whether the user gave none of them a role


def output_of(model: nn.Module, example: Any, marks: list[Mark] | None = None) -> Output:
    """Compute the output for the example in evaluation mode, with the same random numbers in each call.

    `marks` is filled as modules end, so it is also usable after a forward that fails.
    """
    marks = [] if marks is None else marks
    with ExitStack() as stack:
        stack.enter_context(in_mode(model, training=False))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(_marker(name, marks)).remove)
        output = call(model, example)
    numbers = [leaf for leaf in _tensors(output) if _has_gradient(leaf)]
    return Output(
        numbers=numbers, marks=marks, in_nests=any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output))
    )


def without_graph(output: Output) -> Output:
    """The output without the graph that keeps its activations."""
    return replace(output, numbers=[number.detach() for number in output.numbers])


class SliceComparison:
    """Compares a sliced model's output with the whole model's."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: TensorPlan,
        trace: Trace,
        streams: Sequence[Stream],
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        roles: Mapping[str, str] | None,
        parts: ShardTable,
        recomputed: Sequence[nn.Module],
    ) -> None:
        """`everyone`: all ranks that run the model's forward together, also those of the context axis.

        `roles` is the user's plan; the plan that a message suggests extends it.
        """
        self._given = roles or {}
        self._model = model
        self._layout = layout
        self._plan = plan
        self._trace = trace
        self._streams = streams
        self._group = group
        self._everyone = everyone
        self._parts = parts
        self._recomputed = recomputed

    def hold(
        self,
        example: Any,
        expected: Output,
        gradients: Digests | None,
        vocabulary: Vocabulary,
        failed: Exception | None,
        *,
        rehearse: bool,
    ) -> SliceDeparture | None:
        """Compare outputs and gradients; return a difference, or None and set whether logits can stay in slices.

        `gradients`: the whole model's; None: they can't be compared. `failed`: the error that slicing the model
        raised on this rank. `rehearse`: its forward may fail on some ranks only.
        """
        marks: list[Mark] = []
        output = Output(numbers=[], marks=marks, in_nests=False)
        device = next(self._model.parameters()).device
        # The forward of a sliced model sends messages. Where it fails on some ranks only, the others would wait for
        # theirs without end; so it is run first without sending any, and the ranks agree that none has failed.
        if rehearse:
            messages = _Unconnected()
            if failed is None:
                failed = self._rehearse(example, marks, messages)
            failed = self._other_messages(messages.sent if failed is None else None) or failed
        if not agree(failed is None, self._everyone, device):  # before a forward in which the other ranks would wait
            return self._departure(replace(expected, marks=expected.marks if failed else []), output, failed)
        keeping = torch.no_grad() if gradients is None else keeping_graph(self._model, self._recomputed)
        with keeping:
            try:
                output = output_of(self._model, example, marks)
            except Exception as error:  # a model's own code may raise anything for sizes that it doesn't expect
                failed = error
            alike = failed is None and alike_numbers(output.numbers, expected.numbers)
            if not agree(alike, self._everyone, device):
                return self._departure(expected, output, failed)
            departure = None if gradients is None else self._hold_gradients(output, gradients)
        if departure is not None:
            return departure
        del output  # and its graph
        vocabulary.able = (
            expected.in_nests and not self._weights_after_logits() and self._able(example, expected, vocabulary)
        )
        return None

    def _other_messages(self, sent: Sequence[Any] | None) -> Exception | None:
        """Compare the messages that each rank of the tensor axis would send; return an error where they differ.

        None: this rank failed, which the others learn afterwards.
        """
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, sent, group=self._group)
        if None in everyone or all(other == everyone[0] for other in everyone):
            return None
        return RuntimeError("ranks would send messages of different sizes")

    def _rehearse(self, example: Any, marks: list[Mark], messages: "_Unconnected") -> Exception | None:
        """Run the forward without sending messages; return the error that it raises on this rank, if any."""
        try:
            with torch.no_grad(), messages:
                output_of(self._model, example, marks)
        except Exception as error:  # a model's own code may raise anything for sizes that it doesn't expect
            return error
        marks.clear()
        return None

    def _hold_gradients(self, output: Output, expected: Digests) -> SliceDeparture | None:
        """Compare the gradients; return their difference, or None."""
        device = next(self._model.parameters()).device
        failed: Exception | None = None
        digests: Digests = {}
        try:
            digests = digests_of(self._model, output.numbers)
        except Exception as error:  # backward of a model's own functions may raise anything
            failed = error
        if not agree(failed is None, self._everyone, device):
            where = "" if failed is None else self._failing(failed)
            verb = "fails in backward" if failed is None else f"fails ({type(failed).__name__}: {first_line(failed)})"
            return self._told(where, verb, self._to_leave_whole(where) if where else [])
        table = {name: self._parts.part(name) for name in self._parts.parameters}
        summed = [name for name, part in table.items() if self._group in part.sum_over]
        slices = {name: part.slice for name, part in table.items() if part.slice is not None}
        wrong = differing(self._model, expected, digests, self._group, summed=summed, slices=slices)
        if agree(not wrong, self._everyone, device):
            return None
        # Ranks of another group may have found it alone.
        last = max(wrong, key=self._last_use, default="")
        where = self._user_of(last) if last else ""
        verb = f"gives another gradient{f' of {pattern_of(last)}' if last else ''} than whole"
        return self._told(where, verb, self._to_leave_whole(where) if where else [])

    def _last_use(self, parameter: str) -> int:
        """The position in the trace at which the last call begins of the module that holds a parameter."""
        holder = parameter.rpartition(".")[0]
        while holder and not self._trace.of(holder):  # such as a list of parameters
            holder = holder.rpartition(".")[0]
        return max((call.began for call in self._trace.of(holder)), default=0)

    def _user_of(self, parameter: str) -> str:
        """The sliced module at fault for the gradient of a parameter: the first that ends after its last use."""
        began = self._last_use(parameter)
        rows = [*(unit.row for unit in self._plan.units), *self._plan.multiheads, *self._plan.gathered]
        after = [call for name in rows for call in self._trace.of(name) if call.ended > began]
        first = min(after, key=lambda call: call.ended, default=None)
        return "" if first is None else first.name

    def _able(self, example: Any, expected: Output, vocabulary: Vocabulary) -> bool:
        vocabulary.slices = True  # for this try only
        try:
            with torch.enable_grad():
                numbers = [leaf.detach() for leaf in output_of(self._model, example).numbers]
            return alike_numbers(
                [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in numbers], expected.numbers
            )
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, AttributeError):
            return False  # the model computes with its logits in a way that DTensor does not support
        finally:
            vocabulary.slices = False

    def _weights_after_logits(self) -> bool:
        """Whether parameters are applied to the logits; their gradients would come from slices."""
        logits = [seen for name in self._plan.outputs for call in self._trace.of(name) for seen in call.outputs()]
        whole = [seen for call in self._trace.of("") for seen in call.outputs()]
        return bool(logits) and bool(self._trace.behind(whole, up_to=logits))

    def _departure(self, expected: Output, sliced: Output, failed: Exception | None) -> SliceDeparture:
        """Find where the sliced model first differs from the whole one, what to leave whole, and what to tell."""
        departed = self._first_departure(expected, sliced)
        where = departed if failed is None else self._failing(failed)
        verb = "gives another output than whole"
        if failed is not None:
            line = foreign_line(failed)
            verb = f"fails ({type(failed).__name__}: {first_line(failed)}{f', {line}' if line else ''})"
        hint = ""
        if failed is not None and "is invalid for input of size" in str(failed):
            hint = " (a view with -1 for the number of heads takes any number of them)"
        return self._told(where, verb, self._to_leave_whole(where) or self._to_leave_whole(departed), hint)

    def _told(self, where: str, verb: str, leave: Sequence[str], hint: str = "") -> SliceDeparture:
        """Put the difference in words. `leave`: the modules to leave whole."""
        module, ranks = self._model.get_submodule(where), self._layout.tensor
        what = f"{where} ({type(module).__name__})" if where else type(module).__name__
        patterns = dict.fromkeys(map(pattern_of, leave), "whole")
        plan = ", ".join(f'"{name}": {role}' for name, role in {**self._given, **patterns}.items())
        fix = f"run.tensor_plan: {{{plan}}}" if leave else f"dp{ranks} or fsdp{ranks}"
        if self._streams and where not in self._plan.roles():
            fix = f"tp{ranks}, which shows whether the slices or the split tokens are at fault"
        return SliceDeparture(
            sentence=f'layout "{self._layout}": sliced, {what} {verb}; use {fix}',
            why=f"{verb} when it is sliced{hint}",
            to_leave_whole=leave,
            of_ours=not any(fnmatchcase(name, pattern) for name in leave for pattern in self._given),
        )

    def _failing(self, error: Exception) -> str:
        """The module whose own code failed, such as an attention that reshapes its projections' outputs."""
        return failing_module(error, {id(module): name for name, module in self._model.named_modules()})

    def _first_departure(self, expected: Output, sliced: Output) -> str:
        """The first module whose output differs from the whole model's, or that did not end."""
        passed = set(self._in_parts())
        for before, now in zip(expected.marks, sliced.marks, strict=False):
            if before.name != now.name:
                return now.name
            if now.name not in passed and not self._alike_marks(before, now):
                return now.name
        rest = expected.marks[len(sliced.marks) :]  # modules that did not end, if the forward failed
        return rest[0].name if rest else ""

    def _in_parts(self) -> Iterator[str]:
        """Modules whose outputs are only a rank's part: columns, and modules between them and their row layer."""
        for unit in self._plan.units:
            yield from unit.columns
            began = min(call.began for name in unit.columns for call in self._trace.of(name))
            row = self._trace.of(unit.row)[0].began
            yield from (call.name for call in self._trace.calls if began < call.ended < row)

    def _alike_marks(self, before: Mark, now: Mark) -> bool:
        """Whether a module's output is the whole model's or, with split tokens, this rank's tokens of that."""
        for whole, sliced in zip(before.tensors, now.tensors, strict=False):
            expected = whole
            if self._streams and sliced.shape != whole.shape and whole.ndim:
                first, last = bounds(len(whole), dist.get_rank(self._group), dist.get_world_size(self._group))
                expected = whole[first:last]
            if sliced.shape != expected.shape or not near(sliced, expected):
                return False
        return True

    def _to_leave_whole(self, where: str) -> list[str]:
        """The sliced layers in a module, or else the last one before its end, and their equals in repeated layers."""
        sliced = [*self._plan.roles(), *self._plan.gathered]
        # A layer's weight may be computed by a module inside it.
        inside = [
            name
            for name in sliced
            if name == where or name.startswith(f"{where}.") or f"{where}.".startswith(f"{name}.")
        ]
        inside += [n for unit in self._plan.units if where in unit.members for n in unit.members]
        if where and not inside:  # a module beside a unit's layers, of whose outputs it makes something
            owners = [unit for unit in self._plan.units if unit.owner and f"{where}.".startswith(f"{unit.owner}.")]
            inside = [name for unit in owners for name in unit.members]
        if where and not inside:
            ends = [call.ended for call in self._trace.of(where)]
            before = [call for call in self._trace.calls if call.name in sliced and ends and call.ended < ends[0]]
            last = max(before, key=lambda call: call.ended, default=None)
            inside = [] if last is None else [last.name]
            inside += [n for unit in self._plan.units if last and last.name in unit.members for n in unit.members]
        patterns = {pattern_of(name) for name in inside}
        return [name for name in sliced if pattern_of(name) in patterns]


def _marker(name: str, marks: list[Mark]) -> Any:
    """Make a forward hook that marks a module's output."""

    def mark(module: nn.Module, arguments: Any, output: Any) -> None:
        marks.append(Mark(name=name, tensors=[_mark(leaf) for leaf in _tensors(output) if _has_gradient(leaf)]))

    return mark


def _mark(tensor: Tensor) -> Tensor:
    """A digest per index of dimension 1, which differs where tensors do: [batch, tokens, ...] -> [tokens]."""
    if isinstance(tensor, DTensor) or tensor.ndim < 2:
        return tensor.detach().new_zeros(())
    if not has_values(tensor):
        return tensor.detach().new_empty(tensor.shape[1])
    rows = tensor.detach().transpose(0, 1).flatten(1)  # [tokens, numbers]
    weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return rows.masked_fill(rows.isinf(), 0) @ weights


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of an output, including those in objects of the model's own classes."""
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            tensors += [inner for inner in pytree.tree_leaves(dict(vars(leaf))) if isinstance(inner, Tensor)]
    return tensors


def alike_numbers(sliced: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two outputs have the same shapes, and the same numbers up to rounding."""
    return len(sliced) == len(expected) and all(
        one.shape == other.shape and near(one.detach(), other) for one, other in zip(sliced, expected, strict=True)
    )


_IN_PLACE = ("allreduce_", "broadcast_")  # results stay this rank's own numbers instead of the sum or another rank's
_WITHOUT_TENSORS = ("alltoall_base_", "barrier")  # collectives that return only the work handle


class _Unconnected(TorchDispatchMode):
    """A mode in which collectives send nothing: results from other ranks are zeros of the right shape.

    If a rank fails before a collective, the others wait in it until the watchdog ends them. So if slices differ in
    size, every rank first runs the model by itself, and the ranks agree on whether any of them failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str, int]] = []  # each collective, with the dtype and number of its elements
        # Groups over shared memory, whose collectives don't pass PyTorch's dispatcher.
        self._groups = [group for group in all_groups() if isinstance(group, KernelGroup)]

    def __enter__(self) -> Any:
        for group in self._groups:
            group.rehearsed = lambda kind, size: self.sent.append((kind, "bytes", size))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for group in self._groups:
            group.rehearsed = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        name = schema(func).name.partition("::")[2]
        tensors = tensors_in(tuple(args))
        # Parts that ranks exchange may differ, and so may what a rank gives to a gather; other sizes are one for all.
        size = 0 if name.startswith("alltoall") else max((tensor.numel() for tensor in tensors), default=0)
        self.sent.append((name, str(tensors[0].dtype) if tensors else "", size))
        if name not in _IN_PLACE:
            pytree.tree_map_only(Tensor, Tensor.zero_, args[0])
        work = FakeWork().boxed()
        return work if name in _WITHOUT_TENSORS else (args[0], work)
