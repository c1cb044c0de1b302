"""Trace: which modules a model's forward calls, in which order, with which tensors; found without computing."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor that went into a module or came out of it."""

    identity: int  # the same number is the same tensor object
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Node | None = None  # what autograd knows of how it was computed; None: of no parameter


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a module. Arguments and output are nests in which every tensor is a `Seen`."""

    name: str  # in the model
    began: int  # position among all beginnings and ends of calls
    ended: int
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any
    functions: Mapping[str, int]  # how often each of PyTorch's functions was called in it, by name
    flops_before: int  # of the forward up to its beginning: products of matrices and convolutions
    flops_after: int  # and up to its end

    def inputs(self) -> list[Seen]:
        return seen_in((self.arguments, self.keywords))

    def outputs(self) -> list[Seen]:
        return seen_in(self.output)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The calls of one forward, in the order in which they began."""

    calls: Sequence[Call]
    parameters: Mapping[Node, str]  # autograd's leaves, by the name of the parameter
    flops: int  # of the whole forward

    def of(self, name: str) -> list[Call]:
        """The calls of the module of that name."""
        return [call for call in self.calls if call.name == name]

    def behind(self, tensors: Iterable[Seen], *, up_to: Iterable[Seen] = ()) -> set[str]:
        """The parameters from which tensors are computed, not looking behind those of `up_to`."""
        seen = {tensor.source for tensor in up_to}
        waiting = [tensor.source for tensor in tensors if tensor.source not in seen]
        found: set[str] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.parameters:
                found.add(self.parameters[node])
            waiting += [before for before, _ in node.next_functions]
        return found


def trace(model: nn.Module, inputs: Any) -> Trace:
    """Follow one forward of `inputs` (as a task's `Batch.inputs`) on tensors that have a shape and no values.

    Raises UserError where the forward asks for values.
    """
    recorder = _Recorder()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    training = {module: module.training for module in model.modules()}
    # In training mode, since PyTorch's encoder layers skip their submodules in evaluation.
    model.train()
    try:
        with ExitStack() as stack:
            for handle in recorder.attach(model):
                stack.callback(handle.remove)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(mode)
            stack.enter_context(recorder.functions)
            state = {name: _unreal(tensor) for name, tensor in _named_tensors(model)}
            parameters = {get_gradient_edge(leaf).node: name for name, leaf in state.items() if leaf.requires_grad}
            stack.enter_context(recorder.flops)
            arguments, keywords = _as_call(pytree.tree_map_only(Tensor, _unreal, _plain(inputs)))
            functional_call(model, state, arguments, keywords, tie_weights=True)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{type(model).__name__}: its forward can't be followed without values "
            f"({type(error).__name__}: {reason}); layouts of data ranks alone (dp2, zero1x2, fsdp2) need no such look"
        ) from error
    finally:
        for module, mode_before in training.items():
            module.training = mode_before
    calls = sorted(recorder.calls, key=lambda call: call.began)
    return Trace(calls=calls, parameters=parameters, flops=recorder.flops.count)


def imagine(module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What a module would give for these arguments: a nest in which every tensor is a `Seen`."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: _unreal(tensor) for name, tensor in _named_tensors(module)}
        arguments, keywords = pytree.tree_map_only(Tensor, _unreal, (arguments, dict(keywords)))
        output = functional_call(module, state, arguments, dict(keywords), tie_weights=True)
        return pytree.tree_map_only(Tensor, _seen, output)


def seen_in(nest: Any) -> list[Seen]:
    """Every tensor of a nest, in order."""
    return [leaf for leaf in pytree.tree_leaves(nest, is_leaf=_is_seen) if _is_seen(leaf)]


def _is_seen(value: Any) -> bool:
    return isinstance(value, Seen)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _unreal(tensor: Tensor) -> Tensor:
    """A tensor of the same shape on the CPU, made inside a fake mode: no memory, no values."""
    unreal = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    # Also what is frozen: a layout asks which parameters a tensor is computed from, not which are trained.
    return unreal.requires_grad_(isinstance(tensor, nn.Parameter) and tensor.is_floating_point())


def _plain(inputs: Any) -> Any:
    """A mapping of any kind as a dictionary, which every nest walker knows."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


class _Counted(TorchFunctionMode):
    """Counts the calls of functions by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Flops(TorchDispatchMode):
    """Counts the multiplications and additions of operators that PyTorch has a formula for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=output)
        return output


def _seen(tensor: Tensor) -> Seen:
    # A leaf has no node of its own until it is asked for one.
    source = get_gradient_edge(tensor).node if tensor.requires_grad else None
    return Seen(identity=id(tensor), shape=tuple(tensor.shape), dtype=tensor.dtype, source=source)


class _Recorder:
    """Hooks that write down every call of every module."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.functions = _Counted()
        self.flops = _Flops()
        self._clock = 0
        self._open: list[tuple[int, int, Counter[str], tuple[Any, ...], dict[str, Any]]] = []
        self._kept: list[Any] = []  # alive, so that no two tensors share an identity

    def attach(self, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            yield module.register_forward_pre_hook(self._begin, with_kwargs=True)
            yield module.register_forward_hook(self._end_of(name), with_kwargs=True)

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._clock += 1
        counts = self.functions.counts.copy()
        self._open.append((self._clock, self.flops.count, counts, self._see(arguments), self._see(keywords)))

    def _end_of(self, name: str) -> Any:
        def end(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            self._clock += 1
            began, flops_before, counts, seen_arguments, seen_keywords = self._open.pop()
            self.calls.append(
                Call(
                    name=name,
                    began=began,
                    ended=self._clock,
                    arguments=seen_arguments,
                    keywords=seen_keywords,
                    output=self._see(output),
                    functions=self.functions.counts - counts,
                    flops_before=flops_before,
                    flops_after=self.flops.count,
                )
            )

        return end

    def _see(self, nest: Any) -> Any:
        self._kept.append(nest)
        return pytree.tree_map_only(Tensor, self._seen, nest)

    def _seen(self, tensor: Tensor) -> Seen:
        assert isinstance(tensor, FakeTensor) or tensor.numel() < 1024  # a constant of the model's own
        return _seen(tensor)
