"""What code keeps outside of a model, in globals, classes and caches, while its forward runs without values.

A tensor without values that stays there would be read in the next forward, as a failure of the model that is none.
"""

import builtins
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.torch_internals.fakes import FakeTensor
from samestep.torch_internals.operators import without_function_modes, without_modes

_NOT_LOOKED_AT = frozenset({"torch", "samestep", "numpy", "typing", "builtins", *sys.stdlib_module_names})
_Cached = type(lru_cache(int))
_DEPTH = 3  # of lists in mappings in objects


@contextmanager
def imports_alone() -> Iterator[None]:
    """Context in which modules that are imported run outside of all modes, with the default dtype of before.

    A library that is imported first in a forward makes its tables once, and for every forward to come.
    """
    importing, by_name, dtype = builtins.__import__, importlib.import_module, torch.get_default_dtype()
    builtins.__import__, importlib.import_module = _outside(importing, dtype), _outside(by_name, dtype)
    try:
        yield
    finally:
        builtins.__import__, importlib.import_module = importing, by_name


def _outside(importing: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Wrap a function that imports modules."""

    def load(*arguments: Any, **keywords: Any) -> Any:
        calling = sys._getframe().f_back
        # None: C++ imports, as in the threads in which autograd runs an accelerator's backward.
        caller = "torch" if calling is None else str(calling.f_globals.get("__name__"))
        if caller.partition(".")[0] in _NOT_LOOKED_AT:  # PyTorch imports in calls of every operator
            return importing(*arguments, **keywords)
        now = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with without_modes(), without_function_modes(TorchFunctionMode):
                return importing(*arguments, **keywords)
        finally:
            torch.set_default_dtype(now)

    return load


@contextmanager
def code_kept(*models: nn.Module) -> Iterator[None]:
    """Context of forwards without values: no tensor without values stays in the code of the models' classes.

    That is in globals of the files that define them and of the functions that these import, in the classes, and in
    caches of functions. What has values stays as the forward has left it.
    """
    spaces = list(_spaces(models))
    before = [(space, dict(vars(space))) for space in spaces]
    contents = [
        (value, value.copy())
        for _, names in before
        for value in names.values()
        if type(value) in (dict, list, set) and len(value) < 10_000
    ]
    try:
        with imports_alone():
            yield
    finally:
        for space, names in before:
            _restore_names(space, names)
        for holder, content in contents:
            if _without_values(holder):
                holder.clear()
                holder.extend(content) if isinstance(holder, list) else holder.update(content)
        for space in spaces:
            for value in list(vars(space).values()):
                _forget_results(value)


def _spaces(models: tuple[nn.Module, ...]) -> Iterator[ModuleType | type]:
    """The classes of the models' modules, the files that define them, and those of the functions that they import."""
    kinds = dict.fromkeys(kind for model in models for module in model.modules() for kind in type(module).__mro__)
    kinds = [kind for kind in kinds if _is_looked_at(kind.__module__)]
    files = dict.fromkeys(kind.__module__ for kind in kinds)
    imported = {
        value.__module__
        for file in files
        for value in list(vars(sys.modules[file]).values())
        if isinstance(value, FunctionType) and _is_looked_at(value.__module__)
    }
    yield from kinds
    yield from (sys.modules[file] for file in (*files, *sorted(imported - files.keys())))


def _is_looked_at(file: Any) -> bool:
    return isinstance(file, str) and file in sys.modules and file.partition(".")[0] not in _NOT_LOOKED_AT


def _restore_names(space: ModuleType | type, before: Mapping[str, Any]) -> None:
    """Undo what a module's or class's names were given, where that is without values."""
    for name, value in list(vars(space).items()):
        if (name not in before or before[name] is not value) and _without_values(value):
            if name in before:
                setattr(space, name, before[name])
            else:
                delattr(space, name)


def _forget_results(value: Any) -> None:
    """Clear the cache of a function (functools.lru_cache) that holds tensors without values."""
    cached = getattr(value, "__func__", value)  # of a static or class method
    if isinstance(cached, _Cached) and cached.cache_info().currsize:
        # The dictionary of results, or links to them, among what belongs to the function itself.
        parts = [part for part in gc.get_referents(cached) if not isinstance(part, (ModuleType, FunctionType, type))]
        if any(_without_values(gc.get_referents(part)) for part in parts):
            cached.cache_clear()


def _without_values(value: Any, depth: int = 0) -> bool:
    """Whether tensors without values are in a value, or in the lists, mappings and plain objects that it has."""
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    if depth == _DEPTH or isinstance(value, (ModuleType, type, FunctionType, str, int, float, nn.Module)):
        return False
    if isinstance(value, Mapping):
        parts: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values()
    return any(_without_values(part, depth + 1) for part in list(parts))
