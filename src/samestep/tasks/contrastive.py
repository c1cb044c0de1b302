"""Contrastive losses of models with two towers: found by trying the model, and computed over the global batch.

CLIP and its kin hold each sample's embedding of one kind against those of the other kind of all samples in the batch.
Their own loss sees the samples of one call alone. But what they give is enough to compute it for more: of two
embeddings u and v [samples, width] with a learnt scale s and bias b, the loss is a mean over the samples of

    softmax (CLIP, Radford et al. 2021, figure 3):   -log softmax_j(s * u_i . v_j)[i]
    sigmoid (SigLIP, Zhai et al. 2023, equation 1):  -sum_j log sigmoid(z_ij * (s * u_i . v_j + b)), z_ii = 1, else -1

or half of one such term and half of another, such as CLIP's two directions. Which outputs are u and v, and which
scalar parameters of the model are s and b, is found by computing every candidate from what the model gives for the
first rows, and holding it against the model's own loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.tasks.losses import Gather, alone
from samestep.tasks.model_loss import copied, loss_of

RETURN_LOSS = "return_loss"  # the keyword by which such models of transformers are asked for their own loss
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative; a wrong candidate is off by far more


def _itself(value: Tensor) -> Tensor:
    return value * 1  # no parameter leaves a forward


# How models use a scalar parameter: as it is, as an exponent (CLIP), as a temperature (ALIGN).
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "itself": _itself,
    "reciprocal": torch.reciprocal,
}


@dataclass(frozen=True)
class Scalar:
    """A function of a scalar parameter of the model; without a parameter a number."""

    parameter: str | None
    function: str = "itself"
    number: float = 1.0

    @property
    def key(self) -> str:
        """Its name among the model's outputs."""
        return f"{self.function} of {self.parameter}"

    def of(self, output: Mapping[str, Tensor]) -> Tensor | float:
        return self.number if self.parameter is None else output[self.key]


_ONE, _NONE = Scalar(None), Scalar(None, number=0.0)


@dataclass(frozen=True)
class Term:
    """One direction of a contrastive loss: each row against all columns."""

    kind: Literal["softmax", "sigmoid"]
    rows: str  # the output whose samples are this call's
    columns: str  # the output whose samples are those of the global batch
    scale: Scalar
    bias: Scalar = _NONE

    def sum_of(self, output: Mapping[str, Tensor], columns: Tensor, columns_of_rows: Tensor) -> Tensor:
        """The sum over this call's samples.

        `columns` [samples of the batch, width]; `columns_of_rows` [samples of the call].
        """
        logits = output[self.rows] @ columns.T * self.scale.of(output) + self.bias.of(output)
        if self.kind == "softmax":
            return F.cross_entropy(logits, columns_of_rows, reduction="sum")
        signs = -torch.ones_like(logits)
        signs[torch.arange(len(columns_of_rows), device=columns_of_rows.device), columns_of_rows] = 1
        return -F.logsigmoid(signs * logits).sum()


@dataclass(frozen=True)
class Contrast:
    """The contrastive loss of a model: the mean of one or two terms."""

    terms: Sequence[Term]

    @property
    def embeddings(self) -> tuple[str, str]:
        """The outputs that are held against each other, each [samples, width]."""
        return self.terms[0].rows, self.terms[0].columns

    @property
    def directions(self) -> "list[tuple[bool, tuple[str, str]]]":
        """By direction, whether it is the second, and the kinds of samples: which one is held against which."""
        first, second = (name.removesuffix("_embeds").removesuffix("_embeddings") for name in self.embeddings)
        return [(False, (first, second)), (True, (second, first))]

    @property
    def scalars(self) -> list[Scalar]:
        """Those that are functions of parameters."""
        scalars = [
            scalar for term in self.terms for scalar in (term.scale, term.bias) if scalar.parameter is not None
        ]
        return list(dict.fromkeys(scalars))

    def follow(self, model: nn.Module) -> nn.Module:
        """Make a model give what the loss is computed from, and nothing else, as a dictionary of tensors."""
        model.register_forward_hook(_Given(self))
        return model

    def outputs(self, model: nn.Module, output: Any) -> dict[str, Tensor]:
        """The embeddings in what a model gave, and the scalars of its parameters."""
        outputs = {name: _named(output)[name] for name in self.embeddings}
        for scalar in self.scalars:
            outputs[scalar.key] = _value(model, scalar)
        return outputs

    def loss_sum(self, output: Mapping[str, Tensor], gather: Gather = alone) -> Tensor:
        """The sum over this call's samples, held against those of the whole batch."""
        first, second = self.embeddings
        everyone = dict(zip(self.embeddings, gather((output[first], output[second])), strict=True))
        own_rows = gather.rows(output[first])
        sums = [term.sum_of(output, everyone[term.columns], own_rows) for term in self.terms]
        return torch.stack(sums).mean()


@dataclass(frozen=True)
class _Given:
    """A forward hook: what a contrastive loss needs, in place of a model's own output."""

    contrast: Contrast

    def __call__(self, model: nn.Module, arguments: Any, output: Any) -> dict[str, Tensor]:
        return self.contrast.outputs(model, output)


def find_contrast(model: nn.Module, inputs: Mapping[str, Any]) -> Contrast | None:
    """The contrastive loss that a model's own loss is for a few samples, or None where it is no such loss.

    Tries a copy with other weights: at their first ones, the embeddings of all samples may be almost the same, and so
    the losses of all candidates.
    """
    model = copied(model).eval()
    _spread(model)
    with torch.no_grad():
        output = _named(model(**inputs))
        loss = loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not math.isfinite(loss):
            return None
        tolerance = _TOLERANCES.get(loss.dtype, 1e-4) * abs(float(loss))
        fitting = [term for value, term in _candidates(model, output) if abs(float(value - loss)) <= tolerance]
    return fitting[0] if len(fitting) == 1 else None


def _spread(model: nn.Module) -> None:
    """Give a model weights by which samples have unlike embeddings, and its scalar parameters unlike values."""
    generator = torch.Generator().manual_seed(0)
    scalars = 0
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn / math.sqrt(max(parameter.shape[1:].numel(), 1)))
        elif parameter.numel() == 1:
            parameter.data.fill_(0.7 + 0.13 * scalars)
            scalars += 1


def _candidates(model: nn.Module, output: Mapping[str, Any]) -> Iterator[tuple[Tensor, Contrast]]:
    """Every loss that is tried, with its value: those of one term, then those of two."""
    scalars = [name for name, parameter in model.named_parameters(recurse=False) if parameter.numel() == 1]
    functions = [Scalar(name, function) for name in scalars for function in _FUNCTIONS]
    biases = [_NONE, *(Scalar(name) for name in scalars)]
    for pair in combinations(_embeddings(output), 2):
        outputs: dict[str, Any] = {name: output[name] for name in pair}
        for scalar in functions:
            outputs[scalar.key] = _value(model, scalar)
        first, second = pair
        both = ((first, second), (second, first))
        softmax = [Term("softmax", rows, columns, s) for s in (_ONE, *functions) for rows, columns in both]
        # A sum over all pairs of samples is the same from both sides.
        sigmoid = [Term("sigmoid", first, second, scale, bias) for scale, bias in product((_ONE, *functions), biases)]
        diagonal = torch.arange(len(outputs[pair[0]]), device=outputs[pair[0]].device)
        values = {
            term: term.sum_of(outputs, outputs[term.columns], diagonal) / len(diagonal)
            for term in (*softmax, *sigmoid)
        }
        yield from ((value, Contrast((term,))) for term, value in values.items())
        for two in combinations(softmax, 2):
            yield (values[two[0]] + values[two[1]]) / 2, Contrast(two)


def _embeddings(output: Mapping[str, Any]) -> list[str]:
    """The outputs that may be embeddings: [samples, width] with one width of all."""
    tables = {
        name: value
        for name, value in output.items()
        if isinstance(value, Tensor) and value.ndim == 2 and value.is_floating_point()
    }
    # The logits of the samples against each other have two equal sizes; embeddings are so only by chance.
    named = [name for name in tables if "logits" not in name]
    shapes = [tables[name].shape for name in named]
    return [name for name, shape in zip(named, shapes, strict=True) if shapes.count(shape) > 1]


def _value(model: nn.Module, scalar: Scalar) -> Tensor:
    """A function of a scalar parameter, of no dimension. A layout may have a tensor in the place of the parameter."""
    return _FUNCTIONS[scalar.function](getattr(model, str(scalar.parameter)).reshape(()))


def _named(output: Any) -> Mapping[str, Any]:
    """A model's outputs by name; none where they have none."""
    return output if isinstance(output, Mapping) else {}
