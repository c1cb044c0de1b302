"""The metrics of a classification: accuracy, each class's precision, recall, F1 and support, and its curves.

All but the curves are read off the confusion matrix. Definitions as in Manning, Raghavan and Schütze 2008, chapter 8;
a ratio over no samples is 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.tasks.metric import Metric


class OfConfusion:
    """A function of the confusion matrix. Updated with probabilities [samples, classes] and classes [samples]."""

    def __init__(self, classes: int, value: Callable[[Tensor], Tensor]) -> None:
        self._classes = classes
        self._value = value
        self._matrix = torch.zeros(classes, classes, dtype=torch.int64)  # [true class, predicted class]

    def update(self, probabilities: Tensor, truth: Tensor) -> None:
        pairs = truth * self._classes + probabilities.argmax(dim=1)
        found = torch.bincount(pairs, minlength=self._classes**2)
        self._matrix = self._matrix + found.reshape(self._classes, self._classes)

    def compute(self) -> Tensor:
        return self._value(self._matrix)


class PrecisionRecallCurve:
    """Precision and recall of each class against all others, at each distinct probability as the threshold.

    Updated as `OfConfusion`. It keeps all probabilities. The recall of a class without a sample is NaN.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._probabilities: list[Tensor] = []
        self._truth: list[Tensor] = []

    def update(self, probabilities: Tensor, truth: Tensor) -> None:
        self._probabilities.append(probabilities)
        self._truth.append(truth)

    def compute(self) -> dict[str, list[Tensor]]:
        """Thresholds ascend. Behind the last stands the point of precision 1 and recall 0, without a threshold."""
        if not self._truth:
            raise RuntimeError("a curve was asked for before any sample")
        probabilities, truth = torch.cat(self._probabilities), torch.cat(self._truth)
        curves = [_curve(probabilities[:, number], truth == number) for number in range(self._classes)]
        precision, recall, thresholds = (list(parts) for parts in zip(*curves, strict=True))
        return {"precision": precision, "recall": recall, "thresholds": thresholds}


def _curve(scores: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Precision [thresholds + 1], recall [thresholds + 1] and thresholds of one class."""
    scores, order = scores.sort(descending=True)
    last = torch.nonzero(scores.diff(), as_tuple=True)[0]  # of each run of equal scores but the lowest
    last = torch.cat([last, torch.tensor([len(scores) - 1])])
    true = positive[order].cumsum(dim=0)[last]
    precision, recall = true / (last + 1), true / true[-1]
    return (
        torch.cat([precision.flip(0), torch.ones(1)]),
        torch.cat([recall.flip(0), torch.zeros(1)]),
        scores[last].flip(0),
    )


def _accuracy(matrix: Tensor) -> Tensor:
    return _over(matrix.diagonal().sum(), matrix.sum())


def _precision(matrix: Tensor) -> Tensor:
    return _over(matrix.diagonal(), matrix.sum(dim=0))


def _recall(matrix: Tensor) -> Tensor:
    return _over(matrix.diagonal(), matrix.sum(dim=1))


def _f1(matrix: Tensor) -> Tensor:
    return _over(2 * matrix.diagonal(), matrix.sum(dim=0) + matrix.sum(dim=1))


def _support(matrix: Tensor) -> Tensor:
    """How many samples each class has. [classes]"""
    return matrix.sum(dim=1)


def _itself(matrix: Tensor) -> Tensor:
    return matrix


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in float32, 0 where the whole is 0."""
    return torch.where(whole == 0, 0.0, part.float() / whole.float())


def classification_metrics(classes: int) -> dict[str, Metric]:
    """Metrics to update with class probabilities [samples, classes] and true classes [samples]."""
    made: Callable[[Any], OfConfusion] = partial(OfConfusion, classes)
    return {
        "accuracy": made(_accuracy),
        "precision": made(_precision),
        "recall": made(_recall),
        "f1": made(_f1),
        "support": made(_support),
        "confusion_matrix": made(_itself),
        "precision_recall_curve": PrecisionRecallCurve(classes),
    }
