"""Fingerprints of each module's output, two numbers a row, by which the first module that departs is found."""

from typing import Any

import torch
from torch import Tensor, nn

from samestep.recording.samples import named_tensors
from samestep.recording.shards import named_modules

_MOST_ROWS = 256
_MOST_CALLS = 1000
_MOST_NUMBERS = 1 << 14  # of a row; of a longer one, so many at equal distances


class Activations:
    """Records the output of every module, in order of completion, during a model's forward.

    For a row x it keeps the norm, and the product with cos(1.7 k + 0.3): the same numbers in another order, or with
    other signs, differ in one of the two.
    """

    def __init__(self, module: nn.Module, root: str, batch: int) -> None:
        self._names = {
            id(submodule): (name, type(submodule).__name__)
            for name, submodule in reversed(list(named_modules(module)))
        }
        self._batch = batch
        self._calls: list[dict[str, Any]] = []
        self._directions: dict[int, Tensor] = {}

    def add(self, module: nn.Module, result: Any) -> None:
        """Note one module's output: of each row its norm and its product with a fixed direction, both in float64.

        Of long rows some thousand evenly spaced numbers are taken. Two outputs with the same norms and products are
        the same for all that matters; which batch a row stood in plays no part.
        """
        name = self._names.get(id(module))
        value = next(
            (tensor for _, tensor in named_tensors(result) if tensor.is_floating_point() and tensor.dim() > 0), None
        )
        if name is None or value is None or not 0 < self._batch <= _MOST_ROWS or len(self._calls) >= _MOST_CALLS:
            return
        if value.shape[0] % self._batch or not value.numel():
            return
        rows = value.detach().reshape(self._batch, -1)
        numbers = rows.shape[1]
        rows = rows[:, :: max(1, numbers // _MOST_NUMBERS)].double()
        direction = self._direction(rows.shape[1], rows.device)
        self._calls.append(
            {
                "module": name[0],
                "kind": name[1],
                "numbers": numbers,
                "norms": rows.norm(dim=1).tolist(),
                "products": (rows @ direction).tolist(),
            }
        )

    def _direction(self, numbers: int, device: torch.device) -> Tensor:
        """A fixed vector without symmetry, the same in every process: [numbers] float64."""
        if numbers not in self._directions:
            steps = torch.arange(numbers, dtype=torch.float64, device=device)
            self._directions[numbers] = torch.cos(1.7 * steps + 0.3)
        return self._directions[numbers]

    def to_json(self) -> list[dict[str, Any]]:
        return self._calls
