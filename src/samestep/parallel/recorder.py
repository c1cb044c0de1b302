"""Recorder: hooks and modes that record a forward's calls of modules and functions."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from samestep.data.nests import tensors_in
from samestep.parallel.calls import Attention, Call, Seen, seen_in, seen_of
from samestep.parallel.dataflow import DataflowRecorder
from samestep.parallel.exact.dropout import draws_in
from samestep.parallel.exact.grouped_product import call_followed
from samestep.torch_internals import pytree
from samestep.torch_internals.fakes import FakeTensor
from samestep.torch_internals.operators import TorchDispatchMode

# Attributes and methods of a tensor that don't depend on its values.
_FORM = frozenset(
    {
        "device",
        "dim",
        "dtype",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_leaf",
        "is_meta",
        "layout",
        "ndim",
        "numel",
        "requires_grad",
        "shape",
        "size",
        "stride",
    }
)


class _Clock:
    """A counter of the beginnings and ends of calls.

    Beginnings and ends get consecutive numbers, so that "within", "before" and "after" of two calls are comparisons.
    """

    time = 0


@dataclass(frozen=True, kw_only=True)
class _Open:
    """A call that has not ended."""

    name: str
    began: int
    flops: int
    counts: Counter[str]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    sources: Mapping[int, tuple[int, ...]]  # dataflow nodes of its arguments
    inside: str


class _Functions(TorchFunctionMode):
    """Counts calls of functions by name, and records their uses of parameters and module outputs."""

    def __init__(self, open_modules: list[_Open], clock: _Clock, *, values: bool, dataflow: DataflowRecorder) -> None:
        super().__init__()
        self._dataflow = dataflow
        # Modules whose own forward asks for values that depend on parameters -> the function with which it asks.
        self.asking: dict[str, str] = {}
        self._values = values
        self.counts: Counter[str] = Counter()
        self.uses: dict[str, set[tuple[str, ...]]] = {}
        self.last_uses: dict[int, int] = {}
        self.attentions: list[Attention] = []
        self.draws: list[tuple[int, str, int]] = []  # (time, module whose forward draws, number of draws)
        self.paused = False  # whether the recorder itself uses tensors
        self.outputs: set[int] = set()  # ids of module outputs
        self._parameters: dict[int, str] = {}
        self._open = open_modules
        self._clock = clock

    def watch(self, state: Mapping[str, Tensor]) -> None:
        """Record the uses of these parameters."""
        self._parameters = {id(tensor): name for name, tensor in state.items() if isinstance(tensor, Tensor)}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        self.counts[name] += 1
        if name in _ALONG_ONE and (size := _size_along(args, kwargs or {})) is not None:
            self.counts[along(name, size)] += 1
        # `tensor.shape` comes as the function `__get__` of a getter; the attribute's name is the getter's.
        attribute = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._note(tensor, attribute)
        draws = draws_in(func, args, kwargs or {})
        if draws:
            self.draws.append((self._clock.time, self._open[-1].name if self._open else "", draws))
        if name == "scaled_dot_product_attention":
            self._note_attention(*args, **(kwargs or {}))
        if self._values and _asks(name, args):
            # Values of inputs alone, such as whether a mask hides anything, are the same on every rank.
            tensors = _asked(name, args, kwargs or {})
            if any(self._dataflow.needs_parameters(tensor) for tensor in tensors):
                module = self._modules()[-1] if self._open else ""
                self.asking.setdefault(module, name)
                self._dataflow.ask(module, name, tensors)
            return _answered(func, args, kwargs)
        return _linked(func, attribute, args, kwargs)

    def _note(self, tensor: Tensor, attribute: str) -> None:
        """Record a use of a tensor: for a parameter the running modules, for a module's output the time."""
        parameter = self._parameters.get(id(tensor))
        if parameter is not None and attribute not in _FORM:
            self.uses.setdefault(parameter, set()).add(self._modules())
        if id(tensor) in self.outputs:
            self.last_uses[id(tensor)] = self._clock.time

    def _note_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *_: Any,
        **__: Any,
    ) -> None:
        """Record the shapes and the dropout of a call of attention."""
        seen = {"query": seen_of(query), "key": seen_of(key)}
        self.attentions.append(Attention(modules=self._modules(), dropout=dropout_p, **seen))

    def _modules(self) -> tuple[str, ...]:
        return tuple(call.name for call in self._open)


def _linked(func: Any, attribute: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Call a function with gradients enabled, so that the result's graph has all of its dependencies.

    Layouts need the parameters on which a tensor depends, also for a mask that the model makes under `torch.no_grad`
    or from a detached tensor.
    """
    if attribute in ("detach", "data") and len(args) == 1:
        return args[0].view_as(args[0])
    if torch.is_grad_enabled():
        return call_followed(func, args, kwargs)
    try:
        with torch.enable_grad():
            return call_followed(func, args, kwargs)
    except RuntimeError:  # such as an in-place change of a parameter, which autograd forbids
        return call_followed(func, args, kwargs)


# Functions along one dimension, which mix tokens if it is the dimension of tokens.
_ALONG_ONE = frozenset({"softmax", "cumsum"})


def along(function: str, size: int) -> str:
    """The name under which calls of a function along a dimension of this size are counted."""
    return f"{function} of {size}"


def _size_along(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The size of the dimension along which a function is called; by default the last one."""
    tensor = args[0] if args else kwargs.get("input")
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    dim = -1 if dim is None else dim
    return tensor.shape[dim] if isinstance(tensor, Tensor) and isinstance(dim, int) and tensor.ndim else None


# Functions whose result is a Python value or has a data-dependent shape.
_ASKING = frozenset(
    {
        "__bool__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "argwhere",
        "equal",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "repeat_interleave",
        "tolist",
        "unique",
        "unique_consecutive",
    }
)


def _asks(name: str, args: Sequence[Any]) -> bool:
    """Whether a call asks for values of its tensors: its result is a Python value or has a data-dependent shape."""
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":
        return len(args) > 1 and isinstance(args[1], Tensor)
    if name == "__getitem__":
        return any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in _leaves(args[1:]))
    return name in _ASKING


def _asked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """The tensors whose values such a call asks for: of one that selects elements the mask, not the elements."""
    selects = name in ("__getitem__", "masked_select", "repeat_interleave")
    return tensors_in((tuple(args[1:]) if selects else tuple(args), dict(kwargs)))


def _leaves(nest: Any) -> list[Any]:
    return pytree.tree_leaves(nest)


def _answered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Run a call that asks for values."""
    if getattr(func, "__name__", "") == "numpy":  # a detached tensor is none here
        args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        return func(*args, **(kwargs or {}))
    return func(*args, **(kwargs or {}))


_DEVICE = torch.ops.prim.device.default  # the device of a tensor


class Operators(TorchDispatchMode):
    """Counts the FLOPs of operators for which PyTorch has a formula, and records their dataflow."""

    def __init__(self, dataflow: DataflowRecorder) -> None:
        super().__init__()
        self.flops = 0
        self._dataflow = dataflow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # more than half of all calls, by PyTorch's own checks
            of = args[0]
            in_python = isinstance(of, FakeTensor) and not of.fake_mode.in_kernel_invocation
            return of.fake_device if in_python else func(*args)
        keywords = kwargs or {}
        output = func(*args, **keywords)
        self.flops += _flops_of(func, args, keywords, output)
        self._dataflow.record(func, args, keywords, output)
        return output


def _flops_of(func: Any, args: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> int:
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return formula(*args, **keywords, out_val=output)
    if func is torch.ops.aten.mkldnn_rnn_layer.default:  # an LSTM on a CPU
        # [tokens, samples, features], [4 hidden, features], [4 hidden, hidden]
        steps, of_input, of_state = args[:3]
        return 2 * steps.shape[0] * steps.shape[1] * (of_input.numel() + of_state.numel())
    return 0


class Recorder:
    """Hooks that record every call of every module."""

    def __init__(self, *, values: bool = False) -> None:
        """`values`: whether the forward runs on tensors with values."""
        self._values = values
        self.calls: list[Call] = []
        self._open: list[_Open] = []
        self._clock = _Clock()
        self.dataflow = DataflowRecorder()
        self.operators = Operators(self.dataflow)
        self.functions = _Functions(self._open, self._clock, values=values, dataflow=self.dataflow)
        self._kept: list[Any] = []  # kept alive, so that no id is reused

    def attach(self, model: nn.Module) -> Iterator[Any]:
        """Register the hooks; yields their handles."""
        for name, module in model.named_modules():
            yield module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            yield module.register_forward_hook(self._end_of(name), with_kwargs=True)

    def running(self) -> tuple[str, ...]:
        """The modules whose forwards are running, outermost first."""
        return tuple(call.name for call in self._open)

    def _begin(self, name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._clock.time += 1
        with self._paused():
            sources = self.dataflow.begin((arguments, keywords))
        self._open.append(
            _Open(
                name=name,
                began=self._clock.time,
                flops=self.operators.flops,
                counts=self.functions.counts.copy(),
                arguments=self._see(arguments),
                keywords=self._see(keywords),
                sources=sources,
                inside=_function_around(),
            )
        )

    def _end_of(self, name: str) -> Any:
        def end(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            self._clock.time += 1
            begun = self._open.pop()
            with self._paused():
                inputs = {id(tensor): tensor for tensor in tensors_in((arguments, keywords))}
                writes = any(
                    tensor.requires_grad and self.dataflow.sources(tensor) != begun.sources.get(key)
                    for key, tensor in inputs.items()
                )
                self.dataflow.end(begun.began, begun.sources, output, whole=not name)
            seen = self._see(output)
            self.functions.outputs.update(tensor.identity for tensor in seen_in(seen))
            self.calls.append(
                Call(
                    name=name,
                    began=begun.began,
                    ended=self._clock.time,
                    arguments=begun.arguments,
                    keywords=begun.keywords,
                    output=seen,
                    functions=self.functions.counts - begun.counts,
                    flops_before=begun.flops,
                    flops_after=self.operators.flops,
                    writes=writes,
                    inside=begun.inside,
                )
            )

        return end

    def _see(self, nest: Any) -> Any:
        """Replace tensors in a nest by `Seen`; the tensors are kept alive."""
        self._kept.append(nest)
        with self._paused():
            return pytree.tree_map_only(Tensor, self._seen, _opened(nest))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Context of the recorder's own uses of tensors, which are not recorded."""
        self.functions.paused = True
        try:
            yield
        finally:
            self.functions.paused = False

    def _seen(self, tensor: Tensor) -> Seen:
        return seen_of(tensor)


def _function_around() -> str:
    """The name of the innermost autograd.Function whose forward is running, which computes gradients its own way.

    Its forward runs without gradients, which saves the search where they are enabled.
    """
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                return type(context).__name__.removesuffix("Backward")
        frame = frame.f_back
    return ""


def _opened(output: Any) -> Any:
    """Convert a dataclass to a dictionary of its fields, as pytree does not traverse dataclasses."""
    if is_dataclass(output) and not isinstance(output, type) and len(pytree.tree_leaves(output)) == 1:
        return {field_.name: getattr(output, field_.name) for field_ in fields(output)}
    return output
