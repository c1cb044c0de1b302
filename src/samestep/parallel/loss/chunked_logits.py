"""Chunked logits: an output layer and its cross-entropy are computed for some tokens at a time.

The logits of a large vocabulary are the largest tensor of a small language model: 16,384 tokens x 128,256 words are
8.4 GB in float32, and cross-entropy keeps as many again for backward. Here the output layer of a training forward
gives `ChunkedLogits` instead: what it was called with, and how the logits follow from it. The loss may change their
shape or dtype. Its cross-entropy then takes some rows at a time through the layer, and keeps none of their
logits: backward computes them once more, chunk by chunk, which costs one more product of the output layer.

Under context parallel every rank has the output layer's input for all tokens. There each rank only computes its share
of the rows, and the results are combined: with `run.loss_chunk` some rows at a time, without it all rows of the share
at once. If code other than cross-entropy needs the logits, they are computed whole.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from samestep.data.order import bounds
from samestep.errors import UserError
from samestep.parallel.attributes import wrap_forward
from samestep.parallel.blocks import repeated_layers
from samestep.parallel.calls import Trace
from samestep.parallel.collectives import (
    Slices,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)
from samestep.parallel.sharding import whole
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import own_parameters
from samestep.torch_internals.operators import DisableTorchFunctionSubclass, schema
from samestep.torch_internals.tensors import wrapper_subclass

# Attributes and methods that don't need a tensor's values.
_FACTS = frozenset(
    {"size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__", "get_device"}
)
_PROPERTIES = frozenset({"shape", "dtype", "device", "requires_grad", "ndim", "layout", "_base", "grad_fn"})
_SHAPES = frozenset({"reshape", "view", "flatten", "unsqueeze", "squeeze"})
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """How logits are computed: the layer, its inputs, and the dtypes to which the logits are cast, in order."""

    inputs: Tensor  # [..., hidden]
    layer: Callable[[Tensor], Tensor]
    classes: int
    dtypes: tuple[torch.dtype, ...]  # that of the layer's output first
    rows: int | None  # of a chunk; None: all at once, and other code may have the logits
    shared: "_Shared | None" = None  # None: this rank computes all rows
    changes: "_Changes" = field(default_factory=lambda: _Changes())


@dataclass
class _Changes:
    """The one of several views of the same logits that was changed in place, which makes the others stale."""

    by: "ChunkedLogits | None" = None


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Distribution of the rows over the ranks of a group, each of which has the inputs of all rows."""

    group: dist.ProcessGroup
    # The layer's parameters by module and name, as views whose gradients are summed over the group.
    parameters: Mapping[nn.Module, Mapping[str, Tensor]]

    @classmethod
    def of(cls, layer: nn.Module, group: dist.ProcessGroup) -> "_Shared":
        """Distribute a layer's rows over a group, once for each forward, since it is part of the graph."""

        def summed(parameter: Tensor | None) -> Any:
            return (
                copy_to_region(parameter, group) if parameter is not None and parameter.requires_grad else parameter
            )

        parameters = {
            module: {name: summed(parameter) for name, parameter in own_parameters(module).items()}
            for module in layer.modules()
        }
        return cls(group=group, parameters=parameters)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which the layer's parameters are replaced by these views.

        Each rank's rows give a part of the parameters' gradients, so the backward of the views sums them over the
        group.
        """
        before = {module: dict(own_parameters(module)) for module in self.parameters}
        for module, parameters in self.parameters.items():
            own_parameters(module).update(parameters)  # pyright: ignore[reportArgumentType, reportCallIssue]
        try:
            yield
        finally:
            for module, parameters in before.items():
                own_parameters(module).update(parameters)


class ChunkedLogits(Tensor):
    """Lazy logits [..., classes], which cross-entropy computes a chunk at a time.

    Other code that needs the values gets them if `rows` is None, and a UserError otherwise.
    """

    _source: _Source
    _whole: Tensor | None  # the values, once they are computed

    @staticmethod
    def __new__(cls, source: _Source) -> "ChunkedLogits":
        """Make a tensor of the logits' shape and dtype without memory."""
        inputs = source.inputs
        logits = wrapper_subclass(
            cls,
            (*inputs.shape[:-1], source.classes),
            dtype=source.dtypes[-1],
            device=inputs.device,
            requires_grad=inputs.requires_grad,
        )
        logits._source, logits._whole = source, None
        return logits

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = self._source.inputs
        return f"ChunkedLogits({[*inputs.shape[:-1], self._source.classes]}, rows={self._source.rows})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        keywords = dict(kwargs or {})
        property_name = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        # A model may ask for shape and dtype before its loss, which needs no values. Everything else that isn't
        # cross-entropy, a cast or a change of shape computes the logits whole, as without chunks, or is refused where
        # this rank has only some rows of them.
        if name in _FACTS or property_name in _PROPERTIES or property_name.startswith("is_"):
            with DisableTorchFunctionSubclass():
                return func(*args, **keywords)
        logits = args[0] if args else None
        if not isinstance(logits, ChunkedLogits) or logits._whole is not None:
            return _of_whole(name, func, args, keywords)
        if func is F.cross_entropy:
            if logits._source.rows is None and _is_other(logits._source, *args[1:], **keywords):
                return _of_whole(name, func, args, keywords)
            _check_unchanged(logits)
            return _cross_entropy(logits._source, *args[1:], **keywords)
        if name == "register_hook":  # FSDP2 waits for the first gradient of what a module gave
            return logits._source.inputs.register_hook(*args[1:])
        if name == "_is_view":
            return False
        try:
            if name in _CASTS or name in ("to", "type", "contiguous", "type_as"):
                return _cast(logits, name, args[1:], keywords)
            if name in _SHAPES or name == "__getitem__":
                return _reshaped(logits, func, name, args[1:], keywords)
        except WantedWholeError:
            if logits._source.rows is not None:
                raise
        return _of_whole(name, func, args, keywords)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Called below autograd, such as in a user's autograd function: `_Given` receives its gradient.
        chunked = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, ChunkedLogits)]
        if any(leaf._source.rows is not None for leaf in chunked):
            raise _wanted_whole(str(func))
        if schema(func).is_mutable:
            raise UserError(f"logits are changed in place by {func}, which PyTorch does not tell of; change a copy")
        with torch.no_grad():
            args, kwargs = whole_logits((args, kwargs or {}))
            return func(*args, **kwargs)


def _logits(source: _Source) -> ChunkedLogits:
    """Make lazy logits, with an autograd node if code other than cross-entropy may use them."""
    if source.rows is not None:
        return ChunkedLogits(source)
    return _Given.apply(source.inputs, source)  # pyright: ignore[reportReturnType]


class _Given(torch.autograd.Function):
    """Autograd node for logits that are computed below autograd, without a graph of the layer."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, source: _Source) -> ChunkedLogits:
        ctx.source = source
        return ChunkedLogits(source)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, None]:
        """Recompute the layer with a graph, and run its backward from the logits' gradient [..., classes]."""
        inputs = ctx.source.inputs.detach().requires_grad_()
        with torch.enable_grad():
            _computed(replace(ctx.source, inputs=inputs)).backward(gradients[0])  # into the layer's parameters
        return inputs.grad, None


class WantedWholeError(UserError):
    """Raised if code needs the values of logits that are computed some rows at a time."""


def _of_whole(name: str, func: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Call a function with the values of the logits among its arguments."""
    chunked = [leaf for leaf in pytree.tree_leaves((args, keywords)) if isinstance(leaf, ChunkedLogits)]
    if any(leaf._source.rows is not None for leaf in chunked):
        raise _wanted_whole(name)
    args, keywords = whole_logits((args, dict(keywords)))
    if _changes_in_place(name, keywords):
        chunked[0]._source.changes.by = chunked[0]
    return func(*args, **keywords)


def whole_logits(nest: Any) -> Any:
    """Replace lazy logits in a nest by their values."""
    return pytree.tree_map_only(ChunkedLogits, _whole_of, nest)


def _whole_of(logits: ChunkedLogits) -> Tensor:
    """Compute the logits' values [..., classes]; kept if gradients are enabled."""
    _check_unchanged(logits)
    whole = logits._whole
    if whole is None:
        whole = _computed(logits._source)
        if torch.is_grad_enabled():
            logits._whole = whole
    return whole


def _computed(source: _Source) -> Tensor:
    """Apply the layer, then the casts in the order in which the loss made them."""
    logits = source.layer(source.inputs)
    for dtype in source.dtypes[1:]:
        logits = logits.to(dtype)
    return logits


def _changes_in_place(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether a function writes to its first argument, by its name."""
    special = name == "__setitem__" or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
    return special or "out" in keywords or (name.endswith("_") and not name.endswith("__"))


def _check_unchanged(logits: ChunkedLogits) -> None:
    """Raise UserError if another view of the same logits was changed in place, which this one can't reflect."""
    by = logits._source.changes.by
    if by is not None and by is not logits:
        raise UserError(
            "logits are changed in place, and used in another shape or dtype that was made of them before; change a "
            "copy of them"
        )


def _wanted_whole(name: str) -> WantedWholeError:
    return WantedWholeError(
        f'run.loss_chunk is given, and "{name}" wants the logits whole; use a loss that hands them to cross_entropy '
        "as the output layer gives them, in another shape or dtype at most, or no loss_chunk"
    )


def _cast(logits: ChunkedLogits, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> ChunkedLogits:
    """Cast lazy logits without computing them. Raises WantedWholeError for another device."""
    source = logits._source
    if name in _CASTS:
        dtype = _CASTS[name]
    else:
        values = [*arguments, *keywords.values()]
        like = [value.dtype for value in values if isinstance(value, Tensor)]
        dtype = next((value for value in values if isinstance(value, torch.dtype)), like[0] if like else None)
        devices = {torch.device(value) for value in values if isinstance(value, (str, torch.device))}
        if name == "type" or any(value.type != source.inputs.device.type for value in devices):
            raise _wanted_whole(name)
    if dtype is None or dtype == source.dtypes[-1]:
        return logits
    return _logits(replace(source, dtypes=(*source.dtypes, dtype)))


def _reshaped(
    logits: ChunkedLogits, func: Any, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> ChunkedLogits:
    """The same rows in another shape, or some of them; the classes stay the last dimension, and whole."""
    source = logits._source
    if name == "__getitem__":
        key = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
        last = key[-1] if Ellipsis in [index for index in key if not isinstance(index, Tensor)] else None
        keeps = last in (None, slice(None)) and _dimensions(key) < source.inputs.ndim + (last is not None)
        if not keeps and not (_dimensions(key) == source.inputs.ndim and key[-1] == slice(None)):
            raise _wanted_whole("an index")
        return _logits(replace(source, inputs=source.inputs[arguments[0]]))
    shape = (*source.inputs.shape[:-1], source.classes)
    new_shape = func(torch.empty(shape, device="meta"), *arguments, **keywords).shape
    if not new_shape or new_shape[-1] != source.classes or 0 in shape:
        raise _wanted_whole(name)
    inputs = source.inputs.reshape(*new_shape[:-1], source.inputs.shape[-1])
    return _logits(replace(source, inputs=inputs))


def _dimensions(key: Sequence[Any]) -> int:
    """How many dimensions an index is about, without its ellipsis."""
    return sum(
        index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1
        for index in key
        if index is not Ellipsis and index is not None
    )


def _cross_entropy(
    source: _Source,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of logits [rows, classes] that aren't there, for targets [rows] or [rows, classes].

    Each chunk is a checkpoint: its forward leaves the sum of its losses and no logits. With `shared` this rank takes
    its consecutive part of the rows; sums are then added over the group, or losses gathered where `reduction` is
    none.
    """
    if source.inputs.ndim != 2:  # then the classes are not the last dimension, or there is no batch
        raise UserError(
            f"run.loss_chunk is given, and cross_entropy gets logits of {source.inputs.ndim} dimensions; use "
            "logits.reshape(-1, logits.shape[-1]) and targets.reshape(-1)"
        )
    if size_average is not None or reduce is not None or (weight is not None and reduction == "mean"):
        raise _wanted_whole("cross_entropy with such arguments")
    of_rows = "none" if reduction == "none" else "sum"
    keywords = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": of_rows}
    shared = source.shared
    every, count = target, len(target)
    if shared is not None:
        own_rows = Slices.even(len(source.inputs), shared.group)
        source = replace(source, inputs=scatter_to_region(source.inputs, own_rows, 0))
        first, last = bounds(count, shared.group.rank(), shared.group.size())
        target = target[first:last]
    if source.rows is None:
        losses = [_of_chunk(source, source.inputs, target, weight=weight, **keywords)]
    else:
        losses = [
            checkpoint(
                partial(_of_chunk, source, weight=weight, **keywords),
                inputs,
                targets,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for inputs, targets in zip(source.inputs.split(source.rows), target.split(source.rows), strict=True)
        ]
    if reduction == "none":
        of_each = torch.cat(losses)
        return of_each if shared is None else gather_from_region(of_each, Slices.even(count, shared.group), 0)
    total = torch.stack(losses).sum()
    if shared is not None:
        total = reduce_from_region(total, shared.group)
    if reduction == "sum":
        return total
    return total / (count if every.is_floating_point() else (every != ignore_index).sum())


def _is_other(
    source: _Source, target: Tensor, weight: Any = None, size_average: Any = None, *more: Any, **keywords: Any
) -> bool:
    """Whether a call of cross-entropy can't be computed for a part of the rows."""
    old = size_average is not None or keywords.get("reduce") is not None or len(more) > 1
    weighted = weight is not None and keywords.get("reduction", "mean") == "mean"
    return source.inputs.ndim != 2 or old or weighted


def _of_chunk(source: _Source, inputs: Tensor, target: Tensor, **keywords: Any) -> Tensor:
    """The loss of some rows: [] as a sum, or [rows] with reduction none. With sliced logits a DTensor's whole."""
    with nullcontext() if source.shared is None else source.shared.computing():
        logits = _computed(replace(source, inputs=inputs))
    return whole(F.cross_entropy(logits, target, **keywords))


class SharedLogits:
    """Switch of an output layer whose rows are distributed over the ranks while `able`."""

    def __init__(self) -> None:
        self.able = True


def share_logits(
    model: nn.Module, trace: Trace, group: dist.ProcessGroup, split: Collection[str]
) -> SharedLogits | None:
    """Distribute the rows of the output layer over the ranks of a group in training forwards.

    `split`: modules that work on a rank's own tokens, after which every rank has all tokens. None if the model has no
    output layer after them with more outputs than inputs.
    """
    try:
        head = output_layer(model)
    except UserError:
        return None
    name = next(name for name, module in model.named_modules() if module is head)
    ended = max((call.ended for block in split for call in trace.of(block)), default=0)
    calls = trace.of(name)
    if len(calls) != 1 or calls[0].began < ended or head.out_features <= head.in_features:
        return None
    shared = SharedLogits()
    _chunk(head, None, group, lambda: shared.able)
    return shared


def chunk_logits(model: nn.Module, rows: int, group: dist.ProcessGroup | None = None) -> None:
    """Make the output layer return lazy logits in training forwards, computed `rows` at a time.

    `group`: ranks that all have the layer's input, over which the rows are distributed.
    Raises UserError if the model has no output layer.
    """
    _chunk(output_layer(model), rows, group, lambda: True)


def _chunk(head: nn.Linear, rows: int | None, group: dist.ProcessGroup | None, able: Callable[[], bool]) -> None:
    """Wrap a layer's forward to return `ChunkedLogits`, in training steps and while `able()` is true."""

    def chunked(forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        # Without gradients nothing is saved, and evaluations and comparisons may need the values.
        if not (torch.is_grad_enabled() and head.training and able()):
            return forward(inputs)
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        classes = head.out_features
        shared = None if group is None else _Shared.of(head, group)
        return _logits(
            _Source(inputs=inputs, layer=forward, classes=classes, dtypes=(dtype,), rows=rows, shared=shared)
        )

    wrap_forward(head, chunked)


def output_layer(model: nn.Module) -> nn.Linear:
    """The linear layer that gives a model's logits: the one that transformers names, or the widest outside blocks.

    Raises UserError where there is none.
    """
    named = getattr(model, "get_output_embeddings", None)
    layer = named() if callable(named) else None
    if layer is None:
        inside = {module for block in repeated_layers(model) for module in block.modules()}
        linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in inside]
        layer = max(linears, key=lambda module: module.out_features, default=None)
    if not isinstance(layer, nn.Linear):
        what = "no linear layer" if layer is None else f"no linear layer but a {type(layer).__name__}"
        raise UserError(f"run.loss_chunk is given, and the model has {what} that gives logits; use no loss_chunk")
    return layer
