"""Small tasks for tests: a net with matrices, biases and norms on points of a few classes; and tasks that fail."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep

if TYPE_CHECKING:
    from torchmetrics import Metric


class Points(samestep.Task):
    """Random points in `classes` overlapping classes."""

    def __init__(self, *, samples: int = 200, held_out: int = 50, classes: int = 3, dropout: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(7)
        labels = torch.randint(classes, (samples + held_out,), generator=generator)
        points = torch.randn(samples + held_out, 4, generator=generator)
        points[:, 0] += labels
        pairs = list(zip(points, labels, strict=True))
        self.pairs, self.held_out = pairs[:samples], pairs[samples:]
        self.classes, self.dropout = classes, dropout

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(self.dropout), nn.Linear(16, self.classes)
        )

    def train_set(self) -> samestep.Samples:
        return self.pairs

    def eval_set(self) -> samestep.Samples | None:
        return self.held_out

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> Mapping[str, "Metric"]:
        # Its import takes longer than most of these trainings, and not all have metrics.
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        return {
            "accuracy": MulticlassAccuracy(self.classes, average="micro"),
            "confusion_matrix": MulticlassConfusionMatrix(self.classes),
        }

    def class_names(self) -> list[str]:
        return [f"class {number}" for number in range(self.classes)]


class Counting(nn.Module):
    """Divides by a number that grows with every training forward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return points / (1 + 0.1 * self.calls)


class Counted(Points):
    """Points whose model counts its forwards: with several micro-batches its step is another one."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Counting(), nn.Linear(8, self.classes))


class Words(Points):
    """A loss over words, not samples: sample i counts for 1 + i % 3 words, as unmasked tokens do."""

    def train_set(self) -> samestep.Samples:
        return [(point, torch.stack([label, torch.tensor(1 + i % 3)])) for i, (point, label) in enumerate(self.pairs)]

    def eval_set(self) -> None:
        return None

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        labels, words = batch.targets.unbind(dim=1)
        return (nn.functional.cross_entropy(output, labels, reduction="none") * words).sum(), words.sum()

    def metrics(self) -> Mapping[str, "Metric"]:
        return {}


class Lines(Points):
    """Lines of 1 to 30 tokens, padded to the longest of a micro-batch, whose classes a masked mean tells apart."""

    def __init__(self) -> None:
        super().__init__()
        sizes = torch.randint(1, 31, (len(self.pairs),), generator=torch.Generator().manual_seed(8)).tolist()
        self.lines = [torch.arange(size) * (3 + index) % 20 + 1 for index, size in enumerate(sizes)]

    def model(self) -> nn.Module:
        return _MaskedMean(self.classes)

    def train_set(self) -> samestep.Samples:
        return [(line, label) for line, (_, label) in zip(self.lines, self.pairs, strict=True)]

    def sample_lengths(self) -> list[int]:
        return [len(line) for line in self.lines]

    def eval_set(self) -> None:
        return None

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> samestep.Batch:
        lines = nn.utils.rnn.pad_sequence([line for line, _ in samples], batch_first=True)
        return samestep.Batch(lines, torch.stack([label for _, label in samples]))

    def metrics(self) -> Mapping[str, "Metric"]:
        return {}


class _MaskedMean(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(21, 16), nn.Linear(16, classes)
        self.dropout = nn.Dropout(0.3)

    def forward(self, lines: Tensor) -> Tensor:
        seen = (lines > 0).unsqueeze(-1)  # [batch, tokens, 1]
        return self.last((self.dropout(self.table(lines)) * seen).sum(1) / seen.sum(1))


class ScoredWords(Words):
    """The same, with the points that are held out scored."""

    def eval_set(self) -> samestep.Samples | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.held_out

    def metrics(self) -> Mapping[str, "Metric"]:
        return Points.metrics(self)


class Unscored(Points):
    """Nothing is held out: for jobs in processes of their own, each of which would import what scores it."""

    def eval_set(self) -> None:
        return None

    def metrics(self) -> Mapping[str, "Metric"]:
        return {}


class Failing(Unscored):
    """Fails in its third loss on rank 1 of several, in the way it is told."""

    def __init__(self, *, way: str, marker: str = "") -> None:
        super().__init__()
        self.way, self.marker = way, marker
        self.calls = 0

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            _FAILURES[self.way]()
        if self.calls == 3 and self.marker:
            Path(self.marker).write_text("training", encoding="utf-8")
        return super().loss(output, batch)


def _raise() -> None:
    raise ArithmeticError("planted in rank 1")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _user_error() -> None:
    raise samestep.UserError("the user's fault, seen late")


def _slow() -> None:
    time.sleep(60)


_FAILURES: dict[str, Any] = {"raise": _raise, "kill": _kill, "user error": _user_error, "slow": _slow}


class Slow(Unscored):
    """Takes its time in every loss."""

    def __init__(self, *, seconds: float, **points: Any) -> None:
        super().__init__(**points)
        self.seconds = seconds

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        time.sleep(self.seconds)
        return super().loss(output, batch)


class MeanLoss(Points):
    """A loss as most loops have it: a mean, alone."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> Any:
        return nn.functional.cross_entropy(output, batch.targets)


class NoWords(Words):
    """Every word is masked."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        loss_sum, count = super().loss(output, batch)
        return loss_sum * 0, count * 0
