"""A budget of memory for the check: a model that only fits in many ranks' memory together can't be built in one."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.launch.memory import available_memory

# A model with its gradients, once in float32 and once in float64, and the activations of a few samples.
_PART = 4
_SMALL = 2**16  # bytes of storages that aren't worth following


class TooLargeError(Exception):
    """The model takes more memory than the check may have."""


class Budget(TorchDispatchMode):
    """Raises TooLargeError as soon as the tensors that are made in it, and are still alive, take too much memory.

    Memory that was asked for and not written to yet takes none, so that the error comes before the memory does.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        if most is None and (available := available_memory()) is not None:
            most = available // _PART
        self._most = most
        self._alive = 0
        self._known: set[int] = set()  # addresses of storages that are alive

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, place = storage.nbytes(), storage.data_ptr()
        if size < _SMALL or place in self._known:
            return
        self._known.add(place)
        self._alive += size
        weakref.finalize(storage, self._free, place, size)
        if self._most is not None and self._alive > self._most:
            raise TooLargeError(
                f"the model takes more than {self._most / 2**30:.1f} GiB, a quarter of the memory that one process "
                "can have here"
            )

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._alive -= size
