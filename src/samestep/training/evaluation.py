"""Evaluation: every held-out sample once over all ranks, and metrics that are exactly those of one process.

Chunks have `evaluation.batch` samples for any number of ranks, so each chunk's outputs are the same for every layout.
Chunk k goes to data rank k modulo their number; in the last round, ranks without a chunk compute a zero-weight one,
whose outputs are dropped, so that all ranks run the same number of forwards. Ranks exchange predictions, and every
rank updates its metrics with those of all chunks in the order of the data set.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.loader import SampleChunk
from samestep.data.types import Batch
from samestep.engines.base import Trainer
from samestep.errors import UserError, index_errors_explained
from samestep.torch_internals.modules import AnyDropout

if TYPE_CHECKING:
    from samestep.tasks.metrics import Metric


def named_parts(metric: Any, value: Any) -> Any:
    """Convert a curve's tuple to a dict such as {"precision", "recall", "thresholds"}; keep other values."""
    if "torchmetrics" not in sys.modules:  # then the metric isn't torchmetrics', whose import takes seconds
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


def switch_off(model: nn.Module) -> None:
    """Set all dropout probabilities of a model to zero: those of dropout modules, and those stored as plain numbers.

    Attention modules store the probability as an attribute or in the model's configuration, under names such as
    `dropout`, `attention_dropout` and `hidden_dropout_prob`. A task may build its next model from the same
    configuration, so the modules get a copy of it.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, AnyDropout):
            module.p = 0.0
        _zero_floats(module)
        config = getattr(module, "config", None)
        if config is None or isinstance(config, nn.Module):
            continue
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            _zero_floats(copies[id(config)])
        vars(module)["config"] = copies[id(config)]


def _zero_floats(holder: Any) -> None:
    """Set the floats whose names contain "drop" to 0 in an object or a dict; also if the class forbids setattr."""
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    for name, value in values.items():
        if "drop" in str(name) and isinstance(value, float):
            values[name] = 0.0


Scores = Callable[[Any, Batch], tuple[Tensor, Tensor]]


def evaluate(
    trainer: Trainer,
    chunks: Iterable[SampleChunk],
    *,
    metrics: "Mapping[str, Metric]",
    scores: Scores,
    group: dist.ProcessGroup,
    class_names: Sequence[str] | None = None,
    advance: Callable[[], None] | None = None,
    at_once: int = 1,
) -> dict[str, Any]:
    """Update metrics with every rank's chunks in the order of the data set, and return their values.

    Ranks exchange predictions rather than sums of metrics, so every metric gets the same calls in the same order as
    in one process. The values are plain numbers, lists and dicts, the same on every rank. Ranks for which `predict`
    returns no output use the others' scores. The exchange is after every `at_once` chunks, so that pipeline stages
    need not wait for each other after each chunk.
    """
    check_metrics(metrics)
    if not metrics:
        return {}
    for metric in metrics.values():
        apart(metric)
    for some in _batched(chunks, at_once):
        own_scores = []
        for chunk in some:
            with index_errors_explained("evaluation"):
                output = trainer.predict(chunk.batch.inputs)
                own_scores.append(
                    None if chunk.zero_weight or output is None else on_cpu(scores(output, chunk.batch))
                )
            if advance is not None:
                advance()
        for predictions, targets in _gather(own_scores, group):
            for metric in metrics.values():
                metric.update(predictions, targets)
    return {name: plain(named_parts(metric, metric.compute()), class_names) for name, metric in metrics.items()}


def check_metrics(metrics: Any) -> None:
    """Raise UserError unless `metrics` maps names to objects with torchmetrics' `update` and `compute`."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"metrics are a {type(metrics).__name__}; use a dict of torchmetrics objects by name")
    for name, metric in metrics.items():
        if not all(callable(getattr(metric, method, None)) for method in ("update", "compute")):
            raise UserError(f'metric "{name}" is a {type(metric).__name__}; use a torchmetrics object')


def apart(metric: Any) -> None:
    """Disable torchmetrics' own synchronization over ranks: every rank has the scores of all samples."""
    metric.distributed_available_fn = _alone


def _alone() -> bool:
    return False


def _batched(chunks: Iterable[SampleChunk], count: int) -> Iterator[list[SampleChunk]]:
    """Yield groups of `count` chunks; a chunk is loaded when its group is built."""
    iterator = iter(chunks)
    while some := list(islice(iterator, count)):
        yield some


def on_cpu(scores: Any) -> tuple[Tensor, Tensor]:
    """Detach scores and move them to the CPU. Raises UserError if they are not a pair of tensors."""
    if not (isinstance(scores, (tuple, list)) and len(scores) == 2 and all(isinstance(x, Tensor) for x in scores)):
        types = ", ".join(type(score).__name__ for score in scores) if isinstance(scores, (tuple, list)) else ""
        what = f"({types})" if types else f"a {type(scores).__name__}"
        raise UserError(f"scores gave {what}; it must give a pair of tensors: predictions and targets")
    predictions, targets = scores
    return predictions.detach().cpu(), targets.detach().cpu()


def _gather(own_scores: list[tuple[Tensor, Tensor] | None], group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """All-gather the scores of some chunks: those of every rank's first chunk, in rank order, then of the second."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own_scores, group=group)
    return [pair for same in zip(*gathered, strict=True) for pair in same if pair is not None]


def plain(value: Any, class_names: Sequence[str] | None = None) -> Any:
    """Convert tensors to numbers and lists; a list with one value per class becomes a dict by class name."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner, class_names) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(inner) for inner in value]
    elif isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value.item()
        items = value.tolist()
    else:
        return value
    if class_names is not None and len(items) == len(class_names):
        return dict(zip(class_names, items, strict=True))
    return items


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are single numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
