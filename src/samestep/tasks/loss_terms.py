"""What a model's own loss may be a mean over, and how many such terms a collated batch has.

Models of transformers return the mean of their loss, and each kind means another thing by it: over samples, over
labels that are not masked, over those that have a token before them, over what a mask marks, over the objects in a
list of mappings. Each is a candidate (`candidates`), which `model_loss` holds against the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.errors import UserError

IGNORED = -100  # the label that transformers' losses leave out

POSITIONS = ("start_positions", "end_positions")  # of an answer in a text
_TEXTS = ("input_ids", "inputs_embeds")

Inputs = Mapping[str, Any]
Kind = Literal["labels", "shifted", "marked", "positions", "pieces", "samples"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of a data set, as the user's collator puts them together."""

    inputs: Inputs
    rows: int
    what: str  # which rows they are, for messages


@dataclass(frozen=True)
class Terms:
    """What a loss is a mean over."""

    kind: Kind
    label: str = "labels"  # the input that is counted
    ignored: int = IGNORED
    mask: str | None = None  # a mask of the labels' shape, without which a label doesn't count
    key: str | int | None = None  # of pieces: the tensor in each mapping whose rows are counted
    per_row: int = 0  # of pieces: terms of each sample besides, such as queries without an object
    per_piece: int = 1

    def count(self, inputs: Inputs, rows: int) -> int:
        """How many terms the loss of a batch of so many rows has."""
        if self.kind == "samples":
            return rows
        labels = inputs[self.label]
        if self.kind == "pieces":
            pieces = sum(len(sample if self.key is None else sample[self.key]) for sample in labels)
            return self.per_row * rows + self.per_piece * pieces
        if self.kind == "marked":
            return int((labels != 0).sum())
        if self.kind == "positions":
            return int(_answered(inputs, self.label).sum())
        counted = labels != self.ignored
        if self.mask is not None:
            counted &= inputs[self.mask] != 0
        return int((counted[..., 1:] if self.kind == "shifted" else counted).sum())

    def of(self, part: Part) -> int:
        """How many terms the loss of a part has."""
        return self.count(part.inputs, part.rows)

    @property
    def of_labels(self) -> bool:
        """Whether a label that is left out is no term."""
        return self.kind in ("labels", "shifted")


def candidates(model: nn.Module, inputs: Inputs, labels: Sequence[str]) -> list[Terms]:
    """What the loss may be a mean over, the more usual first. `labels`: the names of the inputs that are labels."""
    return list(dict.fromkeys(_candidates(model, inputs, labels)))


def _candidates(model: nn.Module, inputs: Inputs, labels: Sequence[str]) -> Iterator[Terms]:
    for name in labels:
        value = inputs[name]
        if not isinstance(value, Tensor):
            yield from _pieces(name, value)
        elif name in POSITIONS:
            if any(key in inputs for key in _TEXTS):
                yield Terms("positions", name)
        elif value.ndim and not value.is_floating_point():
            yield from _of_labels(model, inputs, name)
    yield Terms("samples")
    for name, value in inputs.items():
        if isinstance(value, Tensor) and "mask" in name and value.ndim > 1 and is_mask(value):
            yield Terms("marked", name)
    for name in labels:
        value = inputs[name]
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            yield Terms("labels", name)  # numbers of which some are left out


def _of_labels(model: nn.Module, inputs: Inputs, name: str) -> Iterator[Terms]:
    """Labels, those behind another token, and those that a mask of their shape keeps."""
    labels = inputs[name]
    masks = [
        key
        for key, value in inputs.items()
        if key != name and isinstance(value, Tensor) and value.shape == labels.shape
        if "mask" in key and is_mask(value)
    ]
    for mask in (None, *masks):
        for number in _ignored_by(model):
            yield Terms("labels", name, number, mask)
            if labels.ndim == 2:
                yield Terms("shifted", name, number, mask)


def _pieces(name: str, labels: Any) -> Iterator[Terms]:
    """The rows of the tensors in a list with an entry for each sample, such as the boxes of images."""
    if not isinstance(labels, (list, tuple)) or not labels:
        return
    if all(isinstance(label, Tensor) and label.ndim for label in labels):
        yield Terms("pieces", name)
    elif all(isinstance(label, Mapping) for label in labels):
        for key, value in labels[0].items():
            if all(isinstance(label.get(key), Tensor) and label[key].ndim for label in labels) and value.ndim:
                yield Terms("pieces", name, key=key)


def is_mask(value: Tensor) -> bool:
    """Whether a tensor holds nothing but 0 and 1."""
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())


def _ignored_by(model: nn.Module) -> list[int]:
    """Labels that losses leave out: the usual one, and those of a model's configuration."""
    config = getattr(model, "config", None)
    others = (getattr(config, key, None) for key in ("semantic_loss_ignore_index", "pad_token_id"))
    return list(dict.fromkeys((IGNORED, *(value for value in others if isinstance(value, int)))))


def _answered(inputs: Inputs, label: str) -> Tensor:
    """Which samples have their answer within the text. [samples]"""
    length = next(value.shape[1] for key, value in inputs.items() if key in _TEXTS)
    return inputs[label].flatten() < length


def check_answers(inputs: Inputs) -> None:
    """Raise UserError where only one end of an answer is in the text: the two ends' means have other counts then."""
    first, second = (_answered(inputs, name) for name in POSITIONS)
    if not torch.equal(first, second):
        raise UserError(
            "an answer has one of start_positions and end_positions within its text and the other behind it; use "
            "positions that are both within the text, or both behind it"
        )


def proportional(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two counts of the same batches are proportional, so that a step is the same with either."""
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if one or other]
    return all(one * pairs[0][1] == other * pairs[0][0] for one, other in pairs)
