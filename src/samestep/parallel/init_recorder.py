"""Record the construction of a model on the meta device, so that the values of any one tensor can be computed later.

Why a record and not a second construction: random numbers come from one generator in the order of construction, so
the values of the last parameter depend on all draws before it. Each random operator is recorded with the generator's
state, so one parameter's numbers can be drawn without those before it. A rank of a sharded model thus holds one whole
parameter at a time, and gets the same values as one process.
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

from samestep.torch_internals.operators import (
    DisableTorchFunction,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    schema,
    to_copy,
    without_modes,
)
from samestep.torch_internals.pytree import tree_leaves, tree_map_only
from samestep.torch_internals.tensors import storage_id


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRegion:
    """A tensor's place in a storage: size, strides and offset, in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InitCall:
    """One operator call. Recorded tensors among the arguments are regions, all others are copies."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[StorageRegion | None, ...]  # of each leaf of its result
    writes: frozenset[int]  # storages that it made or wrote into
    generator_state: Tensor | None  # of the CPU generator before the call, if it is random

    @property
    def touches(self) -> frozenset[int]:
        """The storages that it read or wrote."""
        return self.writes | {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if _is_region(leaf)}


@dataclass(kw_only=True, slots=True)
class Memory:
    """Recomputed storages, and the steps that were run on them."""

    storages: dict[int, UntypedStorage] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def tensor(self, region: StorageRegion) -> Tensor:
        """A view of a region of a storage."""
        storage = self.storages[region.storage]
        return torch.empty(0, dtype=region.dtype).set_(storage, region.offset, region.size, region.stride)

    def run(self, step: InitCall) -> None:
        """Run a step's operator with the recorded state of the generator."""
        # The generator is put where it stood when the model was built. So a rank that holds the last layer alone
        # draws that layer's numbers without drawing those of all layers before it.
        args, kwargs = tree_map_only(StorageRegion, self.tensor, (step.args, step.kwargs))
        if step.generator_state is None:
            made = step.operator(*args, **kwargs)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(step.generator_state)
                made = step.operator(*args, **kwargs)
        for region, result in zip(step.results, tree_leaves(made), strict=True):
            if region is not None and region.storage not in self.storages:
                self._keep(region, result)

    def _keep(self, region: StorageRegion, result: Tensor) -> None:
        """Store a result's storage, copied if the operator's CPU and meta results differ in strides or offset."""
        geometry = (tuple(result.stride()), result.storage_offset())
        self.storages[region.storage] = result.untyped_storage()
        if geometry != (region.stride, region.offset):
            last = region.offset + sum((n - 1) * step for n, step in zip(region.size, region.stride, strict=True))
            self.storages[region.storage] = UntypedStorage((last + 1) * result.element_size())
            self.tensor(region).copy_(result)


class Record:
    """The steps of a construction, in their order."""

    def __init__(self) -> None:
        self._steps: list[InitCall] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)  # storage -> steps, in their order

    def add(self, step: InitCall) -> None:
        """Append a step, and index it by the storages that it writes to."""
        for storage in step.writes:
            self._writers[storage].append(len(self._steps))
        self._steps.append(step)

    @torch.no_grad()
    def compute(
        self, storages: Collection[int], memory: Memory | None = None, alive: Callable[[int], bool] = lambda _: False
    ) -> Memory:
        """Compute storages as they were at the record's end, continuing from `memory` if possible.

        Intermediate storages are freed after their last use, unless they are `alive`.

        This runs only the steps on which the wanted storages depend, and at any time holds only the storages that
        later ones of these steps still read.
        """
        memory = memory or Memory()
        history = self._history(storages)
        todo = [number for number in history if number not in memory.done]
        if not self._follows(todo, storages, memory):
            memory.storages.clear()
            memory.done.clear()
            todo = history
        last_use = {storage: number for number in todo for storage in self._steps[number].touches}
        targets = set(storages)
        for number in todo:
            step = self._steps[number]
            memory.run(step)
            memory.done.add(number)
            for storage in step.touches:
                if last_use[storage] == number and storage not in targets and not alive(storage):
                    del memory.storages[storage]
        return memory

    def _history(self, storages: Collection[int]) -> list[int]:
        """The steps that the storages' contents depend on, in their order."""
        # Backwards from the wanted storages: what a step reads must be as it was before that step, so its earlier
        # writers are needed, and what those read. A storage's later writers are not: what another initialization
        # overwrote afterwards was not there yet for whoever read in between.
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
        """Whether the steps in `todo` can be run on `memory`: it has their inputs, and ran no later step."""
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
    return isinstance(leaf, StorageRegion)


_aten = torch.ops.aten
_CPU = torch.device("cpu")
_META = torch.device("meta")

# Random operators that overwrite their tensor, whose earlier contents don't matter.
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
    """Raised if a model's construction can't be recorded."""


class Recording:
    """The record of a model's construction, and the storages of the recorded tensors."""

    def __init__(self) -> None:
        self.record = Record()
        self.trouble: str | None = None  # why recording failed, as the model's code may catch the exception
        self.meta_is_asked_for = False  # whether Python code asked for the meta device explicitly
        self._storages: dict[int, StorageWeakRef] = {}
        self._memory = Memory()  # of the last computation, to continue from

    def knows(self, tensor: Any) -> bool:
        """Whether this is a recorded tensor."""
        return (
            isinstance(tensor, Tensor)
            and tensor.is_meta
            and tensor.layout == torch.strided
            and not is_traceable_wrapper_subclass(tensor)
            and storage_id(tensor.untyped_storage()) in self._storages
        )

    def region(self, tensor: Tensor) -> StorageRegion:
        """The region of a recorded tensor."""
        if tensor.is_conj() or tensor.is_neg():
            raise self.refuse("a conjugated or negated view")
        return StorageRegion(
            storage=storage_id(tensor.untyped_storage()),
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def value(self, tensor: Tensor) -> Tensor:
        """Compute a recorded tensor's current values, on the CPU."""
        region = self.region(tensor)
        with without_modes():
            self.record.compute({region.storage}, self._memory, alive=self._is_alive)
            return self._memory.tensor(region).clone()

    def refuse(self, what: str) -> Unrecordable:
        """Mark the recording as failed; returns the exception to raise."""
        self.trouble = self.trouble or what
        return Unrecordable(what)

    def add(self, operator: Any, args: Any, kwargs: Any, results: Any, generator_state: Tensor | None) -> None:
        """Record an operator call, unless it only made views."""
        regions = tuple(self._region_of_result(result) for result in tree_leaves(results))
        made = {region.storage for region in regions if region is not None} - self._storages.keys()
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and storage_id(tensor.untyped_storage()) in made:
                storage = tensor.untyped_storage()
                # While this weak reference is kept, the address is not reused for another storage.
                self._storages[storage_id(storage)] = StorageWeakRef(storage)
        writes = made | {self.region(tensor).storage for tensor in written(operator, args, kwargs)}
        if not writes:
            return
        # Tensors that aren't recorded are copied now, as they may be changed later.
        kept_args, kept_kwargs = tree_map_only(
            Tensor, lambda t: self.region(t) if self.knows(t) else t.detach().clone(), (args, kwargs)
        )
        if generator_state is not None:
            kept_kwargs = {name: None if name == "generator" else value for name, value in kept_kwargs.items()}
        self.record.add(
            InitCall(
                operator=operator,
                args=kept_args,
                kwargs=kept_kwargs,
                results=regions,
                writes=frozenset(writes),
                generator_state=generator_state,
            )
        )

    def _region_of_result(self, result: Any) -> StorageRegion | None:
        """The region of a result; None if it is no tensor. Raises Unrecordable for layouts other than strided."""
        if not isinstance(result, Tensor):
            return None
        if result.layout != torch.strided or not (type(result) is Tensor or self.knows(result)):
            raise self.refuse(f"a tensor of layout {result.layout} and type {type(result).__name__}")
        return self.region(result)

    def _is_alive(self, storage: int) -> bool:
        return not self._storages[storage].expired()


class _Operators(TorchDispatchMode):
    """A mode that runs operators of recorded tensors on the meta device and records them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():  # here `tensor.device` must be the true device
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator: recorded, on the meta device, if it makes or takes recorded tensors, else as it is."""
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
        """Run a factory function, without tensor arguments."""
        named = {argument.name for argument in schema(func).arguments}
        device = kwargs.get("device") or _CPU
        here = device.type == "cpu" or (device.type == "meta" and not self._recording.meta_is_asked_for)
        if "device" not in named or not here or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        try:
            result = func(*args, **{**kwargs, "device": _META})
        except Exception:  # not supported on the meta device, or a wrong call
            return func(*args, **kwargs)
        if not (isinstance(result, Tensor) and result.is_floating_point() and result.layout == torch.strided):
            return func(*args, **{**kwargs, "device": _CPU})
        fixed = {**kwargs, "device": _CPU}
        if "dtype" in named:
            fixed["dtype"] = result.dtype  # the default dtype may change later
        self._recording.add(func, args, fixed, result, self._advance(func, args, fixed))
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator with recorded tensors among its arguments."""
        into = written(func, args, kwargs)
        into_recorded = [tensor for tensor in into if self._recording.knows(tensor)]
        gives_tensors = all("Tensor" in str(returned.type) for returned in schema(func).returns)
        device = kwargs.get("device")
        elsewhere = device is not None and device.type not in ("cpu", "meta")
        if len(into) > len(into_recorded) or not gives_tensors or elsewhere:
            if into_recorded:
                raise self._recording.refuse(f"{func} of recorded and other tensors")
            return self._run_on_values(func, args, kwargs)
        if device == _CPU and func is to_copy and kwargs.get("dtype") in (None, args[0].dtype):
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
        """Replace recorded tensors in arguments by their values, computed now."""
        recording = self._recording
        return tree_map_only(Tensor, lambda t: recording.value(t) if recording.knows(t) else t, arguments)

    def _advance(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Advance the generator as the operator would; returns its state before, or None if it isn't random."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        state = (kwargs.get("generator") or torch.default_generator).get_state()
        if func.overloadpacket in _SAMPLERS:
            scratch = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype)
            args = (scratch, *args[1:])
        func(*self._with_values(args), **self._with_values(kwargs))
        return state


class _Pretence(TorchFunctionMode):
    """Makes recorded tensors report that they are on the CPU, as some initializers skip meta tensors."""

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
# Functions that access the memory itself.
_OF_MEMORY = frozenset({Tensor.__array__, Tensor.data_ptr, Tensor.numpy, Tensor.untyped_storage})


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record how tensors are computed inside."""
    recording = Recording()
    with _Operators(recording), _Pretence(recording):
        yield recording


def written(operator: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes into."""
    parameters = schema(operator).arguments
    bound = dict(zip((parameter.name for parameter in parameters), args, strict=False)) | kwargs
    return [
        leaf
        for parameter in parameters
        if parameter.is_write
        for leaf in tree_leaves(bound.get(parameter.name))
        if isinstance(leaf, Tensor)
    ]


def _on_meta(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(_META), arguments)
