"""Over how many terms a model's own loss is a mean: found by trying a copy of the model on a few samples.

Models of transformers return the mean of their loss, and each kind means another thing by it: over samples, over
labels that are not masked, over those that have a token before them. A step needs the sum and the count. So the model
is called on a few samples together and on each of them alone, with labels masked unevenly, and each candidate is held
against what came out: the right one is that for which

    mean(all) * count(all)  =  mean(first) * count(first) + mean(second) * count(second) + ...

Where none fits, the loss is not a mean over its samples' terms (contrastive losses, losses with a balancing term of
experts), and no split of a batch could give it.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.errors import UserError, described, index_errors_explained

IGNORED = -100  # the label that transformers' losses leave out

# Of a mean of size 1 or more. A wrong count is off by 1e-3 or more; a term that couples samples may be small.
_TOLERANCES = {torch.float64: 2e-6, torch.float32: 2e-5}  # models that cast inside have float32's digits in both

_POSITIONS = ("start_positions", "end_positions")  # of an answer in a text

_OUT_OF_REACH = 1 << 20  # a position behind every text

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Terms:
    """What a loss is a mean over."""

    kind: Literal["labels", "shifted", "attended", "positions", "samples"]
    label: str = "labels"  # the tensor that is counted
    ignored: int = IGNORED

    def count(self, inputs: Inputs) -> int:
        """How many terms the loss of a batch has."""
        labels = inputs[self.label]
        if self.kind == "samples":
            return len(labels)
        if self.kind == "attended":
            return int(labels.sum())
        if self.kind == "positions":
            return int(_answered(inputs, self.label).sum())
        if self.kind == "shifted":
            labels = labels[..., 1:]
        return int((labels != self.ignored).sum())


def _answered(inputs: Inputs, label: str) -> Tensor:
    """Which samples have their answer within the text. [samples]"""
    length = next(value.shape[1] for key, value in inputs.items() if key in ("input_ids", "inputs_embeds"))
    return inputs[label].flatten() < length


def check_answers(inputs: Inputs) -> None:
    """Raise UserError where only one end of an answer is in the text: the two ends' means have other counts then."""
    first, second = (_answered(inputs, name) for name in _POSITIONS)
    if not torch.equal(first, second):
        raise UserError(
            "an answer has one of start_positions and end_positions within its text and the other behind it; use "
            "positions that are both within the text, or both behind it"
        )


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
        attributes = {name: value for name, value in vars(module).items() if name != "_modules"}
        yield from (leaf for leaf in pytree.tree_leaves(attributes) if isinstance(leaf, Tensor) and not leaf.is_leaf)


def find_terms(model: nn.Module, inputs: Inputs, labels: Sequence[str], given: Any = None) -> Terms | None:
    """What the model's loss is a mean over, or None where it is over what `given` counts.

    `inputs` are a few samples, and `labels` the names of those tensors in them that the loss is held against; there
    may be none. Raises UserError where no count fits.
    """
    size = len(inputs[_counted(inputs, labels)])
    with at_rest(model):
        first = _mean(model, inputs, "the first rows")
        if not math.isfinite(first):
            raise UserError(
                f"{_name(model)} gives a loss of {first} for the first rows; use rows with labels that count, and a "
                "model of finite weights"
            )
        if _mean(model, inputs, "the first rows") != first:
            raise UserError(
                f"{_name(model)} gives another loss for the same rows in evaluation mode: it draws at random; use a "
                "model whose forward draws nothing but dropout"
            )
        trials = [_trial(model, inputs, size)]
        for variant in _variants(model, inputs, labels):
            with suppress(UserError):  # the model can't take these labels, which are not the user's
                trials.append(_trial(model, variant, size))
    tolerance = _TOLERANCES[next(p.dtype for p in model.parameters() if p.is_floating_point())]
    if given is not None:
        # Only the rows as they are: the user's function may not know of masked labels, which the variants have.
        if _fits([int(given(part)) for part in trials[0].parts], trials[0], tolerance):
            return None
        raise UserError(f"count=: the loss of {_name(model)} is no mean over as many terms; {_fix(model, trials)}")
    fitting = [
        terms
        for terms in _candidates(model, inputs, labels)
        if all(_fits([terms.count(part) for part in trial.parts], trial, tolerance) for trial in trials)
    ]
    if not fitting:
        raise UserError(
            f"the loss of {_name(model)} is no mean over its samples, its labels or its tokens, so a batch's loss "
            f"can't be put together from parts; {_fix(model, trials)}"
        )
    counts = {terms: [terms.count(part) for trial in trials for part in trial.parts] for terms in fitting}
    best = fitting[0]
    for other in fitting[1:]:
        if not _proportional(counts[best], counts[other]):
            raise UserError(
                f"the loss of {_name(model)} may be a mean over several things, which the first rows don't tell "
                "apart; use count=, a function from a collated batch to the number of its loss's terms"
            )
    return best


@dataclass(frozen=True)
class _Trial:
    """Mean losses of some samples together, then of each alone."""

    parts: Sequence[Inputs]
    means: Sequence[float]


def _trial(model: nn.Module, inputs: Inputs, size: int) -> _Trial:
    """Call the model on all `size` samples together, then on each alone."""
    parts = [inputs, *(_slice(inputs, index, size) for index in range(size))]
    return _Trial(parts, [_mean(model, part, "one of the first rows alone") for part in parts])


def _fits(counts: Sequence[int], trial: _Trial, tolerance: float) -> bool:
    """Whether mean * count of all samples is the sum over each sample alone, up to rounding."""
    sums = [mean * count if count else 0.0 for mean, count in zip(trial.means, counts, strict=True)]
    if not counts[0] or not all(map(math.isfinite, sums)):
        return False
    size = sum(abs(part) + count for part, count in zip(sums[1:], counts[1:], strict=True))
    return abs(sums[0] - sum(sums[1:])) <= tolerance * size


def _proportional(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two counts are proportional, so that a step is the same with either."""
    return all(one * second[0] == other * first[0] for one, other in zip(first, second, strict=True))


def _candidates(model: nn.Module, inputs: Inputs, labels: Sequence[str]) -> Iterator[Terms]:
    """What the loss may be a mean over, the more usual first: labels, shifted labels, samples, attended tokens."""
    for name in labels:
        if inputs[name].is_floating_point():
            continue
        if name in _POSITIONS:
            yield Terms("positions", name)
            continue
        for number in _ignored_by(model):
            yield Terms("labels", name, number)
            if inputs[name].ndim > 1:
                yield Terms("shifted", name, number)
    yield Terms("samples", _counted(inputs, labels))
    if _has_mask(inputs):
        yield Terms("attended", "attention_mask")


def _counted(inputs: Inputs, labels: Sequence[str]) -> str:
    """Return the tensor whose length is the number of samples."""
    return labels[0] if labels else next(name for name, value in inputs.items() if _has_samples(value))


def _has_samples(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _has_mask(inputs: Inputs) -> bool:
    """Whether padding is marked by an attention mask [samples, tokens]."""
    mask = inputs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point()


def _ignored_by(model: nn.Module) -> list[int]:
    """Labels that losses leave out: the usual one, and those of a model's configuration."""
    config = getattr(model, "config", None)
    others = (getattr(config, key, None) for key in ("semantic_loss_ignore_index", "pad_token_id"))
    return list(dict.fromkeys((IGNORED, *(value for value in others if isinstance(value, int)))))


def _variants(model: nn.Module, inputs: Inputs, labels: Sequence[str]) -> Iterator[Inputs]:
    """The samples with labels masked unevenly, in ways that tell the candidates apart."""
    whole = [name for name in labels if not inputs[name].is_floating_point()]
    if set(whole) & set(_POSITIONS):
        behind = {name: inputs[name].clone() for name in whole}
        for positions in behind.values():
            positions[-1] = _OUT_OF_REACH
        yield {**inputs, **behind}
    elif whole:
        for ignored in _ignored_by(model):
            for fill in (False, True):
                yield {**inputs, **{name: _masked(inputs[name], ignored, fill) for name in whole}}
    if _has_mask(inputs):
        mask = inputs["attention_mask"].clone()
        mask[-1, 2:] = 0
        yield {**inputs, "attention_mask": mask}


def _masked(labels: Tensor, ignored: int, fill: bool) -> Tensor:
    """Mask labels so that each sample keeps more than the previous one; the first sample's first label is kept.

    `fill`: replace masked labels by a value first, so that more candidates can be distinguished.
    """
    if labels.ndim == 1:
        return torch.cat([labels[:-1], labels.new_tensor([ignored])])
    valid = labels[(labels >= 0) & (labels != ignored)]
    filled = torch.where((labels >= 0) & (labels != ignored), labels, valid[0]) if fill and len(valid) else labels
    rates = torch.linspace(0.3, 0.9, len(labels)).reshape(-1, *[1] * (labels.ndim - 1))
    keep = torch.rand(labels.shape, generator=torch.Generator().manual_seed(int(fill))) < rates
    keep[:, 0], keep[0, 0], keep[:, 1:2] = False, True, True
    return filled.masked_fill(~keep, ignored)


def _mean(model: nn.Module, inputs: Inputs, what: str) -> float:
    """The model's own loss for a batch. Raises UserError where it gives none."""
    try:
        with torch.no_grad(), index_errors_explained(f"{_name(model)} on {what}"):
            output = model(**inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{_name(model)} fails on {what} ({described(error)}); use rows or a collator whose keys and "
            "shapes its forward takes"
        ) from error
    loss = loss_of(output)
    if not isinstance(loss, Tensor):
        takes = [
            name for name in inspect.signature(model.forward).parameters if "label" in name or name in _POSITIONS
        ]
        fix = f"rows or a collator with {' and '.join(takes)}" if takes else "a model with a head that has one"
        raise UserError(f"{_name(model)} gives no loss for {', '.join(inputs)}; use {fix}")
    if loss.numel() != 1:
        raise UserError(f"{_name(model)} gives a loss of shape {list(loss.shape)}; use a model whose loss is a mean")
    if getattr(output, "aux_loss", None) is not None:  # may be too small next to the rest to be seen
        raise UserError(
            f"the loss of {_name(model)} has a term that balances experts over a batch, which can't be put together "
            "from parts; use output_router_logits=False"
        )
    return float(loss)


def _fix(model: nn.Module, trials: Sequence[_Trial]) -> str:
    """Return the remedy for a loss that no count fits, as the end of a message."""
    config = getattr(model, "config", None)
    if getattr(config, "ctc_loss_reduction", None) == "sum":
        return 'use ctc_loss_reduction="mean", since this is a sum'
    if abs(trials[0].means[0] - sum(trials[0].means[1:])) <= 1e-5 * abs(trials[0].means[0]):
        return "use a mean, since this is a sum"
    return (
        "write a task of your own (samestep.Task) with a loss that is a sum over samples, or, where it compares "
        "samples as contrastive losses do, def loss(self, output, batch, gather) with the rows of the whole batch: "
        "all_embeds = gather(output.image_embeds)"
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


def _slice(inputs: Inputs, index: int, size: int) -> Inputs:
    """One sample of a batch, whose tensors have samples first."""
    return {
        key: value[index : index + 1] if isinstance(value, Tensor) and value.ndim and len(value) == size else value
        for key, value in inputs.items()
    }


def _name(model: nn.Module) -> str:
    return type(model).__name__
