"""What an evaluation wants of a metric, and sums over counts as metrics.

Objects of torchmetrics fit. The tasks that ship use these classes: importing torchmetrics takes seconds, since it
imports scipy.signal and parts of transformers for metrics of sounds and texts.
"""

import math
from typing import Any, Protocol

import torch
from torch import Tensor

_AT_ONCE = 1024  # rows of a table of similarities


class Metric(Protocol):
    """Updated with the scores of some samples at a time; its value is over all of them."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...


class Ratio:
    """A sum over a count: the sum in float64. The value is NaN where nothing was counted."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.int64)

    def add(self, total: Tensor, count: Tensor | int) -> None:
        self.total = self.total + total.double().sum()
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count


class Share(Ratio):
    """One column's sum over its count. Updated with sums and counts, both [batches, columns]."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self._column = column

    def update(self, sums: Tensor, counts: Tensor) -> None:
        self.add(sums[:, self._column], counts[:, self._column].sum())


class SquaredError(Ratio):
    """The mean of squared differences. Updated with predictions and targets of one shape."""

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.add((predictions.double() - targets.double()).square(), targets.numel())


class Nearest:
    """The share of samples whose own counterpart is the nearest of all, by the product of their embeddings.

    Updated with the two embeddings of some samples, [samples, width] each. `turned`: the second one is looked up
    among the first ones.
    """

    def __init__(self, *, turned: bool = False) -> None:
        self._turned = turned
        self._known: list[tuple[Tensor, Tensor]] = []

    def update(self, first: Tensor, second: Tensor) -> None:
        self._known.append((second, first) if self._turned else (first, second))

    def compute(self) -> Tensor:
        if not self._known:
            return torch.tensor(math.nan)
        wanted, among = (torch.cat(parts).double() for parts in zip(*self._known, strict=True))
        nearest = torch.cat([(some @ among.T).argmax(dim=1) for some in wanted.split(_AT_ONCE)])
        return (nearest == torch.arange(len(wanted))).double().mean()
