"""1-bit Adam: after a warm-up of plain Adam the variance is frozen, and momenta are averaged in one bit a number.

Tang et al. 2021, "1-bit Adam: Communication efficient large-scale training with Adam's convergence speed", algorithm
1. On rank r, with its share g_r of the gradient (the mean of the shares is the global batch's gradient):

    m_r = beta1 * m + (1 - beta1) * g_r;  m = one-bit mean of m_r;  x = x - lr * m / (sqrt(v) + eps)

v and m keep AdamW's corrections for their bias, and x its decay. Numbers whose gradient was zero all through the
warm-up stay as they are afterwards: their v is zero, and one bit can't say that their m is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.comm.compression.adam_state import adam_entries
from samestep.comm.compression.base import Method, Range, Replica
from samestep.comm.compression.one_bit import OneBitMean
from samestep.comm.compression.wire import flat, split_like
from samestep.communication import OneBitAdam


class OneBitMomentum(Method):
    """Adam with a variance that is frozen after some steps."""

    def __init__(self, options: OneBitAdam, replica: Replica) -> None:
        super().__init__(options, replica)
        self._warmup = options.warmup
        self._steps = torch.zeros((), dtype=torch.int64)
        self._mean = OneBitMean(replica.wire, [tensor.numel() for tensor in replica.tensors], replica.tensors[0])

    def exchange(self) -> bool:
        """In the warm-up gradients are averaged in full; after it momenta travel instead, in `update`."""
        if int(self._steps) >= self._warmup:
            return False
        parameters = self.replica.parameters.values()
        self.replica.wire.mean([parameter.grad for parameter in parameters if parameter.grad is not None])
        return True

    def update(self, weight: float) -> None:
        """Plain Adam in the warm-up, one-bit steps after it."""
        if int(self._steps) < self._warmup:
            self.replica.optimizer.step()
        else:
            self._step_by_one_bit()
        self._steps += 1

    def _step_by_one_bit(self) -> None:
        """Average the ranks' momenta in one bit a number, and step with the frozen variance.

        With m the averaged momentum and v the frozen variance: p <- p * (1 - lr * decay) - lr / (1 - beta1^t) * m /
        divisor(v).
        """
        entries = list(adam_entries(self.replica.optimizer, list(self.replica.parameters.values())))
        vector = self._mean.mean(flat([entry.new_momentum for entry in entries]))
        for entry, momentum in zip(entries, split_like(vector, self.replica.tensors), strict=True):
            entry.momentum.copy_(momentum)
            renewals = float(entry.steps)  # of the warm-up
            steps = renewals + int(self._steps) + 1 - self._warmup
            entry.parameter.mul_(1 - entry.lr * entry.weight_decay)
            rate = entry.lr / (1 - entry.betas[0] ** steps)
            entry.parameter.addcdiv_(momentum, entry.divisor(renewals), value=-rate)

    def shared(self) -> Mapping[str, Tensor]:
        return {"steps": self._steps}

    def own(self) -> Mapping[str, Tensor]:
        return {"error": self._mean.error}

    def ranges(self) -> Mapping[str, Range]:
        return {"error_of_mean": self._mean.of_chunk}
