"""Calls a model with each half of its batch, and joins the results: rounding as with micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.recording.calls import Call
from samestep.recording.shards import unwrapped
from samestep.torch_internals.modules import AnyBatchNorm


class Halves:
    """Splits each training forward of a model in two, if everything that it returns has the batch's rows.

    A model that returns a mean over its rows, or normalizes over the batch, is called once with all of them.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        """`done` is called after each forward that was split."""
        self._done = done
        self._model: nn.Module | None = None  # the model whose next call is split
        self._batch = 0

    def begin(self, model: nn.Module, batch: int) -> None:
        """Prepare to split a forward of a model with `batch` rows."""
        inner = unwrapped(model)  # not DDP's forward, which is for one backward
        by_batch = any(isinstance(module, AnyBatchNorm) and module.training for module in inner.modules())
        self._model = None if by_batch or batch < 2 else inner
        self._batch = batch

    def called(self, call: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the prepared model with two halves; if the results can't be joined, with the whole batch."""
        if module is not self._model:
            return call(module, *args, **kwargs)
        self._model = None
        batch, middle = self._batch, self._batch // 2
        results = []
        for rows in (slice(middle), slice(middle, None)):
            arguments, named = _of_rows((args, kwargs), batch, rows)
            results.append(call(module, *arguments, **named))
        try:
            joined = _joined(results, (middle, batch - middle))
        except _NotByRowsError:
            return call(module, *args, **kwargs)
        self._done()
        return joined


class _NotByRowsError(Exception):
    """The model returned something other than tensors with the batch's rows."""


def _of_rows(value: Any, batch: int, rows: slice) -> Any:
    """Slice the rows of each tensor argument that has the batch's rows."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() > 0 and value.shape[0] == batch else value
    return _like(value, lambda _, tensor: _of_rows(tensor, batch, rows))


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of two calls, concatenating tensors along their rows."""
    first = values[0]
    if isinstance(first, Tensor):
        if any(part.dim() == 0 or part.shape[0] != size for part, size in zip(values, sizes, strict=True)):
            raise _NotByRowsError
        return torch.cat([*values])
    if first is None:
        return None
    if not isinstance(first, (Mapping, list, tuple)) and not is_dataclass(first):
        raise _NotByRowsError
    return _like(first, lambda key, _: _joined([_at(part, key) for part in values], sizes))


def _at(value: Any, key: Any) -> Any:
    return value[key] if isinstance(value, (Mapping, list, tuple)) else getattr(value, key)


def _like(value: Any, made: Callable[[Any, Any], Any]) -> Any:
    """Build a container of the same type from `made(key, value)`; other values are returned unchanged."""
    if isinstance(value, Mapping):
        items = {key: made(key, item) for key, item in value.items()}
        return type(value)(**items) if is_dataclass(value) else type(value)(items)  # pyright: ignore[reportCallIssue]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(made(at, item) for at, item in enumerate(value)))
    if isinstance(value, (list, tuple)):
        return type(value)(made(at, item) for at, item in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{item.name: made(item.name, getattr(value, item.name)) for item in fields(value)})
    return value
