"""A moving average of the weights, sliced and sharded like the weights.

The average is elementwise, so each rank averages the parts that it holds.
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
        """Update the average with the weights after `done` steps."""
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
        """Context in which the model has the average as its weights, if the average has begun."""
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
        """This rank's pieces of the average: `average.<parameter>`."""
        return {
            AVERAGE + name: piece_of(self._trained[name], parts.part(name), parts.parameters[name].shape, value)
            for name, value in self._values.items()
        }

    def to_fill(self, saved: Mapping[str, Entry], parts: ShardTable) -> dict[str, Piece]:
        """Allocate the average for the saved names, and return its pieces to read into."""
        self._values = {
            name: local(p.detach()).clone() for name, p in self._trained.items() if AVERAGE + name in saved
        }
        return self.pieces(parts)
