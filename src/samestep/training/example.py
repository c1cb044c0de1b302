"""The example with which a model is followed: the inputs of a few samples whose sizes tell their axes apart.

Layouts that cut a model find the axis of its tokens by its length. Where the first samples have, by chance, as many
tokens in the encoder as in the decoder, or as many tokens as there are samples, one would be taken for the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from samestep.data.sample_draws import sample_of
from samestep.data.types import Samples, as_batch
from samestep.tasks.base import InTurn, Task
from samestep.tasks.turns import Turn
from samestep.torch_internals import pytree

_FEW = 2  # samples of an example
_PLACES = 8  # in the training set, at which samples are looked at

Axis = tuple[str, int]  # a tensor of the inputs, by its place in them, and its dimension


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """The inputs of some samples, and the size of each axis of their tensors."""

    inputs: Any
    samples: int
    sizes: Mapping[Axis, int]

    def alike(self, pairs: Sequence[tuple[Axis, Axis]]) -> int:
        """How many of the given pairs of axes have one size, and how many axes have the number of samples or 1."""
        taken_for_samples = sum(size in (self.samples, 1) for (_, dim), size in self.sizes.items() if dim)
        return taken_for_samples + sum(self.sizes[one] == self.sizes[other] for one, other in pairs)


def example_of(task: Task, samples: Samples, turns: Sequence[Turn], *, telling: bool = False) -> Any:
    """What the model is called with: the inputs of the first samples.

    `telling`: of others, where the sizes of these hide which axes differ. It is the same on every rank.
    """
    first = _candidate(task, samples, 0, _FEW)
    inputs = first.inputs
    if telling and any(dim for _, dim in first.sizes):
        inputs = _most_telling(first, list(_others(task, samples, first))).inputs
    return InTurn(inputs, turns[0].name) if turns else inputs


def _others(task: Task, samples: Samples, first: _Candidate) -> Iterator[_Candidate]:
    """Yield inputs of the same form from all over the set, and of the first samples with one more."""
    total = len(samples)
    starts = dict.fromkeys(place * max(total - _FEW, 0) // (_PLACES - 1) for place in range(1, _PLACES))
    for start, number in [*((start, _FEW) for start in starts if start), (0, _FEW + 1)]:
        if start + number <= total:
            candidate = _candidate(task, samples, start, number)
            if candidate.sizes.keys() == first.sizes.keys():
                yield candidate


def _most_telling(first: _Candidate, others: Sequence[_Candidate]) -> _Candidate:
    """The first of those inputs in which the fewest axes have one size that have different ones in others."""
    axes = [axis for axis in first.sizes if axis[1]]
    apart = [
        (one, other)
        for one, other in combinations(axes, 2)
        if any(row.sizes[one] != row.sizes[other] for row in [first, *others])
    ]
    return min([first, *others], key=lambda candidate: candidate.alike(apart))


def _candidate(task: Task, samples: Samples, start: int, number: int) -> _Candidate:
    """Collate some samples."""
    last = min(start + number, len(samples))
    inputs = as_batch(task.collate([sample_of(samples, index) for index in range(start, last)])).inputs
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    tensors = {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    return _Candidate(
        inputs=inputs,
        samples=last - start,
        sizes={(path, dim): size for path, leaf in tensors.items() for dim, size in enumerate(leaf.shape)},
    )
