"""Metrics of an evaluation: their protocol, sums over counts, and those of a classification."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

_AT_ONCE = 1024  # rows of a table of similarities


class Metric(Protocol):
    """Updated with the scores of some samples at a time; its value is over all of them."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...


class Ratio:
    """A sum over a count: the sum in float64. The value is NaN where nothing was counted."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.int64)

    def add(self, total: Tensor, count: Tensor | int) -> None:
        self.total = self.total + total.double().sum()
        self.count = self.count + count

    def compute(self) -> Tensor:
        return self.total / self.count


class ColumnMean(Ratio):
    """Sum of one column over its count. Updated with sums and counts, both [batches, columns]."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self._column = column

    def update(self, sums: Tensor, counts: Tensor) -> None:
        self.add(sums[:, self._column], counts[:, self._column].sum())


class SquaredError(Ratio):
    """The mean of squared differences. Updated with predictions and targets of one shape."""

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.add((predictions.double() - targets.double()).square(), targets.numel())


class Nearest:
    """The share of samples whose own counterpart is the nearest of all, by the product of their embeddings.

    Updated with the two embeddings of some samples, [samples, width] each. `turned`: the second one is looked up
    among the first ones.
    """

    def __init__(self, *, turned: bool = False) -> None:
        self._turned = turned
        self._known: list[tuple[Tensor, Tensor]] = []

    def update(self, first: Tensor, second: Tensor) -> None:
        self._known.append((second, first) if self._turned else (first, second))

    def compute(self) -> Tensor:
        """The share of rows whose nearest among all others' rows is their own."""
        if not self._known:
            return torch.tensor(math.nan)
        targets, among = (torch.cat(parts).double() for parts in zip(*self._known, strict=True))
        nearest = torch.cat([(some @ among.T).argmax(dim=1) for some in targets.split(_AT_ONCE)])
        return (nearest == torch.arange(len(targets))).double().mean()


class OfConfusion:
    """A function of the confusion matrix. Updated with probabilities [samples, classes] and classes [samples]."""

    def __init__(self, classes: int, value: Callable[[Tensor], Tensor]) -> None:
        self._classes = classes
        self._value = value
        self._matrix = torch.zeros(classes, classes, dtype=torch.int64)  # [true class, predicted class]

    def update(self, probabilities: Tensor, truth: Tensor) -> None:
        """Count pairs of truth and prediction: [classes, classes]."""
        pairs = truth * self._classes + probabilities.argmax(dim=1)
        counts = torch.bincount(pairs, minlength=self._classes**2)
        self._matrix = self._matrix + counts.reshape(self._classes, self._classes)

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
