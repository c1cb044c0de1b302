"""The example with which layouts follow a model tells the axes of its inputs apart, where any samples do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.training.example import example_of

pytestmark = pytest.mark.quick


class Pairs(samestep.Task):
    """Two sequences a sample, of the lengths that are given."""

    def __init__(self, lengths: Sequence[tuple[int, int]]) -> None:
        self.lengths = lengths

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_set(self) -> samestep.Samples:
        return self.lengths

    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        first, second = (max(lengths) for lengths in zip(*samples, strict=True))
        count = len(samples)
        inputs = {"first": torch.zeros(count, first, 4), "mask": torch.ones(count, first)}
        return samestep.Batch(inputs | {"second": torch.zeros(count, second)}, torch.zeros(count))

    def loss(self, output: Any, batch: samestep.Batch) -> Any:
        raise AssertionError


def shapes(lengths: Sequence[tuple[int, int]], *, telling: bool = True) -> list[tuple[int, ...]]:
    task = Pairs(lengths)
    return [tuple(each.shape) for each in example_of(task, task.train_set(), (), telling=telling).values()]


USUAL = [(7, 5)] * 40


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (USUAL, (2, 7, 5)),
        ([(6, 6)] * 2 + USUAL, (2, 7, 5)),
        ([(4, 9)] * 2 + USUAL, (2, 7, 5)),  # as many tokens as features
        ([(2, 9)] * 2 + USUAL, (2, 7, 5)),  # as many tokens as samples
        ([(1, 9)] * 2 + USUAL, (2, 7, 5)),
        ([(6, 6)] * 30 + [(7, 5)] * 2, (2, 7, 5)),
        ([(2, 5)] * 9, (3, 2, 5)),  # all samples are so: one more of them
        ([(6, 6)] * 9, (2, 6, 6)),  # no samples tell
        ([(6, 6)], (1, 6, 6)),
    ],
)
def test_it_is_of_samples_whose_sizes_differ(lengths: Any, expected: tuple[int, int, int]) -> None:
    samples, first, second = expected
    assert shapes(lengths) == [(samples, first, 4), (samples, first), (samples, second)]


def test_it_is_of_the_first_samples_where_nothing_is_followed() -> None:
    assert shapes([(6, 6)] * 2 + USUAL, telling=False)[0] == (2, 6, 4)
