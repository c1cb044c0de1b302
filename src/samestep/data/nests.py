"""Nests: iterate over the tensors in modules' inputs and outputs in a fixed order, replace and compare them.

`torch.utils._pytree` opens tuples, lists, dictionaries and classes that were registered with it. Models also hand on
dataclasses, packed sequences and objects of their own.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def map_tensors(function: Callable[[Any], Any], nest: Any, kind: type | tuple[type, ...] = Tensor) -> Any:
    """Copy a nest with `function` applied to each tensor (or object of `kind`), in a fixed order.

    The order is that of tuples and lists, of mappings as they iterate, and of dataclass fields and attributes as they
    were defined. Two ranks that hold nests of the same form see their tensors in the same order.
    """
    if isinstance(nest, kind):
        return function(nest)
    if isinstance(nest, tuple):
        made = [map_tensors(function, item, kind) for item in nest]
        # Past the class's own `__new__`, which may ask more of a tensor than what stands for it has.
        return type(nest)._make(made) if hasattr(nest, "_fields") else type(nest)(made)  # pyright: ignore
    if isinstance(nest, list):
        return [map_tensors(function, item, kind) for item in nest]
    if isinstance(nest, Mapping):
        return _map_values(function, nest, kind)
    attributes = _attributes(nest)
    if not attributes:
        return nest
    made = copy.copy(nest)
    for name, value in attributes.items():
        object.__setattr__(made, name, map_tensors(function, value, kind))
    return made


def _map_values(function: Callable[[Any], Any], nest: Mapping[Any, Any], kind: type | tuple[type, ...]) -> Any:
    values = {key: map_tensors(function, value, kind) for key, value in nest.items()}
    if type(nest) is dict or not hasattr(nest, "__setitem__"):
        return values
    if is_dataclass(nest):  # a mapping of its own fields
        return type(nest)(**values)
    made = copy.copy(nest)
    for key, value in values.items():
        made[key] = value  # pyright: ignore[reportIndexIssue]
    return made


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that may hold tensors: a dataclass's fields, or those of a custom class."""
    if isinstance(value, (type, nn.Module)) or callable(value):
        return {}
    if is_dataclass(value):
        return {field_.name: getattr(value, field_.name) for field_ in fields(value) if hasattr(value, field_.name)}
    attributes = getattr(value, "__dict__", {})
    return {name: held for name, held in attributes.items() if isinstance(held, (Tensor, list, tuple, dict))}


def tensors_in(nest: Any, kind: type | tuple[type, ...] = Tensor) -> list[Any]:
    """Every tensor (or object of `kind`) of a nest, in the order of `map_tensors`."""
    if isinstance(nest, kind):
        return [nest]
    if isinstance(nest, (tuple, list)):
        inside = list(nest)
    elif isinstance(nest, Mapping):
        inside = list(nest.values())
    else:
        inside = list(_attributes(nest).values())
    return [tensor for item in inside for tensor in tensors_in(item, kind)]


def equal(first: Any, second: Any) -> bool:
    """Whether two nests hold the same values; what can't be compared counts as the same."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same_kind = (first.shape, first.dtype, first.layout) == (second.shape, second.dtype, second.layout)
        return same_kind and (first.layout is not torch.strided or _equal_values(first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, (bool, int, float, str, bytes)) and isinstance(second, type(first)):
        return first == second or (first != first and second != second)
    return type(first) is type(second)


def _equal_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same numbers at the same places, or NaN at both."""
    return torch.equal(first, second) or bool(((first == second) | ((first != first) & (second != second))).all())
