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
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from samestep.comm.observer import Observer, operands
from samestep.comm.traffic import Traffic
from samestep.parallel.holdings import Holdings
from samestep.parallel.valueless import has_values
from samestep.tasks.base import Work

# Operators of FSDP2 that put whole parameters together from shards of them.
_GATHERING = frozenset({"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"})


class Allocations(Observer):
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
            """A storage that grows or shrinks in place, as FSDP2's gathered parameters do."""
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

    def peak_gathered_with(self, gradients: Iterable[Tensor]) -> int:
        """Most bytes at one moment of what is gathered and of gradients; those of the step before may be gone."""
        storages = {id(storage): storage for storage in (each.untyped_storage() for each in gradients)}
        made = {self._numbers[storage] for storage in storages.values() if storage in self._numbers}
        there_before = sum(storage.nbytes() for storage in storages.values() if storage not in self._numbers)
        return there_before + self._peak(self._gathered | made)

    def _peak(self, chosen: Collection[int]) -> int:
        """The most bytes at a time of some tensors, by playing the events in their order."""
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
            known = {id(storage) for storage in _storages((args, kwargs))}
            for storage in made:
                if id(storage) not in known and storage not in self._numbers:
                    self._begin(storage)
        if func._schema.name in _GATHERING:
            self._gathered |= {self._number(storage) for storage in _storages((result, kwargs.get("out")))}

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
        """Note the new size of a storage, which may have been made before."""
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
        """A storage is freed: its finalizer calls."""
        self._change(number, -self._bytes[number])
        self._bytes[number] = 0

    def _change(self, number: int, change: int) -> None:
        """Note that a storage has grown or shrunk by so many bytes."""
        if not self._over:
            self._events.append((number, change))

    def _stop(self) -> None:
        self._over = True


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in operands(nest) if _is_plain(tensor)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of this rank's that counts."""
    if tensor.layout is not torch.strided:
        return False
    if isinstance(tensor, FakeTensor):
        # Those with values are DTensor's own, which looks at whole shapes where a step has some that it has not seen.
        # `device` would be asked for by an operator, past every mode.
        return not has_values(tensor) and tensor.fake_device.type != "meta"
    return tensor.device.type != "meta"


_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 0.3  # of matrix products
_AT_ONCE = 10  # products before an accelerator is waited for; a CPU is done with each as it comes back


def speeds(samples_per_second: float, work: Work, precision: str, device: torch.device) -> dict[str, float]:
    """What is known of a training's speed, over all ranks; the same on every rank, and every rank must ask.

    `model_flops_utilisation` (Chowdhery et al. 2022, appendix B) is held against the peak that a matrix product
    in the recipe's precision reaches here, on all ranks at once, rather than against a data sheet's.
    """
    found: dict[str, float] = {}
    if work.tokens is not None:
        found["tokens_per_second"] = samples_per_second * work.tokens
    if work.flops is not None:
        peak = _peak(device, _TYPES[precision])
        found["flops_per_second"] = samples_per_second * work.flops
        found["measured_peak_flops"] = peak
        found["model_flops_utilisation"] = found["flops_per_second"] / peak
    return found


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of all ranks' matrix products, run at the same time."""
    size, at_once = (1024, 1) if device.type == "cpu" else (4096, _AT_ONCE)
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = one @ other  # the first product prepares the library
    dist.barrier()
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for _ in range(at_once):
            torch.mm(one, other, out=result)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        products += at_once
    mine = 2 * size**3 * products / (time.perf_counter() - began)
    of_all = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(of_all)
    return of_all.item()


Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes of one rank. The first three are counted from the tensors that it holds when the step is over.

    Where a layout moves something to the host's memory or to disk, it counts there and nowhere else, also on a
    CPU, whose own memory is the host's.
    """

    parameters: int  # of a sharded parameter the rank's shard
    gradients: int
    optimizer_state: int  # Adam's two averages, SGD's momentum, and each parameter's count of steps
    # Most bytes at one moment from the step's begin to its update, of everything that it made besides gradients and
    # gathered parameters: activations kept for backward, what operators work on, gradients on their way.
    activations: int
    gathered: int  # the same of parameters gathered from shards, with the messages that gather them
    # Of both at one moment: gradients come while gathered parameters go.
    gathered_and_gradients: int
    host: int  # moved to the host's memory
    disk: int  # moved to files
    sent: Mapping[str, int]  # in one step, by kind of collective; see samestep.comm.traffic.Traffic

    @property
    def sent_in_all(self) -> int:
        return sum(self.sent.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sent": dict(self.sent)}


class Holder(Protocol):
    """Who keeps a model and its optimizer: a trainer."""

    def holdings(self) -> Holdings: ...

    def sent(self) -> Mapping[str, int]: ...


def measured(trainer: Holder, step: Callable[[], Report], traffic: Traffic | None = None) -> tuple[Report, Usage]:
    """Take a step, slower than others, and say what this rank held and sent in it. `traffic` counts the latter."""
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
    """Every rank's usage, in the order of the ranks; every rank must ask. Nothing where no step was measured."""
    if usage is None:
        return ()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, usage)
    return tuple(ranks)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
