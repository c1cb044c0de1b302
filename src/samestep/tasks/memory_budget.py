"""A model that fits only into the memory of many ranks: its build in one process is stopped, or it is built small."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.launch.memory import available_memory
from samestep.sizes import binary_size
from samestep.torch_internals import pytree
from samestep.torch_internals.operators import TorchDispatchMode

# A model with its gradients, once in float32 and once in float64, and the activations of a few samples.
_PART = 4

_SMALL = 2**16  # bytes; smaller storages aren't counted

_LAYERS = 2  # of a model that is built small: one may hand on to another
_COUNTS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers", "depth")


class TooLargeError(Exception):
    """The model needs more memory than the check may use."""


class Budget(TorchDispatchMode):
    """Raise TooLargeError as soon as the live tensors that were made in this mode exceed a memory budget.

    The error comes before memory runs out, since the system gives a process memory on first write. `most`: bytes;
    None: a quarter of the memory that this process can have.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = available_memory() // _PART if most is None else most
        self._alive = 0
        self._known: set[int] = set()  # addresses of storages that still exist

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed; once, however many tensors share it."""
        size, place = storage.nbytes(), storage.data_ptr()
        if size < _SMALL or place in self._known:
            return
        self._known.add(place)
        self._alive += size
        weakref.finalize(storage, self._free, place, size)
        if self._most is not None and self._alive > self._most:
            raise TooLargeError(
                f"the model takes more than {binary_size(self._most)}, a quarter of the memory that one process "
                "can have here"
            )

    def _free(self, place: int, size: int) -> None:
        """Subtract a storage that was freed."""
        self._known.discard(place)
        self._alive -= size


def built_within(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model, or, if it takes more than the budget, one of its configuration with two layers.

    What is found by trying a model with a configuration of transformers (its loss, its inputs) is the same with fewer
    layers. Raises UserError for a model that is too large and can't be made smaller.
    """
    try:
        with Budget():
            return build()
    except TooLargeError as error:
        small = _small(build)
        if small is None:
            raise UserError(
                f"{error}, and it has no configuration by which it could be tried with fewer layers; use a host "
                "with more memory"
            ) from None
    try:
        with Budget():
            return small()
    except TooLargeError as error:
        raise UserError(f"{error}, with {_LAYERS} layers, too; use a host with more memory") from None


def _small(build: Callable[[], nn.Module]) -> Callable[[], nn.Module] | None:
    """How to build a model of the same configuration with few layers; None if it has no number of layers."""
    with torch.device("meta"):
        whole = build()
    config = copy.deepcopy(getattr(whole, "config", None))
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))] if config else []
    shrunk = [_with_few_layers(part) for part in parts]
    if not any(shrunk):
        return None
    dtype = next((parameter.dtype for parameter in whole.parameters() if parameter.is_floating_point()), None)
    return lambda: type(whole)(config).to(dtype)


def _with_few_layers(config: Any) -> bool:
    """Set a configuration's numbers of layers, and cut its lists of an entry a layer. False if it has none."""
    lengths = {name: getattr(config, name, None) for name in _COUNTS}
    numbers = {name: number for name, number in lengths.items() if isinstance(number, int) and number > _LAYERS}
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) in numbers.values():
            setattr(config, name, value[:_LAYERS])
    for name in numbers:
        setattr(config, name, _LAYERS)
    return bool(numbers)
