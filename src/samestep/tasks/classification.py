"""The metrics of a classification: accuracy, each class's precision, recall, F1 and support, and its curves."""

import warnings

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
    MulticlassStatScores,
)


class Support(MulticlassStatScores):
    """How many samples each class has. [classes]"""

    def compute(self) -> Tensor:
        return super().compute()[:, 4]  # of true positives, false positives, true and false negatives, support


def classification_metrics(classes: int) -> dict[str, Metric]:
    """Metrics to update with class probabilities [samples, classes] and true classes [samples]."""
    with warnings.catch_warnings():
        # The exact curve keeps every score, which is meant.
        warnings.filterwarnings("ignore", message=".*will save all targets and predictions in buffer")
        curves = MulticlassPrecisionRecallCurve(classes, thresholds=None)
    return {
        "accuracy": MulticlassAccuracy(classes, average="micro"),
        "precision": MulticlassPrecision(classes, average=None),
        "recall": MulticlassRecall(classes, average=None),
        "f1": MulticlassF1Score(classes, average=None),
        "support": Support(classes, average=None),
        "confusion_matrix": MulticlassConfusionMatrix(classes),
        "precision_recall_curve": curves,
    }
