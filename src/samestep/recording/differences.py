"""The numbers of one tensor in one step: how far the split run is from the run alone, and what is rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from samestep.recording.record import JoinedTensor, RunRecord, piece_of

# A difference counts from so many times the noise that was measured: rounding draws again in every sum.
NOISES = 20.0
# Differences below so many units of the precision are rounding, whatever was measured.
_UNITS = 64.0
# And below so many units of a typical number: a gradient that is small because its terms cancel, such as that of a
# bias in a difference of two outputs, has the rounding of the terms.
_UNITS_OF_TERMS = 4.0
# A tensor that is so much smaller than the others, by its root mean square, is rounding itself.
_SMALL = 1e-4


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Difference of one tensor between the runs. Squares and products are sums over its numbers, in float64."""

    name: str
    alone: float  # its norm in the run alone
    apart: float  # norm of the difference between both runs, relative to `alone`
    noise: float  # likewise between the run alone and its repetition
    ranks_apart: float  # the largest distance of a rank's copy from rank 0's, relative
    ratio: float  # of the split run's tensor, as a multiple of the other's
    rest: float  # remainder after subtracting that multiple, relative to the split run's
    of_ranks: Sequence[tuple[float, float]] = ()  # ratio and rest of each rank's shards
    product: float = 0.0
    square: float = 0.0
    split_square: float = 0.0
    usual: float = 1.0  # norm of a tensor of its shape of typical numbers, relative to `alone`
    missing: bool = False  # the split run has none of it
    absent: Sequence[int] = ()  # ranks that have none of it


@dataclass(frozen=True, kw_only=True)
class RoundingLimits:
    """Rounding limits of one kind of tensor in one step."""

    common: float  # of a typical tensor
    own: Mapping[str, float]  # of each

    def of(self, name: str) -> float:
        return max(self.common, self.own.get(name, 0.0))

    def exceeded(self, tensor: TensorDifference) -> bool:
        return tensor.missing or not tensor.apart <= self.of(tensor.name)

    def ranks_exceeded(self, tensor: TensorDifference) -> bool:
        return bool(tensor.absent) or not tensor.ranks_apart <= self.of(tensor.name)


def limits_of(
    tensors: Sequence[TensorDifference], dtype: torch.dtype, before: RoundingLimits | None = None
) -> RoundingLimits:
    """Return a step's limits; never below those `before`, since noise grows from step to step."""
    unit = torch.finfo(dtype).eps
    smallest = _UNITS * unit
    common = max(smallest, NOISES * median([tensor.noise for tensor in tensors] or [0.0]))
    own = {tensor.name: max(NOISES * tensor.noise, _UNITS_OF_TERMS * unit * tensor.usual) for tensor in tensors}
    if before is not None:
        common = max(common, before.common)
        own = {name: max(value, before.own.get(name, 0.0)) for name, value in own.items()}
    return RoundingLimits(common=common, own=own)


def compare_tensors(
    number: int, kind: str, alone: RunRecord, split: RunRecord, again: RunRecord | None
) -> list[TensorDifference]:
    """Compare all tensors of a kind in one step."""
    names = alone.tensor_names(number, kind)
    scale = _usual_size(number, kind, alone, names)
    return [_apart(number, kind, name, alone, split, again, scale) for name in names]


def _usual_size(number: int, kind: str, run: RunRecord, names: Sequence[str]) -> float:
    """The root mean square over all tensors."""
    squares = count = 0.0
    for name in names:
        joined = run.joined(number, kind, name)
        if joined is not None:
            squares += joined.value.square().sum().item()
            count += joined.value.numel()
    return math.sqrt(squares / count) if count else 0.0


def _apart(
    number: int, kind: str, name: str, alone: RunRecord, split: RunRecord, again: RunRecord | None, usual: float
) -> TensorDifference:
    """Compare a tensor of the split run with the run alone, relative to its norm.

    `usual`, the typical magnitude of a number, is a floor for tensors near zero. `noise` is the difference between
    two runs alone, if there was a second.
    """
    expected = alone.joined(number, kind, name)
    assert expected is not None
    repeated = again.joined(number, kind, name) if again is not None and number < again.steps else None
    of_ranks = split.joined(number, kind, name)
    difference = tensor_difference(
        name,
        expected.value,
        None if of_ranks is None else of_ranks.value,
        usual=usual,
        repeated=None if repeated is None else repeated.value,
        copies=() if of_ranks is None else of_ranks.copies,
    )
    if of_ranks is None or difference.missing:
        return difference
    return replace(
        difference, of_ranks=_of_ranks(of_ranks, expected.value), absent=of_ranks.absent if of_ranks.copies else ()
    )


def tensor_difference(
    name: str,
    expected: Tensor,
    value: Tensor | None,
    *,
    usual: float,
    repeated: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> TensorDifference:
    """Compare a whole tensor, in float64, with the known one; None or another shape: it is missing.

    `usual`: the typical magnitude of a number. `repeated`: the known one's noise. `copies`: of each rank.
    """
    norm = expected.norm().item()
    least = max(norm, _SMALL * usual * math.sqrt(max(1, expected.numel())), 1e-300)
    noise = _distance(repeated, expected) / least if repeated is not None else 0.0
    if value is None or value.shape != expected.shape:
        return TensorDifference(
            name=name, alone=norm, apart=math.inf, noise=noise, ranks_apart=0.0, ratio=0.0, rest=0.0, missing=True
        )
    product = (value * expected).sum().item()
    square, split_square = expected.square().sum().item(), value.square().sum().item()
    ratio, rest = ratio_of(product, square, split_square)
    return TensorDifference(
        name=name,
        alone=norm,
        apart=_distance(value, expected) / least,
        noise=noise,
        ranks_apart=max((_distance(copy, copies[0]) / least for copy in copies), default=0.0),
        ratio=ratio,
        rest=rest,
        product=product,
        square=square,
        split_square=split_square,
        usual=usual * math.sqrt(max(1, expected.numel())) / least,
    )


def _distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; infinite where either has NaN."""
    value = (one - other).norm().item()
    return value if math.isfinite(value) else math.inf


def ratio_of(product: float, square: float, split_square: float) -> tuple[float, float]:
    """r of the smallest |s - r a|, and that remainder relative to |s|, from the products of s and a."""
    if square <= 0 or split_square <= 0:
        return (1.0, 0.0) if split_square <= 0 and square <= 0 else (0.0, 1.0)
    ratio = product / square
    rest = max(0.0, 1.0 - product * product / (square * split_square))
    return ratio, math.sqrt(rest)


def _of_ranks(joined: JoinedTensor, expected: Tensor) -> list[tuple[float, float]]:
    """Return, for each rank's piece, its ratio to the known piece, and the remainder."""
    numbers = []
    for _, place, value in joined.pieces:
        piece = piece_of(expected, place).reshape(-1)
        flat = value.reshape(-1)
        if flat.numel():
            numbers.append(
                ratio_of((flat * piece).sum().item(), piece.square().sum().item(), flat.square().sum().item())
            )
    return numbers


def together(tensors: Sequence[TensorDifference]) -> tuple[float, float]:
    """Return ratio and remainder of several tensors as one."""
    return ratio_of(
        sum(tensor.product for tensor in tensors),
        sum(tensor.square for tensor in tensors),
        sum(tensor.split_square for tensor in tensors),
    )


def overall(tensors: Sequence[TensorDifference]) -> float:
    """The difference of several tensors as one, relative to their norm alone."""
    norm = math.sqrt(sum(tensor.alone**2 for tensor in tensors))
    apart = math.sqrt(sum((tensor.apart * tensor.alone) ** 2 for tensor in tensors if math.isfinite(tensor.apart)))
    return apart / norm if norm else 0.0


def common_module(names: Sequence[str]) -> str | None:
    """Return the common part of parameters' names: a parameter, or the innermost module that contains all."""
    if not names:
        return None
    if len(names) == 1:
        return names[0]
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared) or None
