"""Rounding as micro-batches make it: a model's forward in two halves of its batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from samestep.script_proof.halves import Halves


class Scores(NamedTuple):
    scores: Tensor
    hidden: Tensor


class Net(nn.Module):
    """Notes with how many rows it was called, and returns what it is told to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.kind = kind
        self.rows: list[int] = []

    def forward(self, rows: Tensor, *, factor: Tensor) -> Any:
        self.rows.append(len(rows))
        hidden = rows * factor
        scores = self.layer(hidden)
        if self.kind == "mean":
            return scores.mean()
        if self.kind == "named":
            return {"scores": scores, "loss": None, "more": [hidden, (scores,)]}
        if self.kind == "tuple":
            return Scores(scores, hidden)
        if self.kind == "text":
            return scores, "text"
        return scores


def called(net: nn.Module, batch: int = 5) -> tuple[Any, Tensor, int]:
    """What a forward in halves returns, the gradient that comes of it, and how many forwards were in halves."""
    done: list[int] = []
    halves = Halves(lambda: done.append(1))
    rows = torch.randn(batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    halves.begin(net, batch)
    factor = torch.tensor(2.0, dtype=torch.float64)
    result = halves.called(nn.Module.__call__, net, (rows,), {"factor": factor})
    _first(result).square().sum().backward()
    weight = next(net.parameters()).grad
    assert weight is not None
    return result, weight.clone(), len(done)


def _first(value: Any) -> Tensor:
    if isinstance(value, Mapping):
        return value["scores"]
    return value if isinstance(value, Tensor) else value[0]


@pytest.mark.parametrize("kind", ["plain", "named", "tuple"])
def test_halves_are_joined_as_the_model_returns_them(kind: str) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    result, gradient, done = called(net)
    assert (net.rows, done) == ([2, 3], 1)
    net.zero_grad()
    rows = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = net(rows, factor=torch.tensor(2.0, dtype=torch.float64))
    _first(whole).square().sum().backward()
    assert type(result) is type(whole)
    torch.testing.assert_close(_first(result), _first(whole), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient, net.layer.weight.grad, rtol=1e-12, atol=1e-12)
    if kind == "named":
        assert result["loss"] is None
        torch.testing.assert_close(result["more"][1][0], whole["scores"])
    if kind == "tuple":
        torch.testing.assert_close(result.hidden, whole.hidden)


@pytest.mark.parametrize("kind", ["mean", "text"])
def test_what_has_no_rows_is_made_of_the_whole_batch(kind: str) -> None:
    net = Net(kind)
    _, _, done = called(net)
    assert done == 0
    assert net.rows[-1] == 5


def test_one_row_and_a_batch_norm_are_not_cut() -> None:
    one = Net("plain")
    assert called(one, batch=1)[2] == 0
    assert one.rows == [1]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, rows: Tensor, *, factor: Tensor) -> Tensor:
            return self.norm(rows * factor)

    assert called(Normed())[2] == 0
