"""The metrics of the tasks that ship give the numbers of torchmetrics, bit by bit."""

import math
from typing import Any

import pytest
import torch
from torchmetrics import MeanSquaredError
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
    MulticlassStatScores,
)

from samestep.tasks.metrics import Metric, PrecisionRecallCurve, SquaredError, classification_metrics

pytestmark = pytest.mark.quick


def updated(metrics: dict[str, Any], classes: int, batches: list[int]) -> dict[str, Any]:
    """The values after batches of samples of these sizes; with ties, and without a sample of class 1."""
    generator = torch.Generator().manual_seed(classes)
    for size in batches:
        scores = torch.randn(size, classes, generator=generator).mul(3).round().softmax(dim=1)
        truth = torch.randint(1, classes, (size,), generator=generator)
        truth[truth == 1] = 0
        for metric in metrics.values():
            metric.update(scores, truth)
    return {name: metric.compute() for name, metric in metrics.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("classes", [3, 4, 10])
def test_a_classifications_metrics_are_those_of_torchmetrics(classes: int) -> None:
    batches = [40, 1, 17]
    ours = updated(dict(classification_metrics(classes)), classes, batches)
    theirs = updated(
        {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "precision": MulticlassPrecision(classes, average=None),
            "recall": MulticlassRecall(classes, average=None),
            "f1": MulticlassF1Score(classes, average=None),
            "support": MulticlassStatScores(classes, average=None),
            "confusion_matrix": MulticlassConfusionMatrix(classes),
            "precision_recall_curve": MulticlassPrecisionRecallCurve(classes, thresholds=None),
        },
        classes,
        batches,
    )
    assert list(ours) == list(theirs)
    theirs["support"] = theirs["support"][:, 4]
    names = ("precision", "recall", "thresholds")
    curves = dict(zip(names, theirs.pop("precision_recall_curve"), strict=True))
    mine = ours.pop("precision_recall_curve")
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert ours[name].dtype == value.dtype, name
    for name in names:
        for number in range(classes):
            torch.testing.assert_close(
                mine[name][number], curves[name][number], rtol=0, atol=0, equal_nan=True, msg=f"{name} of {number}"
            )


def test_a_curve_by_hand() -> None:
    curve = PrecisionRecallCurve(2)
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8])
    curve.update(torch.stack([1 - scores, scores], dim=1), torch.tensor([0, 0, 1, 1]))
    found = curve.compute()
    assert found["thresholds"][1].tolist() == pytest.approx([0.1, 0.4, 0.8])
    assert found["precision"][1].tolist() == pytest.approx([2 / 4, 2 / 3, 1, 1])
    assert found["recall"][1].tolist() == pytest.approx([1, 1, 1 / 2, 0])


def test_a_class_without_a_sample_has_no_recall() -> None:
    curve = PrecisionRecallCurve(3)
    curve.update(torch.eye(3)[:2], torch.tensor([0, 1]))
    assert all(math.isnan(value) for value in curve.compute()["recall"][2].tolist()[:-1])


def test_squared_errors_are_summed_in_float64() -> None:
    metrics: list[Metric | MeanSquaredError] = [SquaredError(), MeanSquaredError().set_dtype(torch.float64)]
    generator = torch.Generator().manual_seed(0)
    for size in (5, 3):
        given = torch.randn(2, size, 1, generator=generator, dtype=torch.float64)
        for metric in metrics:
            metric.update(given[0], given[1])
    ours, theirs = (metric.compute() for metric in metrics)
    assert ours.dtype == torch.float64
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-15)
