"""Usage: what a rank held, allocated and sent in one step, and how fast a training was."""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from samestep.comm.observer import Observer, operands
from samestep.comm.traffic import Traffic
from samestep.parallel.holdings import Holdings
from samestep.parallel.valueless import has_values
from samestep.tasks.base import Work
from samestep.torch_internals.fakes import FakeTensor
from samestep.torch_internals.operators import schema

# Operators of FSDP2 that put whole parameters together from shards of them.
_GATHERING = frozenset({"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"})


class Allocations(Observer):
    """Record the size of every storage that operators allocate, until it is freed or an optimizer steps.

    Operators pass PyTorch's dispatcher, where this mode sees their results; a storage that none of their arguments
    had is new. It counts until its finalizer runs. Workspace that an operator allocates and frees internally is not
    seen, nor is the allocator's own overhead (rounding, fragments, caches).
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[int, int]] = []  # (number of the storage, change in bytes), in order of time
        self._numbers: Any = WeakIdKeyDictionary()  # storage -> its number
        self._bytes: list[int] = []  # current size, by number of the storage
        self._ends: list[weakref.ref[torch.UntypedStorage]] = []  # kept so that their callbacks run
        self._gathered: set[int] = set()
        self._over = False

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Record every storage that is allocated, resized or freed inside, until an optimizer steps."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            """Resize a storage in place, as FSDP2 does with gathered parameters, and record the change."""
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
        """Peak bytes of all storages but those of gathered parameters and of the tensors in `without`."""
        left_out = {self._numbers.get(tensor.untyped_storage()) for tensor in without}
        return self._peak(set(range(len(self._bytes))) - left_out - self._gathered)

    def peak_gathered(self) -> int:
        """Peak bytes of parameters gathered from shards and of the all-gather buffers."""
        return self._peak(self._gathered)

    def peak_gathered_with(self, gradients: Iterable[Tensor]) -> int:
        """Peak bytes of gathered parameters and `gradients` together.

        Gradients allocated before `follow` count in full over the whole step.
        """
        storages = {id(storage): storage for storage in (gradient.untyped_storage() for gradient in gradients)}
        made = {self._numbers[storage] for storage in storages.values() if storage in self._numbers}
        there_before = sum(storage.nbytes() for storage in storages.values() if storage not in self._numbers)
        return there_before + self._peak(self._gathered | made)

    def _peak(self, chosen: Collection[int]) -> int:
        """Peak bytes of the storages with the numbers in `chosen`, from the events in order."""
        now = most = 0
        for number, change in self._events:
            if number in chosen:
                now += change
                most = max(most, now)
        return most

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if self._over:
            return
        if made := _storages(result):
            inputs = {id(storage) for storage in _storages((args, kwargs))}
            for storage in made:
                if id(storage) not in inputs and storage not in self._numbers:
                    self._begin(storage)
        if schema(func).name in _GATHERING:
            self._gathered |= {self._number(storage) for storage in _storages((result, kwargs.get("out")))}

    def _number(self, storage: torch.UntypedStorage) -> int:
        return self._numbers[storage] if storage in self._numbers else self._begin(storage)

    def _begin(self, storage: torch.UntypedStorage, *, first: bool = False) -> int:
        """Number a storage and record its allocation; with `first`, before all other events."""
        number = len(self._bytes)
        self._numbers[storage] = number
        self._bytes.append(storage.nbytes())
        self._ends.append(weakref.ref(storage, partial(self._end, number)))
        self._events.insert(0 if first else len(self._events), (number, storage.nbytes()))
        return number

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Record the new size of a storage, which may have been allocated before `follow`."""
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
        """Record that a storage was freed; called by its finalizer."""
        self._change(number, -self._bytes[number])
        self._bytes[number] = 0

    def _change(self, number: int, change: int) -> None:
        """Record a change of a storage's size in bytes."""
        if not self._over:
            self._events.append((number, change))

    def _stop(self) -> None:
        self._over = True


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in operands(nest) if _is_plain(tensor)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided and not on the meta device, so that its memory counts."""
    if tensor.layout is not torch.strided:
        return False
    if isinstance(tensor, FakeTensor):
        # Fake tensors with values are DTensor's own, for propagating shapes that it has not seen before.
        # `tensor.device` would call an operator without any mode.
        return not has_values(tensor) and tensor.fake_device.type != "meta"
    return tensor.device.type != "meta"


_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 0.3  # of matrix products
_AT_ONCE = 10  # products between two synchronizations of an accelerator; on a CPU, products are synchronous


def speeds(samples_per_second: float, work: Work, precision: str, device: torch.device) -> dict[str, float]:
    """Throughput of a training over all ranks: tokens and FLOPs per second, model FLOPs utilisation.

    A collective: every rank must call it, and gets the same values.

    `model_flops_utilisation` (Chowdhery et al. 2022, appendix B) is relative to the peak measured here with matrix
    products in the recipe's precision on all ranks at once, not to a data sheet's.
    """
    speeds: dict[str, float] = {}
    if work.tokens is not None:
        speeds["tokens_per_second"] = samples_per_second * work.tokens
    if work.flops is not None:
        peak = _peak(device, _TYPES[precision])
        speeds["flops_per_second"] = samples_per_second * work.flops
        speeds["measured_peak_flops"] = peak
        speeds["model_flops_utilisation"] = speeds["flops_per_second"] / peak
    return speeds


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure FLOPs per second of matrix products, run on all ranks at the same time and summed over them."""
    size, at_once = (1024, 1) if device.type == "cpu" else (4096, _AT_ONCE)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = one @ other  # the first product initializes the library
    dist.barrier()
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for _ in range(at_once):
            torch.mm(one, other, out=result)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        products += at_once
    flops = 2 * size**3 * products / (time.perf_counter() - began)
    of_all = torch.tensor(flops, dtype=torch.float64, device=device)
    dist.all_reduce(of_all)
    return of_all.item()


Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes of one rank. The first three are of the tensors that it holds after the step.

    What a layout offloads counts under `host` or `disk` alone, even on a CPU, whose own memory is the host's.
    """

    parameters: int  # of a sharded parameter, this rank's shard
    gradients: int
    optimizer_state: int  # Adam's two averages, SGD's momentum, and each parameter's count of steps
    # Peak between the start of the step and its update, of all that was allocated except gradients and gathered
    # parameters: activations saved for backward, temporaries, communication buffers.
    activations: int
    gathered: int  # peak of parameters gathered from shards, with the all-gather buffers
    # Peak of the sum of both: gradients are allocated while gathered parameters are freed.
    gathered_and_gradients: int
    host: int  # offloaded to the host's memory
    disk: int  # offloaded to files
    sent: Mapping[str, int]  # in one step, by kind of collective; see samestep.comm.traffic.Traffic

    @property
    def sent_in_all(self) -> int:
        return sum(self.sent.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sent": dict(self.sent)}


class Holder(Protocol):
    """Protocol of a trainer that holds a model and its optimizer."""

    def holdings(self) -> Holdings: ...

    def sent(self) -> Mapping[str, int]: ...


def measured(trainer: Holder, step: Callable[[], Report], traffic: Traffic | None = None) -> tuple[Report, Usage]:
    """Take one step and measure what this rank held and sent, which slows the step. `traffic` counts messages."""
    traffic, allocations = Traffic() if traffic is None else traffic, Allocations()
    with allocations.follow(), traffic:
        report = step()
    held = trainer.holdings()
    sent = Counter({kind: round(count) for kind, count in traffic.sent.items()}) + Counter(trainer.sent())
    usage = Usage(
        parameters=_bytes(held.parameters),
        gradients=_bytes(held.gradients),
        optimizer_state=_bytes(held.optimizer_state),
        activations=allocations.peak(without=[*held.gradients, *held.host]),
        gathered=allocations.peak_gathered(),
        gathered_and_gradients=allocations.peak_gathered_with(held.gradients),
        host=_bytes(held.host),
        disk=_bytes(held.disk),
        sent=dict(sent),
    )
    return report, usage


def gather(usage: Usage | None) -> Sequence[Usage]:
    """All-gather the usage of every rank, in rank order; empty where no step was measured."""
    if usage is None:
        return ()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, usage)
    return tuple(ranks)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
