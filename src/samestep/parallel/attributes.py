"""Snapshots of the attributes of a model's modules, to undo the changes of a trace or an attempt."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from operator import is_
from types import MethodType
from typing import Any

from torch import nn

from samestep.torch_internals import pytree


class Attributes:
    """Snapshot of the attributes of all modules of models, and of the contents of their dictionaries, lists and sets.

    Parameters, buffers, hooks and replaced forwards are among them. Tensors are kept by reference, not copied. What
    did not change is not touched by `restore`: a model's own container may refuse to be written to.
    """

    def __init__(self, *models: nn.Module) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._before = [(module, dict(vars(module))) for module in modules]
        self._contents = [
            (value, _content(value))
            for _, attributes in self._before
            for value in attributes.values()
            if isinstance(value, (dict, list, set))
        ]

    def changed(self) -> Iterator[Any]:
        """Yield the attributes that were replaced since the snapshot."""
        for module, attributes in self._before:
            for name, value in vars(module).items():
                if attributes.get(name) is not value:
                    yield value

    def restore(self) -> None:
        """Restore the snapshot. Dictionaries, lists and sets stay the same objects, as others may refer to them."""
        for module, attributes in self._before:
            now = vars(module)
            # Also removes new attributes: one that a forward has set would be read by the next forward.
            for name in [name for name in now if name not in attributes]:
                del now[name]
            for name, value in attributes.items():
                if name not in now or now[name] is not value:
                    now[name] = value
        for holder, content in self._contents:
            if not _alike(_content(holder), content):
                _refill(holder, content)


# Dictionaries, lists and sets are read and written by the methods of Python's own classes: those of a subclass may
# refuse to write (a frozen configuration), construct another object (`copy`), or do more than that.


def _content(holder: Any) -> list[Any]:
    """The elements of a list or set, or the keys and values of a dictionary in turn, by reference."""
    if isinstance(holder, dict):
        items = OrderedDict.items(holder) if isinstance(holder, OrderedDict) else dict.items(holder)
        return [part for item in items for part in item]
    return list(list.__iter__(holder) if isinstance(holder, list) else set.__iter__(holder))


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two contents are the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _refill(holder: Any, content: Sequence[Any]) -> None:
    """Give a dictionary, list or set a content that it had before."""
    if isinstance(holder, dict):
        kind: Any = OrderedDict if isinstance(holder, OrderedDict) else dict
        kind.clear(holder)
        for key, value in zip(content[::2], content[1::2], strict=True):
            kind.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(None), content)
    else:
        set.clear(holder)
        set.update(holder, content)


def modules_in(nest: Any) -> list[nn.Module]:
    """The modules among a call's arguments, which may be no part of the module that is called."""
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, nn.Module)]


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Wrap a module's forward; the wrapper stays when the forward itself is replaced later.

    `around` is called with the forward and its arguments. The first wrapper is innermost. `replace_forward` replaces
    the forward inside of all wrappers, so splitting tokens (a wrapper) and slicing (a replacement) can come in either
    order.
    """
    module.forward = _wrapped(module.forward, around)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward inside of its wrappers."""
    module.forward = _with_innermost(module.forward, forward)


def wrap_innermost(module: nn.Module, around: Callable[..., Any]) -> None:
    """Wrap a module's forward inside of all its present wrappers."""
    forward = module.forward
    while isinstance(inside := getattr(forward, "__self__", None), _Inside):
        forward = inside.inner
    replace_forward(module, _wrapped(forward, around))


@dataclass(frozen=True, kw_only=True)
class _Inside:
    """A wrapped forward: the inner forward, and the function around it."""

    inner: Callable[..., Any]
    around: Callable[..., Any]


def _wrapped(inner: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    # A bound method of a small object, for two reasons. The compiler guards callable objects and partial() by their
    # identity, so it would recompile for every block. copy.deepcopy doesn't copy a nested function, so the copy of a
    # module would compute with the original's weights.
    def forward(inside: _Inside, *arguments: Any, **keywords: Any) -> Any:
        return inside.around(inside.inner, *arguments, **keywords)

    def unbound(*_: Any) -> None:
        """Carrier of the wrapper's signature: that of `inner`, preceded by the bound object."""

    update_wrapper(forward, inner)
    of_inner = inspect.signature(inner)
    first = inspect.Parameter("inside", inspect.Parameter.POSITIONAL_ONLY)
    vars(unbound)["__signature__"] = of_inner.replace(parameters=[first, *of_inner.parameters.values()])
    # `__signature__` is not set on `forward` itself: functools.wraps would copy it to a function around this one.
    vars(forward)["__wrapped__"] = unbound
    return MethodType(forward, _Inside(inner=inner, around=around))


def _with_innermost(method: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    inside = getattr(method, "__self__", None)
    if not isinstance(inside, _Inside):
        return forward
    return _wrapped(_with_innermost(inside.inner, forward), inside.around)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode, and restore each module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, before in modes.items():
            module.training = before


def forget_results(model: nn.Module) -> None:
    """Clear the caches of methods (functools.lru_cache), which after a trace hold tensors without values."""
    for clear in _clears(model):
        clear()


def keeps_results(model: nn.Module) -> bool:
    """Whether methods of a model's modules have such caches."""
    return any(True for _ in _clears(model))


def _clears(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield what clears the cache of each method that has one."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    for kind in kinds:
        for method in vars(kind).values():
            for function in _inside(method):
                clear = getattr(function, "cache_clear", None)
                if callable(clear):
                    yield clear


def _inside(method: Any) -> Iterator[Any]:
    """Yield a method and the functions in its closure, such as those that a decorator wraps."""
    method = getattr(method, "__func__", method)  # of a static or class method
    yield method
    for cell in getattr(method, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
