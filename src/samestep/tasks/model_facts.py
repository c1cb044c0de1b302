"""What a model with its own loss takes and gives: found by trying it on a few collated rows, in one process."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.tasks.contrastive import RETURN_LOSS, Contrast, find_contrast
from samestep.tasks.model_loss import IGNORED, Terms, at_rest, check_answers, copied, find_terms

_LARGE = 200_000_000  # parameters


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model, found by trying it on a few rows."""

    accepted: frozenset[str] | None  # names that its forward takes; None: any
    labels: Sequence[str]  # names of the inputs that are labels
    terms: Terms | None  # what the loss is a mean over; None: counted by the user's function
    classes: int | None  # number of classes, if the first labels are classes with logits
    names: Sequence[str]  # of the classes
    contrast: Contrast | None = None  # the contrastive loss, if the model has one

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

    def count(self, inputs: Mapping[str, Any]) -> int:
        """How many terms the loss of a batch has."""
        if self.contrast is not None:
            return next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim)
        assert self.terms is not None
        return self.terms.count(inputs)

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
    model: nn.Module | Callable[[], nn.Module], collated: Mapping[str, Any], count: Callable[[Any], Any] | None
) -> ModelFacts:
    """Try a model on a few collated rows. Raises UserError where it can't be trained on them."""
    from transformers.utils.generic import find_labels

    built = _built(model)
    accepted = _accepted(built)
    inputs = {key: value for key, value in collated.items() if accepted is None or key in accepted}
    known = find_labels(type(built)) or ["labels"]
    labels = [name for name in known if isinstance(inputs.get(name), Tensor) and inputs[name].ndim]
    name = type(built).__name__
    if not any(isinstance(value, Tensor) and value.ndim for value in inputs.values()):
        raise UserError(f"the collator gave no tensor that {name} takes, but {', '.join(collated) or 'nothing'}")
    try:
        # Float64 shows terms that are small; not every operator has it.
        terms, classes, contrast = _tried(_wide(built), inputs, labels, count)
    except UserError:
        terms, classes, contrast = _tried(_on_cpu(built), inputs, labels, count)
    id2label = getattr(getattr(built, "config", None), "id2label", None) or {}
    names = [str(id2label.get(number, number)) for number in range(classes or 0)]
    return ModelFacts(accepted=accepted, labels=labels, terms=terms, classes=classes, names=names, contrast=contrast)


def _tried(
    model: nn.Module, inputs: Mapping[str, Any], labels: Sequence[str], count: Any
) -> tuple[Terms | None, int | None, Contrast | None]:
    """Over what a model's own loss is a mean, how many classes it has, or that it is contrastive."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    inputs = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    try:
        terms = find_terms(model, inputs, labels, count)
    except UserError:
        if (contrast := _contrast(model, inputs)) is None or count is not None:
            raise
        return None, None, contrast
    return terms, _classes(model, inputs, labels[0], terms) if labels else None, None


def _contrast(model: nn.Module, inputs: Mapping[str, Any]) -> Contrast | None:
    """The contrastive loss of a model, also of one that computes it only when asked to."""
    accepted = _accepted(model) or ()
    asked = {RETURN_LOSS: True} if RETURN_LOSS in accepted else {}
    try:
        return find_contrast(model, {**inputs, **asked})
    except Exception:  # it can't take these rows, or be copied, which has been said already
        return None


def same_tensors(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two collated batches hold the same tensors."""
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key])
        for key, value in first.items()
        if isinstance(value, Tensor) and isinstance(second[key], Tensor)
    )


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model, given or built. Raises UserError for one on the meta device or without parameters."""
    built = model if isinstance(model, nn.Module) else model()
    if not isinstance(built, nn.Module):
        raise UserError(f"model= gave a {type(built).__name__}; use a function that returns an nn.Module")
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        if tensor.is_meta:
            raise UserError(f"model=: {name} is on the meta device, and has no values; use a model built on the CPU")
    if not any(parameter.is_floating_point() for parameter in built.parameters()):
        raise UserError(f"model=: {type(built).__name__} has no parameters; use a model with some")
    return built


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return the model on the CPU in float32, copied only if necessary."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == "cpu" and (t.dtype == torch.float32 or not t.is_floating_point()) for t in tensors):
        return model
    return copied(model).to("cpu", torch.float32)


def _wide(model: nn.Module) -> nn.Module:
    """A copy in float64; the model in float32 where copies would be large."""
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGE:
        return _on_cpu(model)
    return copied(model).to("cpu", torch.float64)


def _accepted(model: nn.Module) -> frozenset[str] | None:
    """Return the names that a forward accepts; None if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = frozenset(each.name for each in parameters if each.kind not in variable)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return None if takes_any and "labels" not in named and len(named) < 2 else named


def _classes(model: nn.Module, inputs: Mapping[str, Any], label: str, terms: Terms | None) -> int | None:
    """Count the classes of the labels; None if labels are no classes, or have no logits."""
    labels = inputs[label]
    if labels.is_floating_point() or (terms is not None and terms.kind == "samples" and labels.ndim > 1):
        return None
    with at_rest(model), torch.no_grad():
        logits = getattr(model(**inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or logits.shape[-1] < 2:
        return None
    return logits.shape[-1]
