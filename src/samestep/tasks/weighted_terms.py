"""A model's own loss that is a weighted sum of terms, each a mean over things of its own, as in detection models.

DETR's loss is a cross-entropy over queries, where those without an object weigh a tenth, and two losses over boxes.
The whole is no mean over anything, but each term is, and the model's output has them. Their weights are the
derivatives of the loss by them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from samestep.tasks.loss_terms import Inputs, Terms

# Of the loss, for the sum of its terms: it is added up in another order.
_TOLERANCE = 1e-5

# Names in a configuration of the weight of what has no object, where that of an object is 1.
_BACKGROUND = ("eos_coefficient", "no_object_weight")


@dataclass(frozen=True, kw_only=True)
class WeightedTerm:
    """One of the terms of a loss."""

    terms: Terms  # what it is a mean over
    weight: float


def terms_in(output: Any) -> Mapping[str, Tensor]:
    """The scalars of a model's output, besides its loss, by name; those of a mapping in it by theirs."""
    named: dict[str, Tensor] = {}
    for name, value in items_of(output):
        if isinstance(value, Mapping):
            named |= {str(key): inner for key, inner in value.items() if _is_scalar(inner)}
        elif name != "loss" and _is_scalar(value):
            named[name] = value
    return named


def items_of(output: Any) -> Iterable[tuple[str, Any]]:
    """What a model's output has by name; nothing for a plain tuple or tensor."""
    if isinstance(output, Mapping):
        return output.items()
    return vars(output).items() if hasattr(output, "loss") else ()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def weights_of(model: nn.Module, inputs: Inputs) -> Mapping[str, float] | None:
    """The weight of each term that the loss of some rows depends on; None where it is not their weighted sum.

    Takes a forward with its graph.
    """
    with torch.enable_grad():
        output = model(**inputs)
        loss = dict(items_of(output))["loss"]
        terms = {name: term for name, term in terms_in(output).items() if term.requires_grad}
        if not terms or not loss.requires_grad:
            return None
        gradients = torch.autograd.grad(loss.sum(), list(terms.values()), allow_unused=True)
    weights = {name: float(by) for name, by in zip(terms, gradients, strict=True) if by is not None and bool(by)}
    total = sum(weight * float(terms[name].detach()) for name, weight in weights.items())
    is_sum = len(weights) > 1 and math.isclose(total, float(loss.detach()), rel_tol=_TOLERANCE)
    return weights if is_sum else None


def with_background(model: nn.Module, tried: Sequence[Terms], logits: Sequence[int] | None) -> Iterator[Terms]:
    """Candidates in which each sample's queries without an object weigh less than those with one.

    Of `queries` in each of `rows` samples as many have an object as there are objects, so the weights add up to
    `weight * (queries * rows - objects) + objects`.
    """
    config = getattr(model, "config", None)
    weights = [value for name in _BACKGROUND if isinstance(value := getattr(config, name, None), float) and value > 0]
    if logits is None or len(logits) != 3:  # [samples, queries, classes]
        return
    for weight in weights:
        ratio = Fraction(weight).limit_denominator(10**6)  # whole numbers do, since only proportions count
        numbers = {"per_row": ratio.numerator * logits[1], "per_piece": ratio.denominator - ratio.numerator}
        yield from (replace(terms, **numbers) for terms in tried if terms.kind == "pieces")
