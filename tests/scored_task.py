"""A small task with every kind of metric: single numbers, numbers a class, a matrix, a curve."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from small_tasks import Points
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
)

import samestep


class Seen(Metric):
    """The classes of all samples, in the order in which they came."""

    targets: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("targets", default=[], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.targets.append(targets)

    def compute(self) -> Tensor:
        return torch.cat(self.targets)


class Scored(Points):
    """Points of three classes, scored by probabilities; the model starts from `weights` where they are given.

    Three classes, as a curve has three parts: which of the two a list of three is must not be guessed.
    """

    def __init__(
        self,
        *,
        samples: int = 77,
        held_out: int = 50,
        dropout: float = 0.0,
        weights: Path | None = None,
        curve: bool = True,
    ) -> None:
        super().__init__(samples=samples, held_out=held_out, classes=3, dropout=dropout)
        self.weights, self.curve = weights, curve

    def model(self) -> nn.Module:
        model = super().model()
        if self.weights is not None:
            model.load_state_dict(load_file(self.weights))
        return model

    def scores(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        return output.softmax(dim=-1).float(), batch.targets

    def metrics(self) -> Mapping[str, Metric]:
        metrics: dict[str, Metric] = {
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "precision": MulticlassPrecision(3, average=None),
            "recall": MulticlassRecall(3, average=None),
            "f1": MulticlassF1Score(3, average=None),
            "confusion_matrix": MulticlassConfusionMatrix(3),
            "seen": Seen(),
        }
        # A curve over so few samples that a class has none would warn.
        return {**metrics, "curve": MulticlassPrecisionRecallCurve(3)} if self.curve else metrics


def evaluations(cases: list[tuple[Scored, int]]) -> list[dict[str, object]]:
    """The metrics of each task's held-out samples in batches of so many, over as many ranks as there are."""
    torch.manual_seed(0)
    found = []
    with samestep.session("ddp", device="cpu") as session:
        for task, batch in cases:
            model = task.model()
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            metrics = session.evaluate(
                task.held_out,
                collate=task.collate,
                metrics=task.metrics(),
                scores=task.scores,
                batch=batch,
                class_names=task.class_names(),
            )
            found.append(metrics)
    return found
