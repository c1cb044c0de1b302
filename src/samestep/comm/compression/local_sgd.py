"""Local SGD: every rank takes steps on its own samples, and every H steps the parameters are averaged.

Stich 2019, "Local SGD converges fast and communicates little", algorithm 1; a first phase with an average after each
step is Lin et al. 2020, "Don't use large mini-batches, use local SGD" (post-local SGD). The optimizer's state stays
the rank's own. In the mean a rank counts as many times as the terms that its losses had since the last one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.comm.compression.base import Method, Replica
from samestep.comm.compression.wire import WeightedMean, put_back, split_like
from samestep.communication import LocalSGD


class Averaging(Method):
    """Averages parameters after every `every`-th step."""

    diverges = True
    own_mean = True

    def __init__(self, options: LocalSGD, replica: Replica) -> None:
        super().__init__(options, replica)
        self._options = options
        self._steps = torch.zeros((), dtype=torch.int64)
        self._weight = torch.zeros((), dtype=torch.float64)  # terms since the last average

    def update(self, weight: float) -> None:
        """A local step, and after every H of them (each one at first) the weighted mean of the parameters."""
        self.replica.optimizer.step()
        self._steps += 1
        self._weight += weight
        steps = int(self._steps)
        if steps <= self._options.start or steps % self._options.every == 0:
            put_back(self._mean(), self.replica.tensors)
            self._weight.zero_()

    def _mean(self) -> Tensor:
        return WeightedMean(self.replica.wire, self.replica.tensors, float(self._weight)).wait()

    @property
    def alike(self) -> bool:
        return int(self._steps) <= self._options.start or int(self._steps) % self._options.every == 0

    def averaged(self) -> dict[str, Tensor]:
        """The weighted mean as of now, without putting it into the model."""
        values = split_like(self._mean(), self.replica.tensors)
        return dict(zip(self.replica.parameters, values, strict=True))

    def shared(self) -> Mapping[str, Tensor]:
        return {"steps": self._steps}

    def own(self) -> Mapping[str, Tensor]:
        return {"weight": self._weight}
