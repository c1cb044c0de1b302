"""Curves among the metrics: their parts by name, where torchmetrics gives a tuple without names."""

import sys
from typing import Any


def named_parts(metric: Any, value: Any) -> Any:
    """A curve's value as {"precision", "recall", "thresholds"}, or the like; any other value as it is."""
    if "torchmetrics" not in sys.modules:  # then it is none of torchmetrics', whose import takes seconds
        return value
    from torchmetrics.classification import (
        BinaryPrecisionRecallCurve,
        BinaryROC,
        MulticlassPrecisionRecallCurve,
        MulticlassROC,
        MultilabelPrecisionRecallCurve,
        MultilabelROC,
    )

    # Areas under a curve are subclasses of the curve, but their values are numbers.
    if not (isinstance(value, tuple) and len(value) == 3):
        return value
    if isinstance(metric, (BinaryROC, MulticlassROC, MultilabelROC)):
        names = ("false_positive_rate", "true_positive_rate", "thresholds")
    elif isinstance(
        metric, (BinaryPrecisionRecallCurve, MulticlassPrecisionRecallCurve, MultilabelPrecisionRecallCurve)
    ):
        names = ("precision", "recall", "thresholds")
    else:
        return value
    return dict(zip(names, value, strict=True))
