"""Over how many terms a model's own loss is a mean: found by trying the model on a few rows of the user's.

A step needs the sum and the count. So the model is called on a few rows together and on two parts of them, each put
together by the user's collator, and each candidate of `loss_terms` is held against what came out: the right one is
that for which

    mean(whole) * count(whole)  =  mean(first) * count(first) + mean(rest) * count(rest)

Where the rows can't tell the candidates apart, since each has as many labels as the others, labels are left out: a
mean over labels is then that of the rows that keep theirs. What the model makes of such labels is no fact about it
but where it is exactly that; a failure or a NaN says nothing.

Where none fits, the loss is not a mean over its samples' terms (contrastive losses, losses with a balancing term of
experts), and no split of a batch could give it.
"""

import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.errors import UserError, described, index_errors_explained
from samestep.tasks.loss_terms import IGNORED, POSITIONS, Inputs, Part, Terms, candidates, proportional
from samestep.tasks.weighted_terms import WeightedTerm, items_of, terms_in, weights_of, with_background
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import own_children

# Of a mean of size 1 or more. A wrong count is off by 1e-3 or more; a term that couples samples may be small.
_TOLERANCES = {torch.float64: 2e-6, torch.float32: 2e-5}  # models that cast inside have float32's digits in both

_CLEARLY = 30  # times the error of the best candidate, from which another one doesn't fit
_LEAST = 16  # times the rounding of one number, which several may reach

COUNT = "count=, a function from a collated batch to the number of its loss's terms"
_OWN = "loss=, a function of the model's output and the collated batch that gives a sum and a count"


class NoFitError(UserError):
    """No candidate fits the loss, or more than one does: other digits, or a loss of two towers, may."""


class NotFiniteError(NoFitError):
    """The loss of the rows is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The rows on which a model is tried: all together, and cut in two."""

    whole: Part
    first: Part
    rest: Part
    alone: Sequence[Part] = ()  # these and more rows, each alone: their terms are counted, without the model

    @property
    def counted(self) -> Sequence[Part]:
        """All that tells candidates apart."""
        return self.whole, self.first, self.rest, *self.alone


@dataclass(frozen=True, kw_only=True)
class FoundTerms:
    """What a loss is a mean over."""

    terms: Terms | None  # None: what the user's function counts
    # What it may be instead, which had that many terms to so many of `terms` in all rows that were counted.
    doubtful: Sequence[tuple[Terms, int, int]] = ()
    logits: Sequence[int] | None = None  # the shape of the first part's logits, if the model gives such
    weighted: Mapping[str, WeightedTerm] = field(default_factory=dict)  # the terms of a weighted sum, by name


def loss_of(output: Any) -> Any:
    """The loss in a model's output, which is the first value of a plain tuple; None where it gives none."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)


def copied(model: nn.Module) -> nn.Module:
    """A copy of a model, also of one that keeps what a forward has computed, such as the states of RecurrentGemma.

    Raises UserError where the model can't be copied.
    """
    # PyTorch copies no tensor that has a graph. Those of a finished forward have no use for theirs.
    values = {id(tensor): tensor.detach().clone() for tensor in computed_in(model)}
    try:
        return deepcopy(model, values)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UserError(f"model= can't be copied ({described(error)}); use a function that builds it") from error


def computed_in(model: nn.Module) -> Iterator[Tensor]:
    """Tensors with a graph that a forward has left in attributes of a model's modules."""
    for module in model.modules():
        attributes = [value for value in vars(module).values() if value is not own_children(module)]
        yield from (leaf for leaf in pytree.tree_leaves(attributes) if isinstance(leaf, Tensor) and not leaf.is_leaf)


def find_terms(model: nn.Module, parts: Parts, labels: Sequence[str], own_count: Any = None) -> FoundTerms:
    """What the model's loss is a mean over.

    `labels` are the names of the inputs that the loss is held against; there may be none. `own_count`: the user's.
    Raises UserError where the model can't be called, and NoFitError where no count fits, or several do.
    """
    trial = _Trial(model=model, parts=parts, labels=labels)
    with at_rest(model):
        if own_count is not None:
            _check_given(trial, own_count)
            return FoundTerms(terms=None, logits=_shape(trial.of("first").logits))
        counts = _counts(candidates(model, parts.whole.inputs, labels), parts)
        if weighted := _weighted(trial, list(counts)):
            return FoundTerms(terms=None, weighted=weighted)
        by_labels = _settled_by_labels(trial, list(counts)) if _one_for_all(counts, list(counts)) else []
        fitting = by_labels or _settled_by_logits(trial, counts)
        fitting = (_matching_logits(trial, fitting) or fitting) if fitting else _fitting(trial, counts)
        best, *others = fitting
    doubtful = [(other, sum(counts[other]), sum(counts[best])) for other in others]
    return FoundTerms(terms=best, doubtful=doubtful, logits=_shape(trial.of("first").logits))


def _shape(logits: Tensor | None) -> Sequence[int] | None:
    return None if logits is None else tuple(logits.shape)


def _counts(tried: Sequence[Terms], parts: Parts) -> dict[Terms, list[int]]:
    """The number of terms of every part, by candidate; without those that some rows can't be counted by."""
    by_terms: dict[Terms, list[int]] = {}
    for terms in tried:
        try:
            counts = [terms.of(part) for part in parts.counted]
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError):
            continue
        if counts[0]:
            by_terms[terms] = counts
    return by_terms


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """What a forward gave."""

    mean: float
    logits: Tensor | None
    scores: Mapping[str, Tensor]  # its outputs of real numbers, such as start_logits and end_logits
    terms: Mapping[str, float]  # other scalars, of which a loss may be made up


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A model and the parts on which it is called, each at most once."""

    model: nn.Module
    parts: Parts
    labels: Sequence[str]
    known: dict[str, _Forward] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def tolerance(self) -> float:
        return _TOLERANCES[self._dtype]

    @property
    def epsilon(self) -> float:
        return torch.finfo(self._dtype).eps

    @property
    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def of(self, name: str) -> _Forward:
        """The forward of the whole, the first part or the rest. Raises UserError where the model has no loss."""
        if name not in self.known:
            part: Part = getattr(self.parts, name)
            self.known[name] = _forward(self.model, part.inputs, part.what)
        return self.known[name]

    def without_labels(self, *, also_first: bool, ignored: int = IGNORED) -> float | None:
        """The mean of all rows of which the rest has no label that counts; None where it has none, or labels can't
        be left out. `also_first`: nor has the first token of each row. `ignored`: the label that may not count."""
        inputs = dict(self.parts.whole.inputs)
        kept = self.parts.first.rows
        for name in self.labels:
            label = inputs[name]
            if not isinstance(label, Tensor) or label.is_floating_point() or name in POSITIONS:
                return None
            if not label.ndim or len(label) != self.parts.whole.rows or label.dtype in (torch.bool, torch.uint8):
                return None
            inputs[name] = label = label.clone()
            label[kept:] = ignored
            if also_first and label.ndim > 1:
                label[..., 0] = ignored
        try:
            mean = _forward(self.model, inputs, "labels that are left out").mean
        except Exception:  # the model can't take these labels, which are not the user's
            return None
        return mean if math.isfinite(mean) else None


def slack_of(model: nn.Module, parts: Parts, terms: Terms) -> float:
    """What a model adds to the number of terms that it divides by, lest it be zero; 0.0 where nothing is.

    The losses of masked image modelling divide by `mask.sum() + 1e-5`. With s for that, the parts' sums are
    `mean * (count + s)`, which add up to the whole's for one s. `model` is in float64, where it shows.
    """
    trial = _Trial(model=model, parts=parts, labels=())
    with at_rest(model):
        means = [trial.of(name).mean for name in ("whole", "first", "rest")]
    whole, first, rest = (mean * terms.of(part) for mean, part in zip(means, parts.counted, strict=False))
    apart, by = whole - first - rest, means[1] + means[2] - means[0]
    if not by or abs(apart) <= 1e3 * torch.finfo(torch.float64).eps * (abs(first) + abs(rest)):
        return 0.0
    return max(apart / by, 0.0)


def _weighted(trial: _Trial, tried: Sequence[Terms]) -> Mapping[str, WeightedTerm]:
    """The terms of a loss that is their weighted sum; empty where it isn't, or all are means over one thing."""
    names = trial.of("first").terms
    if len(names) < 2 or not trial.labels or not (weights := weights_of(trial.model, trial.parts.whole.inputs)):
        return {}
    counts = _counts([*tried, *with_background(trial.model, tried, _shape(trial.of("first").logits))], trial.parts)
    weighted: dict[str, WeightedTerm] = {}
    for name, weight in weights.items():
        means = [trial.of(part).terms.get(name, math.nan) for part in ("whole", "first", "rest")]
        errors = {terms: _misfit_of(means, of_parts) for terms, of_parts in counts.items()}
        best = min(errors, key=lambda terms: errors[terms])
        fitting = [terms for terms, error in errors.items() if error <= max(_CLEARLY * errors[best], trial.epsilon)]
        told = all(proportional(counts[best], counts[terms]) for terms in fitting)
        if errors[best] > trial.tolerance or not told:
            return {}
        weighted[name] = WeightedTerm(terms=best, weight=weight)
    first, *others = (counts[term.terms] for term in weighted.values())
    return weighted if not all(proportional(first, other) for other in others) else {}


def _settled_by_labels(trial: _Trial, tried: Sequence[Terms]) -> list[Terms]:
    """What the loss is a mean over, by leaving labels out, where every candidate has as many terms in every row.

    Takes a forward of the first part, and one or two of the whole. Empty where that doesn't tell.
    """
    of_labels = [terms for terms in tried if terms.of_labels and terms.ignored == IGNORED]
    if len(tried) == 1 or not of_labels:
        return []
    mean = trial.of("first").mean
    for kind in ("shifted", "labels"):
        of_kind = [terms for terms in of_labels if terms.kind == kind]
        if not of_kind:
            continue
        without = trial.without_labels(also_first=kind == "shifted")
        if without is not None and abs(without - mean) <= trial.tolerance * (abs(mean) + 1):
            return of_kind
    return []


def _settled_by_logits(trial: _Trial, counts: Mapping[Terms, Sequence[int]]) -> list[Terms]:
    """The candidates of labels by which the cross-entropy of the logits is the mean of the first part and the whole.

    Saves a forward of the rest. Empty where that doesn't tell, or rows have other logits among others.
    """
    matching = _matching_logits(trial, list(counts), "first")
    matching = matching and _matching_logits(trial, matching, "whole")
    if not matching or _depends_on_others(trial) is not None:
        return []
    if not _one_for_all(counts, matching):
        matching = _told_by_labels(trial, matching)
    return matching if _one_for_all(counts, matching) else []


def _one_for_all(counts: Mapping[Terms, Sequence[int]], some: Sequence[Terms]) -> bool:
    """Whether a step is the same with each of some candidates."""
    return all(proportional(counts[some[0]], counts[other]) for other in some)


def _fitting(trial: _Trial, counts: Mapping[Terms, Sequence[int]]) -> list[Terms]:
    """The candidates whose parts add up to the whole. Raises UserError where there is none."""
    whole = trial.of("whole").mean
    if not math.isfinite(whole):
        raise NotFiniteError(
            f"{trial.name} gives a loss of {whole} for {trial.parts.whole.what}; use rows with labels that "
            "count, and a model of finite weights"
        )
    errors = {terms: _error(of_parts, trial) for terms, of_parts in counts.items()}
    best = min(errors, key=lambda terms: errors[terms], default=None)
    if best is None or errors[best] > trial.tolerance:
        raise NoFitError(_misfit(trial))
    # A new model gives all tokens almost the same loss, and a wrong count is then off by little, but far more than
    # rounding is.
    most = max(_CLEARLY * errors[best], _LEAST * trial.epsilon)
    fitting = [terms for terms, error in errors.items() if error <= most]
    matching = _matching_logits(trial, fitting)
    if matching and _one_for_all(counts, matching):
        return matching
    fitting = matching or fitting
    if not _one_for_all(counts, fitting) or len({terms.of_labels for terms in fitting}) > 1:
        fitting = _told_by_labels(trial, fitting)
    if not _one_for_all(counts, fitting):
        raise NoFitError(
            f"the loss of {trial.name} may be a mean over several things, which a few rows don't tell apart; use "
            f"{COUNT}"
        )
    return fitting


def _told_by_labels(trial: _Trial, fitting: list[Terms]) -> list[Terms]:
    """What is left of the candidates where labels are left out by each label that may not count.

    The rows that were tried may have none of these: the label of padding is that of a class, too. Where the mean is
    then that of the other rows, the label doesn't count; else it does.
    """
    mean = trial.of("first").mean
    for number in dict.fromkeys(terms.ignored for terms in fitting if terms.of_labels):
        without = trial.without_labels(also_first=False, ignored=number)
        if without is None:
            continue
        by_number = [terms for terms in fitting if terms.of_labels and terms.ignored == number]
        if abs(without - mean) <= trial.tolerance * (abs(mean) + 1):
            return by_number
        fitting = [terms for terms in fitting if terms not in by_number] or fitting
    return fitting


def _check_given(trial: _Trial, own_count: Any) -> None:
    """Raise UserError where the user's count is not the loss's."""
    parts = (trial.parts.whole, trial.parts.first, trial.parts.rest)
    if _error([int(own_count(part.inputs)) for part in parts], trial) > trial.tolerance:
        raise NoFitError(f"count=: the loss of {trial.name} is no mean over as many terms; {_advice(trial)}")


def _error(counts: Sequence[int], trial: _Trial) -> float:
    """By how much mean * count of the whole is not the sum of the parts', of the size of all that is added."""
    return _misfit_of([trial.of(name).mean for name in ("whole", "first", "rest")], counts)


def _misfit_of(means: Sequence[float], counts: Sequence[int]) -> float:
    """By how much the sum of the whole is not that of its parts, for the means of whole, first part and rest."""
    sums = [mean * count if count else 0.0 for mean, count in zip(means, counts[:3], strict=True)]
    if not counts[0] or not all(map(math.isfinite, sums)):
        return math.inf
    size = sum(abs(part) + count for part, count in zip(sums[1:], counts[1:3], strict=True))
    return abs(sums[0] - sum(sums[1:])) / size


def _matching_logits(
    trial: _Trial, fitting: Sequence[Terms], which: Literal["first", "whole"] = "first"
) -> list[Terms]:
    """The candidates of labels by which the cross-entropy of the logits is the model's mean, of one of the parts."""
    part, forward = getattr(trial.parts, which), trial.of(which)
    errors: dict[Terms, float] = {}
    for terms in fitting:
        logits, labels = forward.logits, part.inputs.get(terms.label)
        if not terms.of_labels or logits is None or not isinstance(labels, Tensor) or labels.is_floating_point():
            continue
        if logits.shape[:-1] != labels.shape or logits.shape[-1] < 2:
            continue
        if terms.mask is not None:
            labels = labels.masked_fill(part.inputs[terms.mask] == 0, terms.ignored)
        if terms.kind == "shifted":
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        counted = labels[labels != terms.ignored]
        if bool(((counted < 0) | (counted >= logits.shape[-1])).any()):  # the model leaves these out in another way
            continue
        flat = logits.reshape(-1, logits.shape[-1]).double()
        mean = F.cross_entropy(flat, labels.reshape(-1).long(), ignore_index=terms.ignored)
        errors[terms] = abs(float(mean) - forward.mean) / (abs(forward.mean) + 1)
    best = min(errors.values(), default=math.inf)
    most = min(trial.tolerance, max(_CLEARLY * best, _LEAST * trial.epsilon))
    return [terms for terms, error in errors.items() if error <= most]


def _forward(model: nn.Module, inputs: Inputs, what: str) -> _Forward:
    """A forward with the model's own loss. Raises UserError where it gives none, or draws."""
    name = type(model).__name__
    before = _generators()
    try:
        with torch.no_grad(), index_errors_explained(f"{name} on {what}"):
            output = model(**inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{name} fails on {what} ({described(error)}); use rows or a collator whose keys and shapes its forward "
            "takes"
        ) from error
    if _generators() != before and not _same_again(model, inputs, output):
        if labels := _labels_it_draws_for(model, inputs):
            raise UserError(
                f"the own loss of {name} draws random numbers, as its forward without {' and '.join(labels)} does "
                f"not; use {_OWN}, and a collator that gives labels under names that its forward doesn't take"
            )
        raise UserError(
            f"{name} draws random numbers in evaluation mode: it draws at random; use a model whose forward draws "
            "nothing but dropout"
        )
    logits = dict(items_of(output)).get("logits")
    return _Forward(
        mean=_mean(model, inputs, output),
        logits=logits if isinstance(logits, Tensor) else None,
        scores={
            name: value
            for name, value in items_of(output)
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
        },
        terms={name: float(value) for name, value in terms_in(output).items()},
    )


def _labels_it_draws_for(model: nn.Module, inputs: Inputs) -> list[str]:
    """The labels without which a forward draws nothing, as Mask2Former's loss draws points; none if it does."""
    labels = [name for name in inputs if "label" in name]
    before = _generators()
    try:
        with torch.no_grad():
            model(**{name: value for name, value in inputs.items() if name not in labels})
    except Exception:  # it asks for them
        return []
    return labels if _generators() == before else []


def _same_again(model: nn.Module, inputs: Inputs, output: Any) -> bool:
    """Whether other draws give the same loss, as those of an order do that nothing depends on."""
    with torch.no_grad():
        again = model(**inputs)
    one, other = _mean(model, inputs, output), _mean(model, inputs, again)
    return abs(one - other) <= _TOLERANCES[torch.float32] * abs(one)


def _generators() -> tuple[Any, ...]:
    """The states of all generators of random numbers on the CPU."""
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), hash(random.getstate()), numpys[1].tobytes(), numpys[2]


def _mean(model: nn.Module, inputs: Inputs, output: Any) -> float:
    """The loss in a model's output. Raises UserError where there is none."""
    loss, name = loss_of(output), type(model).__name__
    if not isinstance(loss, Tensor):
        takes = [key for key in inspect.signature(model.forward).parameters if "label" in key or key in POSITIONS]
        absent = [key for key in takes if key not in inputs]
        fix = f"rows or a collator with {' and '.join(absent)}" if absent else "a model with a head that has one"
        raise UserError(f"{name} gives no loss for {', '.join(inputs)}; use {fix}, or {_OWN}")
    if loss.numel() != 1:
        raise UserError(
            f"{name} gives a loss of shape {list(loss.shape)}; use a model whose loss is a mean, or {_OWN}"
        )
    if getattr(output, "aux_loss", None) is not None:  # may be too small next to the rest to be seen
        raise UserError(
            f"the loss of {name} has a term that balances experts over a batch, which can't be put together from "
            "parts; use output_router_logits=False"
        )
    return float(loss)


def _misfit(trial: _Trial) -> str:
    """Say why no candidate fits."""
    again = _forward(trial.model, trial.parts.whole.inputs, trial.parts.whole.what)
    if again.mean != trial.of("whole").mean:
        return (
            f"{trial.name} gives another loss for the same rows in evaluation mode: it draws at random; use a model "
            "whose forward draws nothing but dropout"
        )
    begin = f"the loss of {trial.name} is no mean over its samples, its labels, its tokens or what a mask marks"
    if name := _depends_on_others(trial):
        return (
            f"{begin}: its {name} for {trial.parts.first.rows} rows are others where these are padded with "
            f"{trial.parts.rest.rows} more, so padding counts in the model; use a collator that pads all rows to one "
            f"length{_mask_advice(trial)}"
        )
    return f"{begin}, so a batch's loss can't be put together from parts; {_advice(trial)}"


def _mask_advice(trial: _Trial) -> str:
    """To pass a mask of padding, where the model takes one that it wasn't given."""
    taken = inspect.signature(trial.model.forward).parameters
    absent = [name for name in taken if "attention_mask" in name and name not in trial.parts.whole.inputs]
    return f", or pass {absent[0]} where that keeps padding out" if absent else ""


def _depends_on_others(trial: _Trial) -> str | None:
    """An output whose values for the first part are others in the whole, whose rows are longer; None without one."""
    longer = any(
        isinstance(value, Tensor) and value.shape[1:] != trial.parts.first.inputs[key].shape[1:]
        for key, value in trial.parts.whole.inputs.items()
    )
    rows, others = trial.parts.first.rows, trial.of("whole").scores
    for name, one in trial.of("first").scores.items() if longer else ():
        other = others.get(name)
        if other is None or one.ndim != other.ndim or (len(one), len(other)) != (rows, trial.parts.whole.rows):
            continue
        if one.ndim > 2 or one.shape[1] != other.shape[1]:  # those of padding itself may differ
            one, other = one[:, 0], other[:, 0]
        sizes = [slice(min(pair)) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
        one, other = one[:, *sizes].double(), other[:rows, *sizes].double()
        if bool((one - other).abs().max() > 50 * trial.tolerance * one.abs().max()):
            return name
    return None


def _advice(trial: _Trial) -> str:
    """The remedy for a loss that no count fits, as the end of a message."""
    whole, first, rest = (trial.of(name) for name in ("whole", "first", "rest"))
    config = getattr(trial.model, "config", None)
    if getattr(config, "ctc_loss_reduction", None) == "sum":
        return 'use ctc_loss_reduction="mean", since this is a sum'
    if abs(whole.mean - first.mean - rest.mean) <= 1e-5 * abs(whole.mean):
        return "use a mean, since this is a sum"
    if len(whole.terms) > 1:
        named = ", ".join([*whole.terms][:6]) + (", ..." if len(whole.terms) > 6 else "")
        return (
            f"it is made up of {named}, each with a count of its own; use {_OWN} for each of its terms, which "
            "loss_weights= names, or count= where they have one"
        )
    gather = "(output, batch, gather) where it compares samples"
    slack = 10 * trial.tolerance * (abs(whole.mean) + 1)
    if min(first.mean, rest.mean) - slack <= whole.mean <= max(first.mean, rest.mean) + slack:
        return f"use {COUNT}, where it is a mean over something else, or {_OWN}, {gather}"
    return (
        f"{whole.mean:.6g} for {trial.parts.whole.rows} rows lies outside {first.mean:.6g} and {rest.mean:.6g} for "
        f"{trial.parts.first.rows} and {trial.parts.rest.rows} of them, so no count= fits; use {_OWN}, {gather}"
    )


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode, with small random values in all-zero parameters.

    New output layers are often zero: all losses are then equal, which distinguishes no counts.
    """
    training = [module for module in model.modules() if module.training]
    zeros = [p for p in model.parameters() if p.is_floating_point() and not bool(p.detach().any())]
    generator = torch.Generator().manual_seed(0)
    model.eval()
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()
        for module in training:
            module.training = True
