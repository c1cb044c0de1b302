"""A moving average of the weights: of the parts that this rank holds, so it is sliced and sharded as they are.

Every number is averaged by itself, so a rank's parts of the average are those of one process's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.parallel.sharding import Entry, ShardTable, local
from samestep.parallel.state_shards import Piece, piece_of
from samestep.recipe import Average

AVERAGE = "average."


class WeightAverage:
    """The average of the parameters that are trained.

    average <- decay * average + (1 - decay) * weights, every `every` steps from step `start` on (Polyak & Juditsky
    1992, in its exponential form). In the parameters' dtype.
    """

    def __init__(self, model: nn.Module, settings: Average) -> None:
        self._settings = settings
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._values: dict[str, Tensor] = {}  # of the parts that this rank holds; nothing before it begins

    @torch.no_grad()
    def after(self, done: int) -> None:
        """Take notice of the weights after `done` steps."""
        settings = self._settings
        if done < settings.start or (done - settings.start) % settings.every:
            return
        if not self._values:
            self._values = {name: local(p.detach()).clone() for name, p in self._trained.items()}
            return
        for name, value in self._values.items():
            value.lerp_(local(self._trained[name].detach()), 1 - settings.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average for its weights meanwhile; before the average begins, its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap weights and average, one parameter at a time, in place."""
        for name, value in self._values.items():
            weights = local(self._trained[name].detach())
            kept = weights.clone()
            weights.copy_(value)
            value.copy_(kept)

    def tensors(self) -> Iterator[Tensor]:
        yield from self._values.values()

    def pieces(self, parts: ShardTable) -> dict[str, Piece]:
        """What this rank holds of it: `average.<parameter>`."""
        return {
            AVERAGE + name: piece_of(self._trained[name], parts.part(name), parts.parameters[name].shape, value)
            for name, value in self._values.items()
        }

    def to_fill(self, saved: Mapping[str, Entry], parts: ShardTable) -> dict[str, Piece]:
        """The same where it is to become what was saved, if anything was."""
        self._values = {
            name: local(p.detach()).clone() for name, p in self._trained.items() if AVERAGE + name in saved
        }
        return self.pieces(parts)
