"""Sample order: which samples make a step's global batch, and which of them a rank takes.

The order depends on the seed and the step alone. Ranks and micro-batches only cut a global batch into
consecutive pieces, so every number of ranks trains on the same batches in the same order, nothing is repeated
to fill a batch up, and no tail is dropped. With the samples' lengths known, a rank's micro-batches are cut from
its samples in the order of their lengths, so that little of them is padding; the global batch stays what it is.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from samestep.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DataPlace:
    """A rank's index among the ranks that share the samples."""

    index: int = 0
    of: int = 1
    idle: bool = False  # takes no samples itself, only zero-weight ones


@dataclass(frozen=True, kw_only=True)
class Share:
    """One micro-batch of one rank: indices of samples in the data set.

    A rank without samples still takes part in every forward and backward, since its peers wait for it in collectives.
    It then computes a sample of another rank, with `zero_weight` set; its loss and its count are multiplied by zero.
    """

    samples: Indices
    zero_weight: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The global batches of a training over a data set of `size` samples.

    Invariants on which the proof of a layout rests:

        - `global_batch(step)` depends on seed, step, size and batch: on no rank, no micro-batch, no layout.
        - the shares of all ranks that aren't of zero weight are a partition of it: each sample once.
        - all ranks have the same number of shares in a step, so that their collectives pair up.
    """

    size: int
    batch: int
    seed: int
    shuffle: bool = True
    lengths: Indices | None = field(default=None, compare=False)  # [size]; None: don't group samples by length
    virtual_ranks: int | None = None  # one micro-batch each, shared out among ranks; None: ranks cut slices
    drop_last: bool = False  # leave out the samples at an epoch's end that fill no batch

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError("the data set is empty; at least one sample is needed")
        if self.drop_last and self.size < self.batch:
            raise UserError(
                f"the data set has {self.size} samples, which fill no batch of {self.batch}, and the last batch is "
                "dropped; use a smaller batch, or drop_last=False"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def global_batch(self, step: int) -> Indices:
        """Return the samples of a step in their order. The last batch of an epoch has what is left."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = permutation(self.seed, epoch, self.size) if self.shuffle else np.arange(self.size)
        return order[index * self.batch : (index + 1) * self.batch]

    def shares(
        self, step: int, place: DataPlace, micro_batch: int | None, micro_batches: int | None = None
    ) -> list[Share]:
        """Return one rank's micro-batches of a step: as many as every other rank's, of at most `micro_batch` samples.

        `micro_batches` fixes their number in every step; where samples are too few, some have zero weight.
        """
        batch = self.global_batch(step)
        if self.virtual_ranks is not None:
            return virtual_shares(batch, place, self.virtual_ranks)
        if self.lengths is not None and not place.idle:
            # Only the order within the batch changes, not which samples the step has.
            batch = dealt_by_length(batch, self.lengths[batch], place.of)
        return cut(batch, place, micro_batch, micro_batches)


def cut(batch: Indices, place: DataPlace, micro_batch: int | None, micro_batches: int | None = None) -> list[Share]:
    """Cut a global batch into a rank's micro-batches.

    Every rank gets a consecutive slice, slices differ by at most one sample, and every rank gets the same
    number of micro-batches.
    """
    largest = -(-len(batch) // place.of)
    # From the rank with the most samples, so that no micro-batch exceeds micro_batch: ceil(largest / micro_batch).
    count = micro_batches or -(-largest // min(micro_batch or largest, largest))
    # An idle rank takes part in every forward, since its peers wait for it in collectives; any sample will do.
    if place.idle:
        return [Share(samples=batch[:1], zero_weight=True)] * count
    start, stop = bounds(len(batch), place.index, place.of)
    shares = []
    for part in range(count):
        first, last = bounds(stop - start, part, count)
        samples = batch[start + first : start + last]
        shares.append(Share(samples=samples) if len(samples) else Share(samples=batch[:1], zero_weight=True))
    return shares


def virtual_shares(batch: Indices, place: DataPlace, virtual_ranks: int) -> list[Share]:
    """Return the virtual ranks of one rank as micro-batches: consecutive ones, with the same samples in every layout.

    Every rank gets as many micro-batches as the one with the most; the missing ones have zero weight.
    """
    first, last = bounds(virtual_ranks, place.index, place.of)
    shares = []
    # ceil(V / ranks) on every rank: a rank with one virtual rank fewer ends with a zero-weight micro-batch.
    for number in range(first, first + -(-virtual_ranks // place.of)):
        start, stop = bounds(len(batch), number, virtual_ranks) if number < last else (0, 0)
        samples = batch[start:stop]
        shares.append(Share(samples=samples) if stop > start else Share(samples=batch[:1], zero_weight=True))
    return shares


def dealt_by_length(batch: Indices, lengths: Indices, ranks: int) -> Indices:
    """Reorder a global batch so that `cut` gives every rank samples of all lengths, longest first.

    Samples are sorted by length and dealt to the ranks in turn, so that ranks have about equal work, and a rank's
    consecutive samples have similar lengths.
    """
    # Stable: samples of one length keep the batch's order, the same on every machine.
    longest_first = batch[np.argsort(-lengths, kind="stable")]
    return np.concatenate([longest_first[rank::ranks] for rank in range(ranks)])


def bounds(total: int, index: int, parts: int) -> tuple[int, int]:
    """Return start and end of part `index` of `parts` into which `total` items are split as evenly as possible."""
    small, larger = divmod(total, parts)
    start = index * small + min(index, larger)
    return start, start + small + (index < larger)


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> Indices:
    """The order of an epoch: a permutation drawn from the seed and the epoch.

    NumPy keeps the raw numbers of a bit generator the same in all its versions, but not Generator.permutation.
    A training that goes on under another version must find the rest of its epoch.
    """
    # Sorting random numbers gives a uniform permutation, up to ties of 64-bit numbers, which the stable sort settles
    # the same way everywhere.
    drawn = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(size)
    order = np.argsort(drawn, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
