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

from samestep.data.order import Indices, Place, SampleOrder, Share
from samestep.errors import UserError
from samestep.tasks.base import Batch, Samples, as_batch, missing_sample

# How loading processes start, as PyTorch's do by default; a rank that a fork server made would start them by one as
# well, which knows neither a task that a job file names nor more than some 100 tensors.
_FORK = "fork" if sys.platform == "linux" else None

Collate = Callable[[Sequence[Any]], Batch]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Which samples of which step a training forward works on."""

    step: int
    samples: torch.Tensor  # [samples] their numbers in the data set; int64, on the CPU
    lent: bool  # they belong to another rank; this forward is for company alone
    seed: int = 0  # of the recipe
    micro_batches: int = 1  # of this step on every rank
    # [samples] where they stand in the step's global batch; None: they are all of it
    rows: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one forward on one rank."""

    batch: Batch
    moment: Moment

    @property
    def samples(self) -> int:
        """How many count: none where they are only lent."""
        return 0 if self.moment.lent else len(self.moment.samples)

    @property
    def weight(self) -> float:
        return 0.0 if self.moment.lent else 1.0


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one rank does in one step."""

    step: int
    epoch: int
    micro_batches: Sequence[MicroBatch]
    global_samples: int
    data_seconds: float  # waited for the data

    @property
    def local_samples(self) -> int:
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    def samples(self) -> list[int]:
        """The samples that this rank looks at, by their numbers in the data set."""
        return [number for each in self.micro_batches for number in each.moment.samples.tolist()]


def _begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its iterator, whose loading processes are forked now, if it has some.

    A forked process has this one's garbage. Were it collected there, a process group in it would wait for threads
    that a fork does not take along, and the loading process would never come to its first sample.
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
        place: Place,
        device: torch.device,
        dtype: torch.dtype,
        start: int,
        stop: int,
        micro_batch: int | None = None,
        micro_batches: int | None = None,
        workers: int = 0,
    ) -> None:
        self._samples = samples
        self._collate = collate
        self.order = order
        self._place = place
        self._device = device
        self._dtype = dtype
        self.start = start
        self.stop = stop
        self._micro_batch = micro_batch
        self._micro_batches = micro_batches  # of every step; None: as the samples say
        self._workers = workers
        self._last: tuple[int, list[Share]] | None = None  # a step and its shares

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[StepBatch]:
        """The steps `start` to `stop` in their order, with how long this rank has waited for data (seconds)."""
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
        """Asked twice for each step, for its indices and for its batches: without workers, one after the other."""
        if self._last is None or self._last[0] != step:
            self._last = step, self.order.shares(step, self._place, self._micro_batch, self._micro_batches)
        return self._last[1]

    def _data_loader(self) -> DataLoader[Any]:
        """PyTorch's DataLoader over the micro-batches of all steps: one batch of it is one micro-batch."""
        return DataLoader(
            _Reading(self._samples),  # pyright: ignore[reportArgumentType]  (an index is all it needs)
            batch_sampler=_Indices(self),
            collate_fn=_CollateBatch(self._collate),
            num_workers=self._workers,
            multiprocessing_context=_FORK if self._workers else None,
            # Page-locked memory: the copy to the device doesn't wait (`non_blocking` in `to_device`).
            pin_memory=self._device.type != "cpu",
            # Its own generator: drawing a seed for workers must not move the model's random state.
            generator=torch.Generator().manual_seed(0),
        )

    def _place_on_device(
        self, step: int, batch: Batch, share: Share, micro_batches: int, rows: torch.Tensor
    ) -> MicroBatch:
        return MicroBatch(
            batch=Batch(*(to_device(part, self._device, self._dtype) for part in batch)),
            moment=Moment(
                step=step,
                samples=torch.from_numpy(share.samples.copy()),
                lent=share.lent,
                seed=self.order.seed,
                micro_batches=micro_batches,
                rows=rows,
            ),
        )


def _rows(global_batch: Indices, sorting: Indices, share: Share) -> torch.Tensor:
    """Where a share's samples stand in the global batch, which has each sample once. [samples] int64

    `sorting` sorts the batch: the inverse of the permutation, without a table of the data set's size.
    """
    return torch.from_numpy(sorting[np.searchsorted(global_batch, share.samples, sorter=sorting)])


class _Indices:
    """The indices of each micro-batch in turn, as DataLoader's batch sampler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._loader.start, self._loader.stop):
            for share in self._loader._shares(step):
                yield share.samples.tolist()


@dataclass(frozen=True)
class _Mistake:
    """What is wrong with a user's data: handed on, since DataLoader adds a traceback to what a worker raises."""

    text: str


class _Reading:
    """A data set, which gives the samples of a batch at once, or a mistake where its length is too large."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any] | _Mistake:
        """The samples of a micro-batch, by one call where the data set has one for several."""
        together = getattr(self._samples, "__getitems__", None)
        found: list[Any] = []
        try:
            if together is not None:
                return together(indices)
            for index in indices:
                found.append(self._samples[index])
        except IndexError as error:
            index = max(indices) if together is not None else indices[len(found)]
            return _Mistake(f"the data set: {missing_sample(self._samples, index, error)}")
        except UserError as error:
            return _Mistake(str(error))
        return found


class _CollateBatch:
    """A task's collate, made into a Batch where it gives a plain pair; a class so that workers can pickle it."""

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
    """What was loaded. Raises UserError for what is wrong with the user's data or collate."""
    if isinstance(loaded, _Mistake):
        raise UserError(loaded.text)
    return loaded


def to_device(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move the tensors in a nest of mappings and sequences; real and complex ones also take the parameters' dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, in_kind(value, dtype), non_blocking=True)
    if isinstance(value, Mapping):  # also what tokenizers give, which is not a dict
        return {key: to_device(inner, device, dtype) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_device(inner, device, dtype) for inner in value]
        return (
            type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        )  # a named tuple takes them apart
    return value


def in_kind(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """A real dtype for a real tensor, the complex one of the same precision for a complex tensor, else None."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive samples of a data set, for one forward without gradients."""

    batch: Batch
    lent: bool  # another rank has this chunk; the forward is for company alone


class Chunks:
    """A rank's chunks of a data set: every `place.of`-th one, as many as every other rank has.

    A chunk holds the same samples whatever the number of ranks, so that its outputs are the same too.

    Ranks call the model equally often, as `predict` sends messages under most layouts; a rank without a chunk in the
    last round computes chunk 0 once more, marked as lent, and its outputs are left out.
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        *,
        size: int,
        place: Place,
        device: torch.device,
        dtype: torch.dtype,
        workers: int = 0,
    ) -> None:
        count = -(-len(samples) // size)
        self._mine = [round_ * place.of + place.index for round_ in range(-(-count // place.of))]
        self._count = count
        self._device = device
        self._dtype = dtype
        wanted = [number if number < count else 0 for number in self._mine]
        self._loader = DataLoader(
            _Reading(samples),  # pyright: ignore[reportArgumentType]
            batch_sampler=[list(range(n * size, min(len(samples), (n + 1) * size))) for n in wanted],
            collate_fn=_CollateBatch(collate),
            num_workers=workers,
            multiprocessing_context=_FORK if workers else None,
            pin_memory=device.type != "cpu",
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[Chunk]:
        """This rank's chunks in their order; those past the end are lent ones."""
        for number, batch in zip(self._mine, _begun(self._loader), strict=True):
            parts = (to_device(part, self._device, self._dtype) for part in given(batch))
            yield Chunk(batch=Batch(*parts), lent=number >= self._count)
