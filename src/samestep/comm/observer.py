"""Observer: a dispatch mode that sees every operator that a block of code runs, and changes nothing.

PyTorch calls modes one within the other, which takes tens of microseconds an operator and mode. Where a mode runs
that hosts observers, such as that of steps without values, it calls them itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from samestep.torch_internals.operators import EagerMode, active_modes
from samestep.torch_internals.sharded import AsyncCollectiveTensor


class HostsObservers:
    """Interface of a mode that calls observers for the operators that it runs."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []


class Observer(EagerMode):
    """A mode with callbacks before and after each operator, in the caller's thread and in autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self._hosts: list[HostsObservers | None] = []

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator is about to run."""

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator has run."""

    def __enter__(self) -> Self:
        modes = active_modes()
        host = modes[-1] if modes and isinstance(modes[-1], HostsObservers) else None
        self._hosts.append(host)
        if host is None:
            return super().__enter__()
        host.observers.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        host = self._hosts.pop()
        if host is None:
            super().__exit__(*exception)
        else:
            host.observers.remove(self)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if decomposes(types):
            return NotImplemented
        keywords = kwargs or {}
        self.before(func, args, keywords)
        result = func(*args, **keywords)
        self.after(func, args, keywords, result)
        return result


def decomposes(types: Sequence[type]) -> bool:
    """Whether tensors have a dispatch of their own that comes first, and calls the operators on plain tensors."""
    return any(issubclass(type_, (DTensor, AsyncCollectiveTensor)) for type_ in types)


def operands(*arguments: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or results, also in lists and dictionaries, in their order."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += operands(*argument)
        elif isinstance(argument, dict):
            tensors += operands(*argument.values())
    return tensors
