"""Loader: a rank's micro-batches, step after step, on its device.

Loading processes (`workers`) hand over micro-batches in the order of `_Indices`, so their number changes nothing. A
user's mistake comes back as a value and is raised in the rank, since DataLoader would wrap it into its own error.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from samestep.data.order import DataPlace, Indices, SampleOrder, Share
from samestep.data.sample_draws import EpochIndices, SeededSamples
from samestep.data.types import Batch, Samples, as_batch, missing_sample, splits_of
from samestep.errors import UserError

# Loader workers are forked, PyTorch's default on Linux. The default of a rank that was itself forked from a fork
# server would be that server, which doesn't have a task imported from a job file and can't pass on more than some 100
# tensors.
_FORK = "fork" if sys.platform == "linux" else None

Collate = Callable[[Sequence[Any]], Batch]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Which samples of which step a training forward works on."""

    step: int
    samples: torch.Tensor  # [samples] their numbers in the data set; int64, on the CPU
    zero_weight: bool  # another rank's samples: this rank only joins the collectives
    seed: int = 0  # of the recipe
    micro_batches: int = 1  # of this step on every rank
    # [samples] their positions in the step's global batch; None: they are the whole batch
    rows: torch.Tensor | None = None
    # How many rows each sample has in tensors that join the rows of samples in one dimension (`Batch.split`).
    splits: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward on one rank."""

    batch: Batch
    moment: Moment

    @property
    def samples(self) -> int:
        """Number of samples that count in the loss: 0 if they have zero weight."""
        return 0 if self.moment.zero_weight else len(self.moment.samples)

    @property
    def weight(self) -> float:
        return 0.0 if self.moment.zero_weight else 1.0


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The micro-batches of one rank in one step."""

    step: int
    epoch: int
    micro_batches: Sequence[MicroBatch]
    global_samples: int
    data_seconds: float  # waited for the data

    @property
    def local_samples(self) -> int:
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    def samples(self) -> list[int]:
        """Indices, in the data set, of the samples that this rank computes, zero-weight ones included."""
        return [number for micro_batch in self.micro_batches for number in micro_batch.moment.samples.tolist()]


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Collect garbage, then return the iterator of a DataLoader, which forks its workers.

    Workers inherit this process's garbage. If a worker collected a process group, its destructor would wait for
    threads that don't exist after a fork, and the worker would hang before its first sample.
    """
    if loader.num_workers:
        gc.collect()
    return iter(loader)


class Loader:
    """Iterates over a rank's part of the global batches `start` to `stop`."""

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        order: SampleOrder,
        *,
        place: DataPlace,
        device: torch.device,
        dtype: torch.dtype,
        start: int,
        stop: int,
        micro_batch: int | None = None,
        micro_batches: Callable[[], int | None] = lambda: None,
        workers: int = 0,
    ) -> None:
        """`micro_batches`: how many a step has, asked when the first begins; None: as many as the samples need."""
        self._samples = samples
        self._collate = collate
        self.order = order
        self._place = place
        self._device = device
        self._dtype = dtype
        self.start = start
        self.stop = stop
        self._micro_batch = micro_batch
        self._micro_batches = micro_batches
        self._workers = workers
        self._last: tuple[int, list[Share]] | None = None  # a step and its shares

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps `start` to `stop` in order, with the seconds that this rank has waited for data."""
        batches = _begun(self._data_loader())
        for step in range(self.start, self.stop):
            shares = self._shares(step)
            began = time.perf_counter()
            loaded = [given(next(batches)) for _ in shares]
            waited = time.perf_counter() - began
            global_batch = self.order.global_batch(step)
            sorting = np.argsort(global_batch)
            yield StepBatch(
                step=step,
                epoch=self.order.epoch_of(step),
                micro_batches=[
                    self._place_on_device(step, batch, share, len(shares), _rows(global_batch, sorting, share))
                    for batch, share in zip(loaded, shares, strict=True)
                ],
                global_samples=len(global_batch),
                data_seconds=waited,
            )

    def _shares(self, step: int) -> list[Share]:
        """Return the shares of a step, cached because each step asks twice: for its indices and for its batches."""
        if self._last is None or self._last[0] != step:
            self._last = step, self.order.shares(step, self._place, self._micro_batch, self._micro_batches())
        return self._last[1]

    def _data_loader(self) -> DataLoader[Any]:
        """Build the DataLoader over the micro-batches of all steps; one of its batches is one micro-batch."""
        return DataLoader(
            _Reading(self._samples, self.order.seed),  # pyright: ignore[reportArgumentType]  (an index is all it needs)
            batch_sampler=_Indices(self),
            collate_fn=_CollateBatch(self._collate),
            num_workers=self._workers,
            multiprocessing_context=_FORK if self._workers else None,
            # Pinned memory lets the copy to the device be asynchronous (`non_blocking` in `to_device`).
            pin_memory=self._device.type != "cpu",
            # A generator of its own: DataLoader draws a base seed for its workers, which must not advance the default
            # generator.
            generator=torch.Generator().manual_seed(0),
        )

    def _place_on_device(
        self, step: int, batch: Batch, share: Share, micro_batches: int, rows: torch.Tensor
    ) -> MicroBatch:
        return MicroBatch(
            batch=on_device(batch, self._device, self._dtype),
            moment=Moment(
                step=step,
                samples=torch.from_numpy(share.samples.copy()),
                zero_weight=share.zero_weight,
                seed=self.order.seed,
                micro_batches=micro_batches,
                rows=rows,
                splits=splits_of(batch, len(share.samples)),
            ),
        )


def _rows(global_batch: Indices, sorting: Indices, share: Share) -> torch.Tensor:
    """Return the positions of a share's samples in the global batch, in which samples are distinct. [samples] int64

    `sorting` is the argsort of the batch; with it no table of the data set's size is needed.
    """
    return torch.from_numpy(sorting[np.searchsorted(global_batch, share.samples, sorter=sorting)])


class _Indices:
    """Batch sampler: yields the indices of each micro-batch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[EpochIndices]:
        for step in range(self._loader.start, self._loader.stop):
            epoch = self._loader.order.epoch_of(step)
            for share in self._loader._shares(step):
                yield EpochIndices(share.samples.tolist(), epoch)


@dataclass(frozen=True)
class _Mistake:
    """An error in a user's data, passed as a value, since DataLoader adds a traceback to what a worker raises."""

    text: str


class _Reading:
    """Wraps a data set: fetches the samples of a batch in one call, and returns a _Mistake for a missing sample."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._seeded = SeededSamples(samples, seed)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any] | _Mistake:
        """Fetch the samples of a micro-batch, by the data set's own `__getitems__` if it has one."""
        taken: list[Any] = []
        try:
            return self._seeded.read(indices, taken)
        except IndexError as error:
            together = hasattr(self._samples, "__getitems__")
            index = max(indices) if together else indices[len(taken)]
            return _Mistake(f"the data set: {missing_sample(self._samples, index, error)}")
        except UserError as error:
            return _Mistake(str(error))


class _CollateBatch:
    """Applies a task's collate and converts its result to a Batch; a class, so that workers can pickle it."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: Sequence[Any] | _Mistake) -> Batch | _Mistake:
        if isinstance(samples, _Mistake):
            return samples
        try:
            return as_batch(self._collate(samples))
        except UserError as error:
            return _Mistake(str(error))


def given(loaded: Batch | _Mistake) -> Batch:
    """Return a loaded batch. Raises UserError for a _Mistake."""
    if isinstance(loaded, _Mistake):
        raise UserError(loaded.text)
    return loaded


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """Move a batch's inputs and targets; how it is split is asked on the CPU."""
    inputs, targets = (to_device(part, device, dtype) for part in batch)
    return Batch(inputs, targets, batch.split)


def to_device(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move the tensors in nested mappings and sequences; real and complex ones also take the model's precision."""
    if isinstance(value, torch.Tensor):
        return value.to(device, in_kind(value, dtype), non_blocking=True)
    if isinstance(value, Mapping):  # also tokenizers' BatchEncoding, which is not a dict
        return {key: to_device(inner, device, dtype) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_device(inner, device, dtype) for inner in value]
        return (
            type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        )  # a named tuple's class takes its fields one by one
    return value


def in_kind(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to cast to: `dtype` for a real tensor, its complex counterpart for a complex one, or None."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else None


@dataclass(frozen=True, kw_only=True)
class SampleChunk:
    """Consecutive samples of a data set, for one forward without gradients."""

    batch: Batch
    zero_weight: bool  # another rank's samples: its outputs are dropped


class Chunks:
    """A rank's chunks of a data set: every `place.of`-th one; every rank has the same number.

    A chunk holds the same samples whatever the number of ranks, so that its outputs are the same too.

    All ranks must call the model equally often, since under most layouts `predict` communicates. A rank without a
    chunk in the last round computes chunk 0 again, marked as of zero weight, and its outputs are dropped.
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        *,
        size: int,
        place: DataPlace,
        device: torch.device,
        dtype: torch.dtype,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        """`seed`: of what the data set draws for a sample."""
        count = -(-len(samples) // size)
        self._mine = [round_ * place.of + place.index for round_ in range(-(-count // place.of))]
        self._count = count
        self._device = device
        self._dtype = dtype
        numbers = [number if number < count else 0 for number in self._mine]
        self._loader = DataLoader(
            _Reading(samples, seed),  # pyright: ignore[reportArgumentType]
            batch_sampler=[list(range(n * size, min(len(samples), (n + 1) * size))) for n in numbers],
            collate_fn=_CollateBatch(collate),
            num_workers=workers,
            multiprocessing_context=_FORK if workers else None,
            pin_memory=device.type != "cpu",
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[SampleChunk]:
        """Yield this rank's chunks in order; those past the end have zero weight."""
        for number, batch in zip(self._mine, _begun(self._loader), strict=True):
            yield SampleChunk(
                batch=on_device(given(batch), self._device, self._dtype), zero_weight=number >= self._count
            )
