"""Relative differences of numbers, nests of numbers and tensors, and how far rounding alone may move a parameter."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.parallel.complex_parameters import as_real


def relative_tensors(mine: Tensor, theirs: Tensor, floor: float, rounding: Tensor | None = None) -> float:
    """max|mine - theirs| / max(max|theirs|, floor), after taking off what rounding may have made of each number."""
    if mine.shape != theirs.shape:
        return math.inf
    if mine.numel() == 0:
        return 0.0
    scale = max(theirs.abs().max().item(), floor)
    differences = (mine - theirs).abs()
    apart = (differences if rounding is None else (differences - rounding).clamp(min=0)).max().item()
    return _or_infinity(apart / scale if apart else apart)


def difference(mine: Any, theirs: Any) -> float:
    """The largest relative difference between two nests of numbers; infinite where their shapes differ.

    The thresholds of a curve are left out: they are predictions, rounded to float32 so that equal ones stay
    equal, and a difference in the sixteenth digit may round to another float32.
    """
    if isinstance(theirs, Mapping):
        if not isinstance(mine, Mapping) or mine.keys() != theirs.keys():
            return math.inf
        return largest(difference(mine[name], theirs[name]) for name in theirs if name != "thresholds")
    if isinstance(theirs, (list, tuple)):
        if not isinstance(mine, (list, tuple)) or len(mine) != len(theirs):
            return math.inf
        return largest(difference(a, b) for a, b in zip(mine, theirs, strict=True))
    if isinstance(theirs, (int, float)) and isinstance(mine, (int, float)):
        if (math.isnan(theirs) and math.isnan(mine)) or mine == theirs:
            return 0.0  # undefined or infinite for both, such as the recall of a class without samples
        return relative(float(mine), float(theirs))
    return 0.0 if mine == theirs else math.inf


def pairs(mine: Sequence[float], theirs: Sequence[float]) -> Iterator[tuple[float, float]]:
    if len(mine) != len(theirs):
        yield math.nan, math.nan
    yield from zip(mine, theirs, strict=False)


def relative(mine: float, theirs: float) -> float:
    """|mine - theirs| / |theirs|; infinite where one is not a number."""
    apart = abs(mine - theirs)
    return _or_infinity(apart / abs(theirs) if apart and theirs else apart)


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value


def largest(values: Iterator[float] | Any) -> float:
    return max(values, default=0.0)


# A gradient's rounding beside the whole gradient's norm, in float64: four gaps between 1 and the next number. In
# models with batch norm, samples in another order moved the biases before it by a thirtieth of what this allows.
_ROUNDING = 4 * 2.0**-52


class Rounding:
    """Adds up, step by step, by how much a gradient's rounding may move each number of each parameter."""

    def __init__(self) -> None:
        self._steps = 0
        self._largest: dict[str, Tensor] = {}  # gradient of each number so far
        self.moves: dict[str, Tensor] = {}

    def add(
        self, gradients: Iterable[tuple[str, Tensor]], norm: float, settings: Mapping[str, tuple[float, float]]
    ) -> None:
        """Take notice of a step: gradients and their norm, both as the optimizer saw them.

        `settings`: learning rate and eps by parameter; those that are not named are stepped without a division.

        AdamW divides by the root of a mean of squares, of which each of `steps` steps has at least its share.
        """
        self._steps += 1
        for name, gradient in gradients:
            if name not in settings:
                continue
            lr, eps = settings[name]
            size = as_real(gradient).abs()
            largest = torch.maximum(self._largest.get(name, torch.zeros_like(size)), size)
            move = lr * _ROUNDING * norm / (largest / self._steps**0.5 + eps)
            self._largest[name] = largest
            self.moves[name] = self.moves.get(name, torch.zeros_like(move)) + move
