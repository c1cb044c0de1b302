"""Fingerprints: random projections of a tensor to a few numbers, equal for equal tensors on any rank and device.

They are linear, so the fingerprint of a mean of gradients is the mean of their fingerprints: whether a reduced
gradient is the mean of ranks' own is seen from a few numbers of each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = 4  # of a fingerprint; a difference has to be orthogonal to as many random directions to be overlooked
_PIECE = 1 << 14  # numbers of a tensor that are projected by one matrix
_AT_ONCE = 1 << 10  # such pieces, so that a copy in float64 takes 128 MiB at most
_SEED = 20_260
_TURN = (math.sqrt(5) - 1) / 2  # multiples of it, without their whole part, repeat nowhere


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Projections of a tensor, and its norm."""

    numbers: tuple[float, ...]
    norm: float

    def distance(self, other: "Fingerprint") -> float:
        """An estimate of the norm of the tensors' difference, relative to the larger one's norm.

        A projection on a direction of normal numbers has the variance of the squared norm (Johnson and
        Lindenstrauss), up to the weights of pieces, which are between 1 and 2.
        """
        largest = max(self.norm, other.norm)
        apart = math.fsum((a - b) ** 2 for a, b in zip(self.numbers, other.numbers, strict=True))
        return math.sqrt(apart / NUMBERS) / largest if largest else 0.0

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (*self.numbers, self.norm)))

    def times(self, factor: float) -> "Fingerprint":
        """The fingerprint of the tensor times a number."""
        return Fingerprint(numbers=tuple(factor * value for value in self.numbers), norm=abs(factor) * self.norm)

    @classmethod
    def zero(cls) -> "Fingerprint":
        return cls(numbers=(0.0,) * NUMBERS, norm=0.0)

    def to_json(self) -> list[float]:
        return [*self.numbers, self.norm]

    @classmethod
    def from_json(cls, values: Sequence[float]) -> "Fingerprint":
        return cls(numbers=tuple(values[:NUMBERS]), norm=values[NUMBERS])


def mean_of(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """The fingerprint of the mean of tensors; the norm is not known, and that of the largest is taken."""
    count = len(fingerprints)
    numbers = tuple(math.fsum(values) / count for values in zip(*(one.numbers for one in fingerprints), strict=True))
    return Fingerprint(numbers=numbers, norm=max(one.norm for one in fingerprints))


class Projection:
    """Projects tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        # Drawn on the CPU by a generator of its own: the same numbers everywhere, and none of the training's.
        generator = torch.Generator().manual_seed(_SEED)
        directions = torch.randn(_PIECE, NUMBERS, generator=generator, dtype=torch.float64)
        self.device = device
        self._directions = directions.to(device)  # [numbers of a piece, NUMBERS]

    def of(self, tensor: Tensor) -> Tensor:
        """The projections, then the sum of squares, as one tensor that is not waited for: [NUMBERS + 1]."""
        flat = tensor.detach().reshape(-1)
        result = torch.zeros(NUMBERS + 1, dtype=torch.float64, device=self.device)
        for number, part in enumerate(flat.split(_PIECE * _AT_ONCE)):
            values = part.to(torch.float64)
            result[NUMBERS] += values.square().sum()
            whole = len(values) // _PIECE
            pieces = values[: whole * _PIECE].view(whole, _PIECE)
            # Each piece counts differently, so that two that change places are seen.
            places = torch.arange(whole + 1, dtype=torch.float64, device=values.device) + number * _AT_ONCE
            weights = 1 + (places * _TURN) % 1
            result[:NUMBERS] += weights[:whole] @ (pieces @ self._directions)
            rest = values[whole * _PIECE :]
            result[:NUMBERS] += weights[whole] * (rest @ self._directions[: len(rest)])
        return result


def fingerprint(projected: Tensor) -> Fingerprint:
    """Read what `Projection.of` gave; here the device is waited for."""
    *numbers, squares = projected.tolist()
    return Fingerprint(numbers=tuple(numbers), norm=math.sqrt(squares))
