"""What a model with its own loss takes and gives: found by trying it on a few collated rows, in one process."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import to_device
from samestep.errors import UserError
from samestep.parallel.exact.float64 import in_float64
from samestep.tasks.contrastive import RETURN_LOSS, Contrast, find_contrast
from samestep.tasks.first_rows import Chosen
from samestep.tasks.loss_terms import IGNORED, Part, Terms, check_answers
from samestep.tasks.memory_budget import built_within
from samestep.tasks.model_loss import (
    COUNT,
    FoundTerms,
    NoFitError,
    NotFiniteError,
    Parts,
    copied,
    find_terms,
    slack_of,
)
from samestep.tasks.weighted_terms import WeightedTerm

_LARGE = 200_000_000  # parameters


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model, found by trying it on a few rows."""

    accepted: frozenset[str] | None  # names that its forward takes; None: any
    labels: Sequence[str]  # names of the inputs that are labels
    terms: Terms | None  # what the loss is a mean over; None: counted by the user's function
    doubtful: Sequence[tuple[Terms, int, int]] = ()  # what it may be instead, so many to so many of `terms`
    slack: float = 0.0  # what the model adds to the number of terms that it divides by
    classes: int | None = None  # number of classes, if the first labels are classes with logits
    names: Sequence[str] = ()  # of the classes
    contrast: Contrast | None = None  # the contrastive loss, if the model has one
    weighted: Mapping[str, WeightedTerm] = field(default_factory=dict)  # the terms of a loss that is a sum of such
    held_out: bool = False  # whether the model was called on held-out rows

    def takes(self, key: str) -> bool:
        """Whether the model's forward takes an input of this name."""
        if self.contrast is not None and key == RETURN_LOSS:
            return False  # the model's own loss would cover the samples of one call only
        return self.accepted is None or key in self.accepted

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise UserError for labels with which the model can't compute its loss."""
        for name in self.labels:
            if name not in inputs:
                raise UserError(
                    f"the collator gave no {name}, and for the first rows it did; use rows of the same keys"
                )
        if self.terms is not None and self.terms.kind == "positions":
            check_answers(inputs)
        labels = inputs[self.labels[0]] if self.classes else torch.empty(0)
        for label in (labels.max(), labels.min()) if labels.numel() else ():
            self.check_label(int(label), self.labels[0])

    def count(self, inputs: Mapping[str, Any], rows: int) -> int:
        """How many terms the loss of a batch of so many rows has. Raises UserError where it can't be told."""
        if self.contrast is not None:
            return rows
        assert self.terms is not None
        count = self.terms.count(inputs, rows)
        if self.terms.kind == "pieces" and not count:
            # Models divide by 1 then, so the sum that the mean was made of can't be told from the mean.
            raise UserError(
                f"a batch of {rows} rows has nothing in {self.terms.label}, by whose number the model divides its "
                "loss; use rows that have something there, or loss=, a function of the model's output and the batch"
            )
        for other, of_other, of_this in self.doubtful:
            if other.count(inputs, rows) * of_this != count * of_other:
                raise UserError(
                    f"the loss may be a mean over {_named(self.terms)} or over {_named(other)}, of which all rows "
                    f"that were looked at before the training had as many, and {rows} rows of it have {count} and "
                    f"{other.count(inputs, rows)}; use {COUNT}"
                )
        return count

    def counts(self, inputs: Mapping[str, Any], rows: int) -> Mapping[str, int]:
        """How many things each term of a weighted sum is a mean over, for a batch of so many rows."""
        return {name: term.terms.count(inputs, rows) for name, term in self.weighted.items()}

    def check_label(self, label: int, where: str) -> None:
        """Raise UserError for a class that the model doesn't have."""
        ignored = self.ignored
        if not self.classes or label == ignored or 0 <= label < self.classes:
            return
        fix = f"a model with num_labels={label + 1}" if label > 0 else f"{ignored} for what doesn't count"
        raise UserError(
            f"{where} {label} is out of range: the model has classes 0 to {self.classes - 1}; use labels among "
            f"these, or {fix}"
        )

    @property
    def ignored(self) -> int:
        """The label that marks what doesn't count."""
        return IGNORED if self.terms is None else self.terms.ignored


def model_facts(
    built: nn.Module, chosen: Chosen, *, is_new: bool, count: Callable[[Any], Any] | None, own_loss: bool
) -> ModelFacts:
    """Try a model on a few rows. Raises UserError where it can't be trained on them.

    `is_new`: nobody else has the model, so that it may be changed meanwhile. With a loss of the user's own nothing is
    tried: what the model takes is read from its forward.
    """
    accepted = _accepted(built)
    parts = _of_model(chosen.parts, accepted)
    labels = _labels(built, parts.whole.inputs)
    name = type(built).__name__
    if not any(_has_tensors(value) for value in parts.whole.inputs.values()):
        raise UserError(f"the collator gave nothing that {name} takes; use names that its forward has")
    if own_loss:
        return ModelFacts(accepted=accepted, labels=labels, terms=None)
    found_terms, contrast = _tried(built, parts, labels, count, is_new=is_new)
    slack = 0.0
    if found_terms.terms is not None and found_terms.terms.kind == "marked" and not _is_large(built):
        with in_float64(), suppress(UserError):  # it may have no float64
            slack = slack_of(copied(built).double(), _in(parts, torch.float64), found_terms.terms)
    classes = None if contrast is not None else _classes(parts.first, labels, found_terms)
    id2label = getattr(getattr(built, "config", None), "id2label", None) or {}
    return ModelFacts(
        accepted=accepted,
        labels=labels,
        terms=found_terms.terms,
        doubtful=found_terms.doubtful,
        slack=slack,
        classes=classes,
        names=[str(id2label.get(number, number)) for number in range(classes or 0)],
        contrast=contrast,
        weighted=found_terms.weighted,
        held_out=chosen.held_out and contrast is None,
    )


def _labels(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The names of the inputs that are labels: tensors, or lists with an entry for each sample."""
    from transformers.utils.generic import find_labels

    label_names = find_labels(type(model)) or ["labels"]
    return [
        name
        for name in label_names
        if isinstance(inputs.get(name), (list, tuple)) or (isinstance(inputs.get(name), Tensor) and inputs[name].ndim)
    ]


def _of_model(parts: Parts, accepted: frozenset[str] | None) -> Parts:
    """The rows without what the model doesn't take."""

    def kept(part: Part) -> Part:
        return replace(
            part, inputs={key: value for key, value in part.inputs.items() if accepted is None or key in accepted}
        )

    return Parts(
        whole=kept(parts.whole), first=kept(parts.first), rest=kept(parts.rest), alone=[*map(kept, parts.alone)]
    )


def _has_tensors(value: Any) -> bool:
    """Whether a value, or what is in it, is a tensor with elements by sample, or an object that may have some."""
    return bool(value.ndim) if isinstance(value, Tensor) else not isinstance(value, (bool, int, float, str))


def _tried(
    built: nn.Module, parts: Parts, labels: Sequence[str], count: Any, *, is_new: bool
) -> tuple[FoundTerms, Contrast | None]:
    """Over what a model's own loss is a mean, or that it is contrastive: in float32, and where that doesn't tell in
    float64, which shows terms that are small."""
    model, parts = _on_cpu(built, is_new=is_new), _in(parts, torch.float32)
    nothing = FoundTerms(terms=None)
    try:
        return find_terms(model, parts, labels, count), None
    except UserError as error:
        if count is None and (contrast := _contrast(model, parts.whole.inputs)) is not None:
            return nothing, contrast
        if not isinstance(error, NoFitError) or _is_large(built):
            raise
        refusal = error
    model, parts = copied(model).double(), _in(parts, torch.float64)
    try:
        with in_float64():
            return find_terms(model, parts, labels, count), None
    except NotFiniteError:  # in float64 alone, such as by masks of the lowest number that are added twice
        raise refusal from None
    except NoFitError:
        if count is None and (contrast := _contrast(model, parts.whole.inputs)) is not None:
            return nothing, contrast
        raise
    except UserError:  # it has no float64
        raise refusal from None


def _is_large(model: nn.Module) -> bool:
    """Whether a copy in float64 would take much memory."""
    return sum(parameter.numel() for parameter in model.parameters()) > _LARGE


def _in(parts: Parts, dtype: torch.dtype) -> Parts:
    """The rows that the model is called on, with real numbers of one kind."""

    def cast(part: Part) -> Part:
        return replace(part, inputs=to_device(part.inputs, torch.device("cpu"), dtype))

    return replace(parts, whole=cast(parts.whole), first=cast(parts.first), rest=cast(parts.rest))


def _contrast(model: nn.Module, inputs: Mapping[str, Any]) -> Contrast | None:
    """The contrastive loss of a model, also of one that computes it only when asked to."""
    accepted = _accepted(model) or ()
    switch = {RETURN_LOSS: True} if RETURN_LOSS in accepted else {}
    try:
        return find_contrast(model, {**inputs, **switch})
    except Exception:  # it can't take these rows, or be copied, which has been said already
        return None


def built_of(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model, given or built; of one that is too large for this process one with fewer layers.

    Raises UserError for one on the meta device or without parameters.
    """
    built = model if isinstance(model, nn.Module) else built_within(model)
    if not isinstance(built, nn.Module):
        raise UserError(f"model= gave a {type(built).__name__}; use a function that returns an nn.Module")
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        if tensor.is_meta:
            raise UserError(f"model=: {name} is on the meta device, and has no values; use a model built on the CPU")
    if not any(parameter.is_floating_point() for parameter in built.parameters()):
        raise UserError(f"model=: {type(built).__name__} has no parameters; use a model with some")
    return built


def _on_cpu(model: nn.Module, *, is_new: bool) -> nn.Module:
    """Return the model on the CPU in float32: itself where nobody else has it, or a copy would be large."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == "cpu" and (t.dtype == torch.float32 or not t.is_floating_point()) for t in tensors):
        is_large = sum(parameter.numel() for parameter in model.parameters()) > _LARGE
        return model if is_new or is_large else copied(model)
    return copied(model).to("cpu", torch.float32)


def _accepted(model: nn.Module) -> frozenset[str] | None:
    """Return the names that a forward accepts; None if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = frozenset(parameter.name for parameter in parameters if parameter.kind not in variable)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_any and "labels" not in named and len(named) < 2 else named


def _classes(part: Part, labels: Sequence[str], found_terms: FoundTerms) -> int | None:
    """Count the classes of the labels; None if labels are no classes, or have no logits."""
    target = part.inputs[labels[0]] if labels else None
    if not isinstance(target, Tensor) or target.is_floating_point() or found_terms.logits is None:
        return None
    if found_terms.terms is not None and found_terms.terms.kind == "samples" and target.ndim > 1:
        return None
    if list(found_terms.logits[:-1]) != list(target.shape) or found_terms.logits[-1] < 2:
        return None
    return found_terms.logits[-1]


def _named(terms: Terms) -> str:
    """What a loss is a mean over, in words."""
    names = {
        "labels": f"{terms.label} other than {terms.ignored}",
        "shifted": f"{terms.label} other than {terms.ignored} that have a token before them",
        "marked": f"what {terms.label} marks",
        "positions": f"answers of {terms.label} within the text",
        "pieces": f"the entries of {terms.label}",
        "samples": "samples",
    }
    return names[terms.kind] + (f" where {terms.mask} is 1" if terms.mask is not None else "")
