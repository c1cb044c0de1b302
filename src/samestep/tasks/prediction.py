"""Prediction: what a model makes of a user's samples, or of held-out ones; a mapping of plain values each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.input_files import text_of

if TYPE_CHECKING:
    from torch import Tensor

# Calls the model in evaluation mode: a batch's inputs -> its output, both as in training.
Model = Callable[[Any], Any]
Prediction = Mapping[str, Any]  # what JSON can hold


@dataclass(frozen=True, kw_only=True)
class ToPredict:
    """What to predict."""

    file: Path | None  # a file or folder, as the task's `predicts_from` says; None: the held-out samples
    batch: int  # samples of one forward
    new_tokens: int = 0  # maximum number of tokens for tasks that write text


def of_classes(probabilities: "Tensor", targets: "Tensor", names: Sequence[str]) -> list[Prediction]:
    """The likeliest class of each sample, its probability, and the true class where it is known (not below 0)."""
    best = probabilities.max(dim=1)  # of [samples, classes]
    return [
        {"class": names[number], "probability": probability} | ({"target": names[target]} if target >= 0 else {})
        for number, probability, target in zip(
            best.indices.tolist(), best.values.tolist(), targets.tolist(), strict=True
        )
    ]


def lines_of(file: Path) -> list[str]:
    """The lines of a text file. Raises UserError where it can't be read, or has none."""
    try:
        lines = text_of(file, expected="a text file").splitlines()
    except UserError as error:
        raise UserError(f"--input: {error}") from None
    if not lines:
        raise UserError(f"--input {file} is empty; use a text in each line")
    return lines
