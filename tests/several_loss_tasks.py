"""Tasks whose losses have several terms, each with a count of its own; for tests."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from coupled_tasks import Deep, Layers, Pairs
from small_tasks import Points
from torch import Tensor, nn

import samestep


class TwoTerms(Points):
    """Every point's class, and of some points alone how far out they lie."""

    loss_weights: ClassVar[Mapping[str, float]] = {"class": 1.0, "distance": 0.3}

    def __init__(self) -> None:
        super().__init__(samples=60, held_out=10, dropout=0.1)

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, nn.Sequential)
        model[-1] = nn.Linear(16, self.classes + 1)
        return model

    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        some = batch.targets == 0
        return {
            "distance": ((output[some, -1] - 0.7).square().sum(), some.sum()),
            "class": (F.cross_entropy(output[:, :-1], batch.targets, reduction="sum"), len(output)),
        }

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output[:, :-1], batch.targets


class TermsOfPairs(Pairs):
    """A contrastive term beside one of each sample by itself."""

    loss_weights: ClassVar[Mapping[str, float]] = {"pairs": 1.0, "size": 0.1}

    def loss(self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone) -> Any:
        some = batch.targets % 3 == 0
        return {
            "pairs": super().loss(output, batch, gather),
            "size": (output["first"][some].exp().sum(), some.sum()),
        }

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return Pairs.scores(_Plain(), output, batch)


class _Plain(Pairs):
    def __init__(self) -> None:
        pass


class DeepTerms(Layers):
    """Layers that a pipeline can cut, with two terms."""

    loss_weights: ClassVar[Mapping[str, float]] = {"near": 0.5, "far": 2.0}

    def model(self) -> nn.Module:
        return Deep()

    def loss(self, output: Any, batch: samestep.Batch, gather: samestep.Gather = samestep.alone) -> Any:
        near, far = output.chunk(2, dim=-1)
        mask = batch.targets % 2 == 0
        return {"near": (near.square().sum(), len(near)), "far": (far[mask].exp().sum(), mask.sum())}
