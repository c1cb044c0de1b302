"""Functions that were replaced after other modules had imported them: they are replaced there as well."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import isclass, isfunction, isroutine
from types import ModuleType
from typing import Any

_AT_FIRST = frozenset(sys.modules)  # what was imported before the script's own modules: PyTorch, without its parts


@contextmanager
def rebinding(*, everywhere: bool = False) -> Iterator[None]:
    """Whatever of PyTorch is replaced inside is replaced too in modules that were imported early.

    A server imports what a script imports before it is forked: `from torch.nn.utils import clip_grad_norm_` has
    the original then, where a script that imports it later gets what stands in its place. `everywhere`: in a process
    that has imported the script before the recorder.
    """
    before = {(module.__name__, name): value for module, name, value in _names_of("torch")}
    yield
    replaced: dict[int, tuple[Any, Any]] = {}
    for module, name, value in _names_of("torch"):
        old = before.get((module.__name__, name))
        if old is not None and old is not value and (isroutine(old) or isclass(old)):
            replaced[id(old)] = old, value
    first = {name for name in sys.modules if name.partition(".")[0] == "torch"} if everywhere else _AT_FIRST
    later = [module for name, module in list(sys.modules.items()) if name not in first and _is_of_others(module)]
    for names in _namespaces(later):
        for name, value in list(names.items()):
            if (pair := replaced.get(id(value))) is not None and pair[0] is value:
                names[name] = pair[1]


def _namespaces(modules: Iterable[ModuleType]) -> Iterator[dict[str, Any]]:
    """The names of modules; and those that the functions of a started process's main module see, which are a copy."""
    seen: set[int] = set()
    for module in modules:
        values = list(vars(module).values()) if module.__name__ == "__mp_main__" else []
        values += [value for owner in values if isclass(owner) for value in vars(owner).values()]
        own = [value for value in values if isfunction(value) and value.__module__ == module.__name__]
        for names in (vars(module), *(value.__globals__ for value in own)):
            if id(names) not in seen:
                seen.add(id(names))
                yield names


def _names_of(package: str) -> Iterator[tuple[ModuleType, str, Any]]:
    """All names of the modules of a package that are imported."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(f"{package}.")):
            for own, value in list(vars(module).items()):
                yield module, own, value


def _is_of_others(module: Any) -> bool:
    return isinstance(module, ModuleType) and not module.__name__.startswith("samestep.")
