"""Allocations: the memory of tensors that a block of code makes, when each begins and ends, and the peak of some."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

# Operators of FSDP2 that put whole parameters together from shards of them.
_GATHERING = frozenset({"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"})


class Allocations(TorchDispatchMode):
    """Follows every storage that operators make, until it is freed or an optimizer steps.

    Operators pass PyTorch's dispatcher, where this mode sees their results; a storage that none of their arguments
    had is new. It counts until its last tensor is gone. It sees no memory that an operator takes and gives back
    within itself, and none of the allocator's own (rounding, fragments, caches).
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []  # (storage's number, bytes more or fewer), as time goes by
        self._numbers: Any = WeakIdKeyDictionary()  # storage -> its number
        self._bytes: list[int] = []  # of each storage, at this moment
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []  # alive, so that they call back
        self._gathered: set[int] = set()
        self._over = False

    @contextmanager
    def follow(self) -> Iterator[None]:
        """See every storage that is made, resized or freed inside, until an optimizer steps."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            before = storage.nbytes()
            resize(storage, size)
            self._resized(storage, before)
            return storage

        # FSDP2 frees a gathered parameter by resizing its storage to nothing, which passes no dispatcher.
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        hook = register_optimizer_step_pre_hook(lambda *_: self._stop())
        try:
            with self:
                yield
        finally:
            hook.remove()
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            self._stop()

    def peak(self, *, without: Iterable[Tensor]) -> int:
        """Most bytes at one moment, of all but gathered parameters and what these tensors stand in."""
        left_out = {self._numbers.get(tensor.untyped_storage()) for tensor in without}
        return self._peak(set(range(len(self._bytes))) - left_out - self._gathered)

    def peak_gathered(self) -> int:
        """Most bytes at one moment of parameters gathered from shards, and of the messages that gather them."""
        return self._peak(self._gathered)

    def _peak(self, chosen: Collection[int]) -> int:
        now = most = 0
        for number, change in self._events:
            if number in chosen:
                now += change
                most = max(most, now)
        return most

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented  # its own dispatch comes first, and calls the operators on plain tensors
        result = func(*args, **(kwargs or {}))
        if not self._over:
            known = {id(storage) for storage in _storages((args, kwargs))}
            for storage in _storages(result):
                if id(storage) not in known and storage not in self._numbers:
                    self._begin(storage)
            if func._schema.name in _GATHERING:
                self._gathered |= {
                    self._number(storage) for storage in _storages((result, (kwargs or {}).get("out")))
                }
        return result

    def _number(self, storage: torch.UntypedStorage) -> int:
        return self._numbers[storage] if storage in self._numbers else self._begin(storage)

    def _begin(self, storage: torch.UntypedStorage, *, first: bool = False) -> int:
        """Give a storage its number; `first`: it was there before anything was seen."""
        number = len(self._bytes)
        self._numbers[storage] = number
        self._bytes.append(storage.nbytes())
        self._ends.append(weakref.ref(storage, partial(self._end, number)))
        self._events.insert(0 if first else len(self._events), (number, storage.nbytes()))
        return number

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        if self._over:
            return
        if storage not in self._numbers:
            number = self._begin(storage, first=before > 0)
            if before > 0:
                self._events[0] = (number, before)
                self._change(number, storage.nbytes() - before)
            return
        number = self._numbers[storage]
        self._change(number, storage.nbytes() - self._bytes[number])
        self._bytes[number] = storage.nbytes()

    def _end(self, number: int, _: Any) -> None:
        self._change(number, -self._bytes[number])
        self._bytes[number] = 0

    def _change(self, number: int, change: int) -> None:
        if not self._over:
            self._events.append((number, change))

    def _stop(self) -> None:
        self._over = True


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(nest) if _is_plain(leaf)]


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
