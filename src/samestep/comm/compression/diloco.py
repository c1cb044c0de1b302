"""DiLoCo: local steps, then an outer step with Nesterov momentum along the ranks' mean change.

Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language models", algorithm 1: with the
parameters a that all ranks began a round with, and those p_r that rank r reached in H steps,

    d = mean over r of (a - p_r);  u = momentum * u + d;  a = a - lr * (d + momentum * u);  p_r = a

In the mean a rank counts as many times as the terms that its losses had in the round. Streaming DiLoCo (Douillard et
al. 2025, algorithm 2) cuts the model into fragments, each with a round of its own that begins H / fragments steps
after the one before, and lets `overlap` local steps go on while d is on its way; then p_r = mixing * p_r + (1 -
mixing) * a. It sends a - p_r in 4 bits a number (few_bits.py).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.comm.compression.base import Method, Replica
from samestep.comm.compression.few_bits import FewBitsMean
from samestep.comm.compression.wire import WeightedMean, flat, put_back, split_like
from samestep.communication import DiLoCo
from samestep.errors import UserError


class _Fragment:
    """Consecutive parameters of the model that take their outer steps together."""

    def __init__(self, names: list[str], parameters: list[Tensor], offset: int, options: DiLoCo) -> None:
        """`offset`: the fragment's rounds end after steps offset, offset + every, ..."""
        self.names = names
        self.parameters = parameters
        self._offset = offset
        self._options = options
        self.begun = flat(parameters)  # the parameters at the round's start, the same on all ranks
        self.momentum = torch.zeros_like(self.begun)
        self.weight = torch.zeros((), dtype=torch.float64)  # terms of this rank's losses in the round
        # With overlap: the mean change of the pending outer step, and the number of the step at which it is applied.
        self.change = torch.zeros_like(self.begun) if options.overlap else None
        self.due = torch.full((), -1, dtype=torch.int64)
        self._coming: WeightedMean | FewBitsMean | None = None

    def ends_round(self, steps: int) -> bool:
        return steps > 0 and steps % self._options.every == self._offset

    def mean_change(self, replica: Replica) -> WeightedMean:
        """The mean of a - p_r over the ranks, sent uncompressed."""
        return WeightedMean(replica.wire, [self.begun - flat(self.parameters)], float(self.weight))

    def _send_change(self, replica: Replica, *, asynchronous: bool) -> WeightedMean | FewBitsMean:
        """Begin to average a - p_r [elements of the fragment] over the ranks, in `options.bits` bits an element."""
        change, weight = self.begun - flat(self.parameters), float(self.weight)
        if self._options.bits == 32:
            return WeightedMean(replica.wire, [change], weight, asynchronous=asynchronous)
        return FewBitsMean(replica.wire, change, weight, self._options.bits, asynchronous=asynchronous)

    def end_round(self, replica: Replica, steps: int) -> None:
        """Average the round's change, and take the outer step at once or `overlap` steps later."""
        coming = self._send_change(replica, asynchronous=self.change is not None)
        self.weight.zero_()
        if self.change is None:
            self._outer_step(coming.wait())
            put_back(self.begun, self.parameters)
        else:
            self._coming = coming
            self.due.fill_(steps + self._options.overlap)

    def receive(self) -> None:
        """Wait for the pending mean change, if there is one."""
        if self._coming is not None and self.change is not None:
            self.change.copy_(self._coming.wait())
            self._coming = None

    def apply_if_due(self, steps: int) -> None:
        """Take the outer step that is due after `overlap` steps, and mix it into the parameters."""
        if self.change is None or int(self.due) != steps:
            return
        self.receive()
        self._outer_step(self.change)
        self.due.fill_(-1)
        mixed = flat(self.parameters).lerp_(self.begun, 1 - self._options.mixing)
        put_back(mixed, self.parameters)

    def _outer_step(self, change: Tensor) -> None:
        """Nesterov momentum: u = m * u + d, a = a - lr * (d + m * u). On every rank alike."""
        momentum = self._options.outer_momentum
        self.momentum.mul_(momentum).add_(change)
        self.begun.sub_(change.add(self.momentum, alpha=momentum), alpha=self._options.outer_lr)


class OuterMomentum(Method):
    """Local steps, with an outer step of each fragment every `every` steps."""

    diverges = True
    own_mean = True

    def __init__(self, options: DiLoCo, replica: Replica) -> None:
        super().__init__(options, replica)
        self._steps = torch.zeros((), dtype=torch.int64)
        self._fragments = _fragments(options, replica)

    def update(self, weight: float) -> None:
        """A local step, and the outer steps that are due after it."""
        self.replica.optimizer.step()
        self._steps += 1
        steps = int(self._steps)
        for fragment in self._fragments:
            fragment.weight += weight
            fragment.apply_if_due(steps)
            if fragment.ends_round(steps):
                fragment.end_round(self.replica, steps)

    @property
    def alike(self) -> bool:
        """True right after a round, if the model is one fragment and outer steps are not overlapped."""
        only = self._fragments[0]
        steps = int(self._steps)
        return len(self._fragments) == 1 and only.change is None and (steps == 0 or only.ends_round(steps))

    def averaged(self) -> dict[str, Tensor]:
        """The mean of the ranks' parameters, where an outer step with rate 1 and no momentum would go."""
        means: dict[str, Tensor] = {}
        for fragment in self._fragments:
            mean = fragment.begun - fragment.mean_change(self.replica).wait()
            means |= zip(fragment.names, split_like(mean, fragment.parameters), strict=True)
        return means

    def shared(self) -> Mapping[str, Tensor]:
        """Outer state of all fragments. Waits for pending exchanges, which a checkpoint must include."""
        state: dict[str, Tensor] = {"steps": self._steps}
        for number, fragment in enumerate(self._fragments):
            fragment.receive()
            state[f"{number}.begun"] = fragment.begun
            state[f"{number}.momentum"] = fragment.momentum
            if fragment.change is not None:
                state[f"{number}.change"], state[f"{number}.due"] = fragment.change, fragment.due
        return state

    def own(self) -> Mapping[str, Tensor]:
        return {f"{number}.weight": fragment.weight for number, fragment in enumerate(self._fragments)}


def _fragments(options: DiLoCo, replica: Replica) -> list[_Fragment]:
    """The model's parameters, in its order, in parts of near-equal size; a parameter is never cut."""
    named = dict(zip(replica.parameters, replica.tensors, strict=True))
    if options.fragments > len(named):
        raise UserError(
            f"recipe.communication.fragments is {options.fragments}, and the model has {len(named)} parameters; "
            f"use at most {len(named)}"
        )
    total = sum(tensor.numel() for tensor in named.values())
    parts: list[list[str]] = [[]]
    taken = 0
    for number, (name, tensor) in enumerate(named.items()):
        missing = options.fragments - len(parts)
        full = parts[-1] and taken >= total * len(parts) / options.fragments
        if missing and parts[-1] and (full or len(named) - number == missing):
            parts.append([])
        parts[-1].append(name)
        taken += tensor.numel()
    return [
        _Fragment(part, [named[name] for name in part], options.every * number // options.fragments, options)
        for number, part in enumerate(parts)
    ]
