"""A record of how tensors were computed, from which the values of any one of them are computed again.

A tensor is known by its region of a storage, so views need no steps of their own: only operators that make a
storage or write into one are steps.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where a tensor's values lie: strides and offset (in elements) within a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An operator, called once. Its arguments hold regions for recorded tensors, and copies of all others."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Region | None, ...]  # of each leaf of what it returned
    writes: frozenset[int]  # storages that it made or wrote into
    generator_state: Tensor | None  # of the CPU generator before it, where it is random

    @property
    def touches(self) -> frozenset[int]:
        """The storages that it read or wrote."""
        return self.writes | {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if _is_region(leaf)}


@dataclass(kw_only=True, slots=True)
class Memory:
    """Values computed again: the storages that there are, and the steps whose effects are in them."""

    storages: dict[int, UntypedStorage] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def tensor(self, region: Region) -> Tensor:
        """The tensor in a region; what is written into it changes the storage."""
        storage = self.storages[region.storage]
        return torch.empty(0, dtype=region.dtype).set_(storage, region.offset, region.size, region.stride)

    def run(self, step: Step) -> None:
        """Call a step's operator again, with the random numbers that it drew."""
        args, kwargs = tree_map_only(Region, self.tensor, (step.args, step.kwargs))
        if step.generator_state is None:
            made = step.operator(*args, **kwargs)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(step.generator_state)
                made = step.operator(*args, **kwargs)
        for region, result in zip(step.results, tree_leaves(made), strict=True):
            if region is not None and region.storage not in self.storages:
                self._keep(region, result)

    def _keep(self, region: Region, result: Tensor) -> None:
        """Keep a new storage. Few operators lay out their result otherwise on a CPU than on the meta device."""
        geometry = (tuple(result.stride()), result.storage_offset())
        self.storages[region.storage] = result.untyped_storage()
        if geometry != (region.stride, region.offset):
            last = region.offset + sum((n - 1) * step for n, step in zip(region.size, region.stride, strict=True))
            self.storages[region.storage] = UntypedStorage((last + 1) * result.element_size())
            self.tensor(region).copy_(result)


class Record:
    """The steps of a construction, in their order."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)  # storage -> steps, in their order

    def add(self, step: Step) -> None:
        for storage in step.writes:
            self._writers[storage].append(len(self._steps))
        self._steps.append(step)

    @torch.no_grad()
    def compute(
        self, storages: Collection[int], memory: Memory | None = None, alive: Callable[[int], bool] = lambda _: False
    ) -> Memory:
        """Compute storages as they were at the record's end, going on from `memory` where that can be.

        A storage that they were computed from is freed after its last use, unless it is `alive`.
        """
        memory = memory or Memory()
        history = self._history(storages)
        todo = [number for number in history if number not in memory.done]
        if not self._follows(todo, storages, memory):
            memory.storages.clear()
            memory.done.clear()
            todo = history
        last_use = {storage: number for number in todo for storage in self._steps[number].touches}
        wanted = set(storages)
        for number in todo:
            step = self._steps[number]
            memory.run(step)
            memory.done.add(number)
            for storage in step.touches:
                if last_use[storage] == number and storage not in wanted and not alive(storage):
                    del memory.storages[storage]
        return memory

    def _history(self, storages: Collection[int]) -> list[int]:
        """The steps that the storages' contents depend on, in their order."""
        chosen: set[int] = set()
        seen: dict[int, int] = {}  # storage -> its writers before this step are chosen
        pending = [(storage, len(self._steps)) for storage in storages]
        while pending:
            storage, before = pending.pop()
            writers = self._writers[storage]
            first = bisect_left(writers, seen.get(storage, 0))
            for number in writers[first : bisect_left(writers, before)]:
                if number not in chosen:
                    chosen.add(number)
                    pending.extend((other, number) for other in self._steps[number].touches)
            seen[storage] = max(before, seen.get(storage, 0))
        return sorted(chosen)

    def _follows(self, todo: Sequence[int], storages: Collection[int], memory: Memory) -> bool:
        """Whether `memory` holds what the steps to do begin with, as it was before the first of them."""
        if todo and memory.done and todo[0] < max(memory.done):
            return False
        there = set(memory.storages)
        for number in todo:
            step = self._steps[number]
            made = {region.storage for region in step.results if region is not None}
            if not step.touches <= there | made:
                return False
            there |= made
        return there >= set(storages)


def _is_region(leaf: Any) -> bool:
    return isinstance(leaf, Region)
