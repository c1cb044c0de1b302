"""Entry: one model of the table, its made data, and what no layout of it could be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import samestep
from samestep.tasks import HuggingFace
from samestep.tasks.losses import takes_gather
from samestep.tasks.metrics import ColumnMean, Metric

Half = Literal["chosen", "drawn", "library"]
Row = Mapping[str, Any]
Loss = Callable[..., tuple[Tensor, int]]  # (output, targets), and gather where it asks for it -> sum and count

SAMPLES, HELD_OUT = 18, 5


def without_tokens(what: str) -> dict[str, str]:
    """The layouts that split tokens, as impossible for a model of which `what` says what its layers take instead."""
    return dict.fromkeys(("cp", "tokens"), f"{what}; there is no sequence of tokens")


OF_IMAGES = without_tokens("its layers are convolutions over the image")
OF_VECTORS = without_tokens("its layers take a vector a sample")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model, built tiny from a configuration or by code of the table, and rows of data made by formula."""

    name: str
    kind: str  # decoder, encoder, encoder-decoder, vision, speech, or what one's own model is
    model: Callable[[], nn.Module]
    row: Callable[[int], Row]  # sample number -> its tensors; of one's own models with a key "target"
    collate: Callable[[list[Row]], Mapping[str, Any]]
    loss: Loss | None = None  # None: the model's own, through HuggingFace
    stages: int = 4  # how many parts stand one behind the other, which is the most stages it can have
    impossible: Mapping[str, str] = field(default_factory=dict)  # axis (tp, pp, cp, tokens) -> why none can exist
    held_out: bool = True  # False: the model draws in evaluation mode too, so that nothing is evaluated
    half: Half = "chosen"  # the part of the table
    weight: float = 1.0  # how many types it stands for, where it was drawn


class NotMadeError(ValueError):
    """A model that can't be built tiny, or for which no rows could be made."""


class OwnTask(samestep.Task):
    """Trains an entry that brings a loss of its own."""

    def __init__(self, entry: Entry) -> None:
        assert entry.loss is not None
        self._entry = entry
        self._loss: Loss = entry.loss

    def model(self) -> nn.Module:
        return self._entry.model()

    def train_set(self) -> samestep.Samples:
        return [self._entry.row(index) for index in range(SAMPLES)]

    def eval_set(self) -> samestep.Samples | None:
        if not self._entry.held_out:
            return None
        return [self._entry.row(index) for index in range(SAMPLES, SAMPLES + HELD_OUT)]

    def collate(self, samples: Sequence[Row]) -> samestep.Batch:
        collated = dict(self._entry.collate(list(samples)))
        targets = collated.pop("target")
        return samestep.Batch(collated, targets)

    def loss(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, int]:
        return self._loss(output, batch.targets)

    def metrics(self) -> Mapping[str, Metric]:
        """The mean loss of a term."""
        return {"loss": ColumnMean(0)}

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        total, count = self.loss(output, batch)
        return total.detach().double().reshape(1, 1), torch.tensor([[count]])


class OwnTaskOfPairs(OwnTask):
    """Trains an entry whose loss holds the two sides of a sample against those of the whole batch."""

    def loss(self, output: Any, batch: samestep.Batch, gather: samestep.Gather) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._loss(output, batch.targets, gather)

    def scores(self, output: Any, batch: samestep.Batch) -> tuple[Tensor, Tensor]:
        """The likeness of the two sides, which is a sample's own."""
        left, right = output[:2]
        return (left * right).sum().detach().double().reshape(1, 1), torch.tensor([[len(left)]])


def task_of(entry: Entry) -> samestep.Task:
    """The entry as what samestep trains."""
    if entry.loss is not None:
        return OwnTaskOfPairs(entry) if takes_gather(entry.loss) else OwnTask(entry)
    rows = [entry.row(index) for index in range(SAMPLES + HELD_OUT)]
    return HuggingFace(model=entry.model, data=rows[:SAMPLES], eval_data=rows[SAMPLES:], collator=entry.collate)


def numbers(index: int, *shape: int) -> Tensor:
    """Normally distributed numbers of a sample. float32"""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index + 1))


def words(index: int, length: int, vocabulary: int, first: int = 1) -> Tensor:
    """Token ids from `first` to `vocabulary - 1`. [length]"""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(first, vocabulary, (length,), generator=generator)


def stacked(rows: list[Row]) -> Mapping[str, Any]:
    """Rows of one shape, stacked."""
    return {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
