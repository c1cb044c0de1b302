"""How far rounding alone may move a parameter whose gradient is nearly zero, under AdamW.

Some parameters have a gradient of zero whatever their values are: the bias of a convolution before a batch norm, the
biases of attention's keys. What is computed is the rounding of a sum that cancels, of about 1e-16, and no two orders
of summation give the same. SGD moves such a parameter by as little. AdamW divides a gradient by its own size, or by
`eps` where that is larger: 1e-16 / 1e-8 is 1e-8 of a whole learning rate, a hundred times a proof's tolerance.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from samestep.parallel.complex_parameters import as_real

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
