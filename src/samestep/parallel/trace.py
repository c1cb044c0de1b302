"""Trace: which modules a model's forward calls, in which order, with which tensors; found without computing."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor that went into a module or came out of it."""

    identity: int  # the same number is the same tensor object
    shape: tuple[int, ...]
    dtype: torch.dtype


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

    def inputs(self) -> list[Seen]:
        return seen_in((self.arguments, self.keywords))

    def outputs(self) -> list[Seen]:
        return seen_in(self.output)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The calls of one forward, in the order in which they began."""

    calls: Sequence[Call]

    def of(self, name: str) -> list[Call]:
        """The calls of the module of that name."""
        return [call for call in self.calls if call.name == name]


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
            stack.enter_context(torch.no_grad())
            stack.enter_context(mode)
            stack.enter_context(recorder.functions)
            state = {name: _unreal(tensor) for name, tensor in _named_tensors(model)}
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
    return Trace(calls=sorted(recorder.calls, key=lambda call: call.began))


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
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


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


class _Recorder:
    """Hooks that write down every call of every module."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.functions = _Counted()
        self._clock = 0
        self._open: list[tuple[int, tuple[Any, ...], dict[str, Any], Counter[str]]] = []
        self._kept: list[Any] = []  # alive, so that no two tensors share an identity

    def attach(self, model: nn.Module) -> Iterator[Any]:
        for name, module in model.named_modules():
            yield module.register_forward_pre_hook(self._begin, with_kwargs=True)
            yield module.register_forward_hook(self._end_of(name), with_kwargs=True)

    def _begin(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._clock += 1
        before = self.functions.counts.copy()
        self._open.append((self._clock, self._see(arguments), self._see(keywords), before))

    def _end_of(self, name: str) -> Any:
        def end(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            self._clock += 1
            began, seen_arguments, seen_keywords, before = self._open.pop()
            self.calls.append(
                Call(
                    name=name,
                    began=began,
                    ended=self._clock,
                    arguments=seen_arguments,
                    keywords=seen_keywords,
                    output=self._see(output),
                    functions=self.functions.counts - before,
                )
            )

        return end

    def _see(self, nest: Any) -> Any:
        self._kept.append(nest)
        return pytree.tree_map_only(Tensor, self._seen, nest)

    def _seen(self, tensor: Tensor) -> Seen:
        assert isinstance(tensor, FakeTensor) or tensor.numel() < 1024  # a constant of the model's own
        return Seen(identity=id(tensor), shape=tuple(tensor.shape), dtype=tensor.dtype)
