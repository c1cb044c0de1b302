"""Nests: when two batches are the same."""

import numpy as np
import pytest
import torch

from samestep.data.nests import equal

pytestmark = pytest.mark.quick

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"x": torch.tensor([1.0, NAN])}, {"x": torch.tensor([1.0, NAN])}, True),
        ({"x": torch.tensor([1.0, NAN])}, {"x": torch.tensor([1.0, 0.0])}, False),
        ({"x": torch.tensor([INF])}, {"x": torch.tensor([torch.finfo(torch.float32).max])}, False),
        ({"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(1)}, False),
        ({"x": [torch.ones(2), torch.ones(3)]}, {"x": [torch.ones(2)]}, False),
        ({"x": torch.ones(2)}, {"x": torch.ones(2, dtype=torch.int64)}, False),
        ((torch.tensor([True]), "a"), (torch.tensor([True]), "a"), True),
        ((torch.zeros(2), "a"), (torch.zeros(2), "b"), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), torch.eye(2), False),
        (torch.empty(0), torch.empty(0), True),
    ],
)
def test_equal(first: object, second: object, *, same: bool) -> None:
    assert equal(first, second) is same
    assert equal(second, first) is same
