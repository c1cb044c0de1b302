"""Evaluation: every held-out sample once over all ranks, and metrics that are exactly those of one process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.data.loader import Chunk
from samestep.engines.base import Trainer
from samestep.tasks.base import Batch
from samestep.training.curves import named_parts

if TYPE_CHECKING:
    from torchmetrics import Metric

Scores = Callable[[Any, Batch], tuple[Tensor, Tensor]]


def evaluate(
    trainer: Trainer,
    chunks: Iterable[Chunk],
    *,
    metrics: "Mapping[str, Metric]",
    scores: Scores,
    group: dist.ProcessGroup,
    class_names: Sequence[str] | None = None,
    advance: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Update metrics with every rank's chunks in the order of the data set, and return their values.

    Ranks exchange predictions rather than sums of metrics, so every metric sees the calls, and their order,
    that it would see in one process. The values are plain numbers, lists and dicts, the same on every rank.
    """
    for metric in metrics.values():
        metric.distributed_available_fn = _alone  # the samples are gathered already
    for chunk in chunks:
        output = trainer.predict(chunk.batch.inputs)
        for predictions, targets in _gather(None if chunk.lent else scores(output, chunk.batch), group):
            for metric in metrics.values():
                metric.update(predictions, targets)
        if advance is not None:
            advance()
    return {name: plain(named_parts(metric, metric.compute()), class_names) for name, metric in metrics.items()}


def _alone() -> bool:
    return False


def _gather(mine: tuple[Tensor, Tensor] | None, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """One chunk's scores of every rank, in the order of the ranks, which is the order of the chunks."""
    scores = None if mine is None else tuple(part.detach().cpu() for part in mine)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, scores, group=group)
    return [pair for pair in gathered if pair is not None]


def plain(value: Any, class_names: Sequence[str] | None = None) -> Any:
    """Tensors as numbers and lists; one value a class as a dict by its name."""
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
    """The metrics that are one number each."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
