"""Samples as a data set makes them: random numbers that depend on the sample alone, and a hash of each.

Data sets that augment at random draw other numbers wherever a sample stands in another batch or on another rank. In
all runs a sample is made with generators seeded by its number and the pass over the data, whose states are restored
afterwards; so the same sample has the same augmentation. What the script's own generators would have given is noted:
ranks whose generators are equal would augment different samples alike.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from samestep.recording import generators
from samestep.recording.store import RecordWriter

_DEPTH = 6
_STRETCH = 1_000_003  # seeds of the passes over the data lie so far apart


class Fetching:
    """Makes samples, in the process of the script or in workers that it forks."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self._datasets: list[Any] = []  # kept alive, so that no id is reused
        self._passes: dict[int, int] = {}
        self._fetchers = 0  # of a worker process
        self.inside = False  # whether a sample is being made

    def number_of(self, dataset: Any) -> int:
        """The number of a data set, in the order in which they were first used."""
        for number, other in enumerate(self._datasets):
            if other is dataset:
                return number
        self._datasets.append(dataset)
        return len(self._datasets) - 1

    def begun(self, dataset: Any) -> None:
        """A pass over a data set begins."""
        number = self.number_of(dataset)
        self._passes[number] = self._passes.get(number, 0) + 1

    def fetcher_made(self) -> None:
        """A worker that is kept makes one for each pass."""
        if get_worker_info() is not None:
            self._fetchers += 1

    def sample(self, dataset: Any, number: Any, get: Callable[[], Any]) -> Any:
        """Make one sample with random numbers of its own."""
        if not isinstance(number, int):
            return get()
        data = self.number_of(dataset)
        passed = self._passes.get(data, 0) + max(0, self._fetchers - 1)
        before = generators.states()
        seed = passed * _STRETCH + number
        generators.seed(seed, seed, seed % (1 << 32))
        seeded = generators.states()
        self.inside = True
        try:
            value = get()
        finally:
            self.inside = False
            after = generators.states()
            generators.restore(before)
        drawn = {name: _hash(before[name]) for name in seeded if _hash(after[name]) != _hash(seeded[name])}
        self._writer.event("sample", data=data, index=number, passed=passed, hash=_hash(value), drawn=drawn)
        return value


def _hash(value: Any) -> str:
    digest = blake2b(digest_size=8)
    for part in _bytes(value, _DEPTH):
        digest.update(part)
    return digest.hexdigest()


def _bytes(value: Any, depth: int) -> Iterator[bytes]:
    """What a value consists of; of objects that are no containers and give no bytes, their class."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (str, int, float, bytes, type(None))):
        yield repr(value).encode()
    elif depth and isinstance(value, Mapping):
        for key in value:
            yield repr(key).encode()
            yield from _bytes(value[key], depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _bytes(item, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _bytes(getattr(value, item.name), depth - 1)
    elif hasattr(value, "tobytes"):
        yield value.tobytes()  # pyright: ignore[reportAttributeAccessIssue]
    else:
        yield type(value).__name__.encode()
