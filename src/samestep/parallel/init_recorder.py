"""A model built without memory for its tensors, and a record of how each would have been computed.

From the record the values of any one tensor are computed again.

Why a record and not a second construction: random numbers come from one generator in the order of construction, so
the values of the last parameter depend on all draws before it. Each random step keeps the generator's state, so one
parameter's numbers are drawn again without those before it. A rank of a sharded model thus holds one whole parameter
at a time, and the model has the very numbers that one process would give it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
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
        """Append a step, and note for each storage that it writes to that it does."""
        for storage in step.writes:
            self._writers[storage].append(len(self._steps))
        self._steps.append(step)

    @torch.no_grad()
    def compute(
        self, storages: Collection[int], memory: Memory | None = None, alive: Callable[[int], bool] = lambda _: False
    ) -> Memory:
        """Compute storages as they were at the record's end, going on from `memory` where that can be.

        A storage that they were computed from is freed after its last use, unless it is `alive`.

        With n steps, of which m touch the wanted storages, this costs the m steps and, at a time, the memory of the
        storages that a later one of them still reads.
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


_aten = torch.ops.aten
_CPU = torch.device("cpu")
_META = torch.device("meta")

# Random operators that overwrite their tensor: what was in it before doesn't matter.
_SAMPLERS = frozenset(
    {
        _aten.bernoulli_,
        _aten.cauchy_,
        _aten.exponential_,
        _aten.geometric_,
        _aten.log_normal_,
        _aten.normal_,
        _aten.random_,
        _aten.uniform_,
    }
)


class Unrecordable(Exception):  # noqa: N818  (not an error: the model is built whole instead)
    """A construction did what a record can't hold."""


class Recording:
    """What is recorded while a model is built: the steps, and which tensors they belong to."""

    def __init__(self) -> None:
        self.record = Record()
        self.trouble: str | None = None  # also where the model's own code caught what was raised
        self.meta_is_asked_for = False  # by Python code, not by an operator for a tensor that is there
        self._storages: dict[int, StorageWeakRef] = {}
        self._memory = Memory()  # what was computed last, to go on from

    def knows(self, tensor: Any) -> bool:
        """Whether this is a recorded tensor."""
        return (
            isinstance(tensor, Tensor)
            and tensor.is_meta
            and tensor.layout == torch.strided
            and not is_traceable_wrapper_subclass(tensor)
            and tensor.untyped_storage()._cdata in self._storages
        )

    def region(self, tensor: Tensor) -> Region:
        """Where a recorded tensor's values lie."""
        if tensor.is_conj() or tensor.is_neg():
            raise self.refuse("a conjugated or negated view")
        return Region(
            storage=tensor.untyped_storage()._cdata,
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def value(self, tensor: Tensor) -> Tensor:
        """A recorded tensor's values as they are now, on the CPU."""
        region = self.region(tensor)
        with _disable_current_modes():
            self.record.compute({region.storage}, self._memory, alive=self._is_alive)
            return self._memory.tensor(region).clone()

    def refuse(self, what: str) -> Unrecordable:
        """The exception for what can't be recorded; the recording is then worth nothing."""
        self.trouble = self.trouble or what
        return Unrecordable(what)

    def add(self, operator: Any, args: Any, kwargs: Any, results: Any, generator_state: Tensor | None) -> None:
        """Record an operator's call; nothing where it only looked at storages in another way."""
        regions = tuple(self._region_of_result(result) for result in tree_leaves(results))
        made = {region.storage for region in regions if region is not None} - self._storages.keys()
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in made:
                storage = tensor.untyped_storage()
                # A weak reference: its memory's address is not given to another storage as long as it is kept.
                self._storages[storage._cdata] = StorageWeakRef(storage)
        writes = made | {self.region(tensor).storage for tensor in written(operator, args, kwargs)}
        if not writes:
            return
        # Whoever made them may write into them later, in ways that can't be seen from here.
        # Other tensors are copied now: whoever made them may change them after.
        kept_args, kept_kwargs = tree_map_only(
            Tensor, lambda t: self.region(t) if self.knows(t) else t.detach().clone(), (args, kwargs)
        )
        if generator_state is not None:
            kept_kwargs = {name: None if name == "generator" else value for name, value in kept_kwargs.items()}
        self.record.add(
            Step(
                operator=operator,
                args=kept_args,
                kwargs=kept_kwargs,
                results=regions,
                writes=frozenset(writes),
                generator_state=generator_state,
            )
        )

    def _region_of_result(self, result: Any) -> Region | None:
        """Where a result's values lie; None for what is no tensor. Raises Unrecordable for other layouts."""
        if not isinstance(result, Tensor):
            return None
        if result.layout != torch.strided or not (type(result) is Tensor or self.knows(result)):
            raise self.refuse(f"a tensor of layout {result.layout} and type {type(result).__name__}")
        return self.region(result)

    def _is_alive(self, storage: int) -> bool:
        return not self._storages[storage].expired()


class _Operators(TorchDispatchMode):
    """Sees every operator, and runs those of recorded tensors on the meta device."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # in here tensors say which device they are on
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator: recorded on the meta device where it makes or takes recorded tensors, else run as it is."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        recorded = [tensor for tensor in tensors if self._recording.knows(tensor)]
        if not tensors:
            return self._make(func, args, kwargs)
        if not recorded:
            return func(*args, **kwargs)
        if any(tensor.is_meta and not self._recording.knows(tensor) for tensor in tensors):
            raise self._recording.refuse(f"{func} of a tensor that was made on the meta device")
        return self._follow(func, args, kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor made of numbers alone."""
        named = {argument.name for argument in func._schema.arguments}
        device = kwargs.get("device") or _CPU
        here = device.type == "cpu" or (device.type == "meta" and not self._recording.meta_is_asked_for)
        if "device" not in named or not here or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        try:
            result = func(*args, **{**kwargs, "device": _META})
        except Exception:  # what can't be made there, or can't be made at all
            return func(*args, **kwargs)
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.layout == torch.strided):
            return func(*args, **{**kwargs, "device": _CPU})
        fixed = {**kwargs, "device": _CPU}
        if "dtype" in named:
            fixed["dtype"] = result.dtype  # the default may be another one later
        self._recording.add(func, args, fixed, result, self._advance(func, args, fixed))
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator of recorded tensors, and of others."""
        into = written(func, args, kwargs)
        into_recorded = [tensor for tensor in into if self._recording.knows(tensor)]
        gives_tensors = all("Tensor" in str(returned.type) for returned in func._schema.returns)
        device = kwargs.get("device")
        elsewhere = device is not None and device.type not in ("cpu", "meta")
        if len(into) > len(into_recorded) or not gives_tensors or elsewhere:
            if into_recorded:
                raise self._recording.refuse(f"{func} of recorded and other tensors")
            return self._run_on_values(func, args, kwargs)
        if device == _CPU and func is _aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            raise self._recording.refuse("a tensor moved to the CPU, where it would be already")
        fixed = {**kwargs, "device": _CPU} if device is not None else kwargs
        try:
            results = func(*_on_meta(args), **_on_meta({**kwargs, **({"device": _META} if device else {})}))
        except Exception as error:
            if into_recorded:
                raise self._recording.refuse(f"{func}, which the meta device lacks") from error
            return self._run_on_values(func, args, kwargs)
        self._recording.add(func, args, fixed, results, self._advance(func, args, fixed))
        return results

    def _run_on_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*self._with_values(args), **self._with_values(kwargs))

    def _with_values(self, arguments: Any) -> Any:
        """Arguments in which recorded tensors are replaced by their values, computed now."""
        recording = self._recording
        return tree_map_only(Tensor, lambda t: recording.value(t) if recording.knows(t) else t, arguments)

    def _advance(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Draw the random numbers that an operator draws, and return the generator's state before."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        state = (kwargs.get("generator") or torch.default_generator).get_state()
        if func.overloadpacket in _SAMPLERS:
            scratch = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            args = (scratch, *args[1:])
        func(*self._with_values(args), **self._with_values(kwargs))
        return state


class _Pretence(TorchFunctionMode):
    """Lets recorded tensors say that they are on the CPU: some initialisers skip what is on the meta device."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and self._recording.knows(args[0]):
            if func in _SAID:
                return _SAID[func]
            if func in _OF_MEMORY:
                raise self._recording.refuse(f"{func.__name__} of a tensor")
            if func is Tensor.tolist:
                return self._recording.value(args[0]).tolist()
            if func is Tensor.cpu:
                return args[0]
            if func is Tensor.new_tensor:
                kwargs = {"device": _CPU, **kwargs}
        self._recording.meta_is_asked_for = str(kwargs.get("device")).startswith("meta")
        try:
            return func(*args, **kwargs)
        finally:
            self._recording.meta_is_asked_for = False


_SAID = {
    Tensor.device.__get__: _CPU,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_cpu.__get__: True,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_meta.__get__: False,  # pyright: ignore[reportAttributeAccessIssue]
}
# They read or lend the memory itself.
_OF_MEMORY = frozenset({Tensor.__array__, Tensor.data_ptr, Tensor.numpy, Tensor.untyped_storage})


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record how tensors are computed inside."""
    recording = Recording()
    with _Operators(recording), _Pretence(recording):
        yield recording


def written(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into."""
    parameters = operator._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), args, strict=False)) | kwargs
    return [
        leaf
        for parameter in parameters
        if parameter.is_write
        for leaf in tree_leaves(given.get(parameter.name))
        if isinstance(leaf, Tensor)
    ]


def _on_meta(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(_META), arguments)
