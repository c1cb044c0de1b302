"""A model, its data and its loss as a task that job.yaml names."""

import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import samestep

CLASSES = 3
HELD_OUT = 10  # every tenth row


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Loads pairs of (point, class) from a CSV file with the columns x, y and label.

    Anything with a length and an index does: a list, a data set of torch, torchvision or Hugging Face.
    """

    def __init__(self, file: Path, *, held_out: bool) -> None:
        if not file.is_file():
            raise samestep.UserError(
                f"args: file is {file}, which is not there; python make_data.py makes sample data"
            )
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [row for index, row in enumerate(csv.DictReader(stream)) if (index % HELD_OUT == 0) is held_out]
        self._points = torch.tensor([[float(row["x"]), float(row["y"])] for row in rows])  # (rows, 2)
        self._labels = torch.tensor([int(row["label"]) for row in rows])  # (rows,)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._points[index], self._labels[index]


class Accuracy:
    """The share of right answers. Any object with `update` and `compute` does, such as torchmetrics' metrics."""

    def __init__(self) -> None:
        self._right = self._seen = 0

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self._right += int((scores.argmax(dim=-1) == labels).sum())
        self._seen += len(labels)

    def compute(self) -> float:
        return self._right / self._seen


class Points(samestep.Task):
    """Which class is a point of? The arguments come from `args:` in job.yaml; `file` lies next to this file."""

    def __init__(self, *, file: str, hidden: int = 32) -> None:
        self._file = Path(__file__).parent / file
        self._hidden = hidden

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, self._hidden),
            nn.Tanh(),
            nn.Linear(self._hidden, self._hidden),
            nn.Tanh(),
            nn.Linear(self._hidden, CLASSES),
        )

    def train_set(self) -> samestep.Samples:
        return Rows(self._file, held_out=False)

    def eval_set(self) -> samestep.Samples:
        return Rows(self._file, held_out=True)

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        """The sum over the samples and their number, never a mean: samestep divides by the whole batch."""
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(output)

    def metrics(self) -> dict[str, Accuracy]:
        return {"accuracy": Accuracy()}
