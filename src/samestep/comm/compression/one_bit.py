"""One bit a number: the mean of the ranks' vectors, sent as signs and scales, with error feedback on both ways.

Tang et al. 2021, "1-bit Adam: Communication efficient large-scale training with Adam's convergence speed", figure 3:
a vector is cut into as many chunks as there are ranks. Each rank sends every chunk's signs to the rank that sums it,
and that one sends the sum's signs to all. What signs and scales leave out is added to the next vector by
the rank that left it out: each rank for its own vector, the chunk's rank for the sum.

A scale is the mean of |x| over a segment, the numbers of one tensor in one chunk: with it the compression shrinks the
error whatever the vector (Lu et al. 2022, section 3), which the root mean square does not.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from samestep.comm.compression.base import Range
from samestep.comm.compression.wire import Wire


class OneBitMean:
    """Averages flat vectors of one length over the ranks, and keeps the errors."""

    def __init__(self, wire: Wire, sizes: Sequence[int], like: Tensor) -> None:
        """`sizes`: of the tensors that the vector holds one after the other. `like`: of its dtype and device."""
        self._wire = wire
        self._numbers = sum(sizes)
        self._chunk = -(-self._numbers // (8 * wire.ranks)) * 8  # numbers of a chunk: whole bytes of signs
        self._segments = _segments(sizes, self._chunk, wire.ranks)
        self.error = like.new_zeros(self._numbers)
        start = min(wire.rank * self._chunk, self._numbers)
        length = min(self._chunk, self._numbers - start)
        self.of_chunk = Range(start=start, whole=self._numbers, values=like.new_zeros(length))

    def mean(self, vector: Tensor) -> Tensor:
        """Compute the compressed mean of the ranks' vectors; the result is bitwise the same on every rank."""
        ranks, rank, chunk = self._wire.ranks, self._wire.rank, self._chunk
        everywhere = [length for lengths in self._segments for length in lengths]
        own_segments = self._segments[rank]
        padded = vector.new_zeros(ranks * chunk)  # [ranks * chunk]
        padded[: self._numbers] = vector + self.error
        signs, scales = _compressed(padded, everywhere)
        self.error.copy_((padded - _restored(signs, scales, everywhere, padded))[: self._numbers])

        signs = self._wire.exchange(signs.view(ranks, -1))  # [ranks, chunk / 8] of this rank's chunk
        first = sum(len(lengths) for lengths in self._segments[:rank])
        scales = self._wire.gather(scales)[:, first : first + len(own_segments)]
        total = vector.new_zeros(chunk)  # [chunk]: the sum over ranks of this rank's chunk
        for of_rank in range(ranks):
            total += _restored(signs[of_rank], scales[of_rank], own_segments, total)
        total /= ranks
        held = len(self.of_chunk.values)
        total[:held] += self.of_chunk.values
        signs, scales = _compressed(total, own_segments)
        self.of_chunk.values.copy_((total - _restored(signs, scales, own_segments, total))[:held])

        most = max(len(lengths) for lengths in self._segments)
        signs = self._wire.gather(signs)
        scales = self._wire.gather(torch.cat([scales, scales.new_zeros(most - len(scales))]))
        parts = [
            _restored(signs[of], scales[of][: len(lengths)], lengths, vector)
            for of, lengths in enumerate(self._segments)
        ]
        return torch.cat(parts)[: self._numbers]


def _segments(sizes: Sequence[int], chunk: int, chunks: int) -> list[list[int]]:
    """The lengths of the segments in each chunk; the last segment of a chunk may be padding."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    segments = []
    for number in range(chunks):
        first, last = number * chunk, (number + 1) * chunk
        cuts = [first, *(end for end in ends if first < end < last), last]
        segments.append([after - before for before, after in pairwise(cuts) if after > before])
    return segments


def _compressed(values: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compress values into signs, eight a byte (1 for values >= 0), and one float32 scale for each segment."""
    bits = (values >= 0).view(-1, 8).to(torch.uint8)
    signs = (bits << _places(values)).sum(1, dtype=torch.uint8)
    return signs, torch.stack([part.abs().mean() for part in values.split(list(lengths))]).float()


def _restored(signs: Tensor, scales: Tensor, lengths: Sequence[int], like: Tensor) -> Tensor:
    """Decompress signs and scales into values of the dtype of `like`."""
    bits = (signs.reshape(-1, 1) >> _places(signs)) & 1
    values = bits.view(-1).to(like.dtype).mul_(2).sub_(1)
    repeats = torch.tensor(list(lengths), device=signs.device)
    return values * scales.to(like.dtype).repeat_interleave(repeats)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
