"""Several losses: a task's loss in named terms, each a sum with a count of its own, and a weight.

The loss of a step is the sum over the terms of weight * sum / count, sums and counts being those of the global batch.
A term's gradient can't be divided after backward, when it is added to the others', so its global count must be known
before. `SeveralLosses` is what a trainer gets in place of a loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.tasks.base import Batch, sum_and_count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SeveralLosses:
    """A loss that gives a mapping of name -> (sum, count), and the terms' weights by name."""

    function: Callable[..., Any]
    weights: Mapping[str, float]

    def around(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "SeveralLosses":
        """The same with its function wrapped."""
        return replace(self, function=wrap(self.function))

    def terms(self, output: Any, batch: Batch, **gather: Any) -> "dict[str, tuple[Tensor, Tensor | int]]":
        """The terms of a batch, in the order of the weights. Raises UserError where they are others."""
        given = self.function(output, batch, **gather)
        if not isinstance(given, Mapping):
            raise UserError(
                f"loss_weights names {', '.join(self.weights)}, and the loss gave a {type(given).__name__}; use a "
                "mapping of these names to pairs of a sum and a count"
            )
        if given.keys() != self.weights.keys():
            raise UserError(
                f"loss_weights names {', '.join(self.weights)}, and the loss gave {', '.join(map(str, given))}; use "
                "the same names"
            )
        return {name: sum_and_count(given[name]) for name in self.weights}

    def __call__(self, output: Any, batch: Batch, **gather: Any) -> "tuple[Tensor, Tensor | int]":
        """The weighted sum over the terms' sums, and the sum of their counts: what adds up over parts of a batch."""
        terms = self.terms(output, batch, **gather)
        total = sum((self.weights[name] * value for name, (value, _) in terms.items()), start=0)
        return total, sum((count for _, count in terms.values()), start=0)  # pyright: ignore[reportReturnType]

    def of_whole_batch(self, output: Any, batch: Batch, **gather: Any) -> "tuple[Tensor, int]":
        """The loss of a step that has this batch alone, and 1."""
        terms = self.terms(output, batch, **gather)
        parts = [self.weights[name] * value / _at_least_one(count) for name, (value, count) in terms.items()]
        return sum(parts, start=0), 1  # pyright: ignore[reportReturnType]


def _at_least_one(count: "Tensor | int") -> "Tensor | int":
    return max(count, 1) if isinstance(count, (int, float)) else count.clamp(min=1)


def with_weights(loss: Callable[..., Any], weights: Mapping[str, float]) -> Callable[..., Any]:
    """A task's loss as a trainer takes it. Raises UserError for what are no weights."""
    if not isinstance(weights, Mapping):
        raise UserError(f"loss_weights is a {type(weights).__name__}; use a mapping of the terms' names to numbers")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight != weight:
            raise UserError(f'loss_weights: "{name}" has the weight {weight!r}; use a number')
    return SeveralLosses(loss, dict(weights)) if weights else loss
