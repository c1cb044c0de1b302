"""0/1 Adam: one bit a number from the first step, a variance that is renewed ever more seldom, then local steps.

Lu et al. 2022, "Maximizing communication efficiency for large-scale training via 0/1 Adam", algorithm 1. On rank r,
with its share g_r of the gradient and the parameters a that all ranks had after the last exchange:

    m_r = beta1 * m_r + (1 - beta1) * g_r;  x_r = x_r - lr * m_r / (sqrt(v) + eps);  u_r = u_r + lr * m_r
    in steps with an exchange:  u = one-bit mean of u_r;  m_r = u / (sum of lr since the last one)
                                a = x_r = a - u / (sqrt(v) + eps);  u_r = 0

v is renewed from the gradient's whole average in the steps k(0) = 0, k(j + 1) = k(j) + 2^floor(j / variance_scaler),
until `variance_stop`. Such a step takes m from that average too, as DeepSpeed's implementation does. From then on
only every second step has an exchange, after `local_scaler` steps every fourth, and so on, up to every
`local_most`-th. lr above is AdamW's with its correction for the bias of m; v has its correction, and x and a AdamW's
decay.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.comm.compression.adam_state import AdamEntry, adam_entries
from samestep.comm.compression.base import Method, Range, Replica
from samestep.comm.compression.one_bit import OneBitMean
from samestep.comm.compression.wire import WeightedMean, flat, split_like
from samestep.communication import ZeroOneAdam


class LocalOneBit(Method):
    """Adam whose ranks take local steps, and average their updates in one bit an element every few steps."""

    diverges = True

    def __init__(self, options: ZeroOneAdam, replica: Replica) -> None:
        super().__init__(options, replica)
        self._options = options
        self._steps = torch.zeros((), dtype=torch.int64)
        self._since = torch.zeros((), dtype=torch.int64)  # steps since the last exchange
        self._renewals = torch.zeros((), dtype=torch.int64)  # of the variance
        self._next_renewal = torch.zeros((), dtype=torch.int64)  # the step of the next one
        self._anchor = flat(replica.tensors)  # a above
        self._update = torch.zeros_like(self._anchor)  # u above
        self._rates = torch.zeros(len(replica.tensors), dtype=torch.float64)  # sum of lr, for each parameter
        self._mean = OneBitMean(replica.wire, [tensor.numel() for tensor in replica.tensors], replica.tensors[0])

    @property
    def _renews(self) -> bool:
        """Whether this step averages gradients in full and renews the variance with them."""
        steps = int(self._steps)
        return steps < self._options.variance_stop and steps == int(self._next_renewal)

    def _interval(self, step: int) -> int:
        """Steps from one exchange to the next, at a step counted from 0."""
        beyond = step - self._options.variance_stop
        if beyond < 0:
            return 1
        doublings = min(1 + beyond // self._options.local_scaler, 30)
        return min(self._options.local_most, 2**doublings)

    def exchange(self) -> bool:
        """Gradients are averaged in full only where the variance is renewed."""
        if not self._renews:
            return False
        parameters = self.replica.parameters.values()
        self.replica.wire.mean([parameter.grad for parameter in parameters if parameter.grad is not None])
        return True

    def update(self, weight: float) -> None:
        """Take an Adam step with this rank's momentum, and accumulate the update for the next exchange.

        `_anchor` holds the parameters after the last exchange, with the same weight decay as the parameters;
        `_update` accumulates this rank's updates since then, and `_rates` their learning rates.
        """
        entries = list(adam_entries(self.replica.optimizer, list(self.replica.parameters.values())))
        anchors = split_like(self._anchor, self.replica.tensors)
        step, renews = int(self._steps), self._renews
        if renews:
            self._renew(entries)
        self._steps += 1
        updates = split_like(self._update, self.replica.tensors)
        for number, entry in enumerate(entries):
            rate = entry.lr / (1 - entry.betas[0] ** (step + 1))
            entry.momentum.copy_(entry.new_momentum)
            entry.steps.fill_(step + 1)
            entry.parameter.mul_(1 - entry.lr * entry.weight_decay)
            anchors[number].mul_(1 - entry.lr * entry.weight_decay)
            entry.parameter.addcdiv_(entry.momentum, self._divisor(entry), value=-rate)
            updates[number].add_(entry.momentum, alpha=rate)
            self._rates[number] += rate
        self._since += 1
        if renews:
            self._begin_anew()  # all ranks took the same step
        elif int(self._since) >= self._interval(step):
            self._meet(entries, anchors)

    def _divisor(self, entry: AdamEntry) -> Tensor:
        return entry.divisor(int(self._renewals))

    def _renew(self, entries: list[AdamEntry]) -> None:
        """v <- beta2 * v + (1 - beta2) * g^2, and the next renewal twice as far away after every few of them."""
        for entry in entries:
            entry.variance.mul_(entry.betas[1])
            if entry.gradient is not None:
                entry.variance.addcmul_(entry.gradient, entry.gradient, value=1 - entry.betas[1])
        self._next_renewal += 2 ** min(int(self._renewals) // self._options.variance_scaler, 30)
        self._renewals += 1

    def _meet(self, entries: list[AdamEntry], anchors: list[Tensor]) -> None:
        """Average the ranks' accumulated updates in one bit an element, and apply the mean to the anchor."""
        tensors = self.replica.tensors
        for number, update in enumerate(split_like(self._mean.mean(self._update), tensors)):
            entry = entries[number]
            entry.momentum.copy_(update / float(self._rates[number]))
            anchors[number].addcdiv_(update, self._divisor(entry), value=-1)
            entry.parameter.copy_(anchors[number])
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset the anchor to the parameters, now the same on all ranks, and clear the accumulated update."""
        self._anchor.copy_(flat(self.replica.tensors))
        self._update.zero_()
        self._rates.zero_()
        self._since.zero_()

    @property
    def alike(self) -> bool:
        return int(self._since) == 0

    def averaged(self) -> dict[str, Tensor]:
        mean = WeightedMean(self.replica.wire, self.replica.tensors, 1.0).wait()
        return dict(zip(self.replica.parameters, split_like(mean, self.replica.tensors), strict=True))

    def shared(self) -> Mapping[str, Tensor]:
        return {
            "steps": self._steps,
            "since": self._since,
            "renewals": self._renewals,
            "next_renewal": self._next_renewal,
            "anchor": self._anchor,
            "rates": self._rates,
        }

    def own(self) -> Mapping[str, Tensor]:
        return {"update": self._update, "error": self._mean.error}

    def ranges(self) -> Mapping[str, Range]:
        return {"error_of_mean": self._mean.of_chunk}
