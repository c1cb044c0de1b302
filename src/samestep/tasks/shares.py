"""Metrics that are sums over counts: the mean loss of a term, the share of right labels."""

import torch
from torch import Tensor
from torchmetrics import Metric


class Share(Metric):
    """One column's sum over its count, in float64. Updated with sums and counts, both [batches, columns]."""

    total: Tensor
    count: Tensor

    def __init__(self, column: int) -> None:
        super().__init__()
        self._column = column
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, sums: Tensor, counts: Tensor) -> None:
        self.total += sums[:, self._column].double().sum()
        self.count += counts[:, self._column].sum()

    def compute(self) -> Tensor:
        return self.total / self.count
