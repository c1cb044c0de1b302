"""What AdamW makes of a gradient that is rounding alone is no difference between layouts; anything more is one."""

import math

import pytest
import torch
from proving import prove, same
from small_tasks import Points
from torch import nn

import samestep
from samestep.training.rounding import Rounding, relative_tensors


class Normed(Points):
    """Biases before batch norms, whose gradient is zero: what is computed of it is the rounding of a sum."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        )


def recipe(*, lr: float) -> samestep.Recipe:
    return samestep.Recipe(task=Normed(samples=64, held_out=7), batch=16, steps=5, optimizer=samestep.AdamW(lr=lr))


def test_biases_before_a_batch_norm_are_no_false_alarm() -> None:
    proofs = prove(
        {f"{lr} {layout}": (recipe(lr=lr), layout, {}) for lr in (1e-2, 1e-1) for layout in ("dp2", "fsdp2")}
    )
    assert same(proofs, list(proofs)) == {}


def test_what_rounding_may_move_is_an_adam_step_of_it() -> None:
    rounding = Rounding()
    gradient = torch.tensor([0.5, 1e-17, 0.0, 1e-9], dtype=torch.float64)
    for lr in (0.01, 0.02):
        rounding.add(
            [("weight", gradient), ("filter", gradient + 0j)],
            norm=2.0,
            settings={"weight": (lr, 1e-8), "filter": (lr, 1e-8)},
        )
    rounded = 4 * 2.0**-52 * 2.0
    expected = [
        0.01 * rounded / (each + 1e-8) + 0.02 * rounded / (each / math.sqrt(2) + 1e-8) for each in gradient.tolist()
    ]
    assert rounding.moves["weight"].tolist() == pytest.approx(expected, rel=1e-12)
    assert rounding.moves["filter"][:, 0].tolist() == pytest.approx(expected, rel=1e-12)
    assert rounding.moves["filter"][:, 1].tolist() == pytest.approx(expected[2:3] * 4, rel=1e-12)
    assert expected[0] < 1e-15  # nothing, where there is a gradient
    assert expected[2] < 1e-8  # and a millionth of the steps' rates, where there is none


def test_what_is_more_than_rounding_stays_a_difference() -> None:
    theirs = torch.tensor([1.0, 2.0], dtype=torch.float64)
    moves = torch.tensor([1e-9, 1e-9], dtype=torch.float64)
    assert relative_tensors(theirs + 9e-10, theirs, 1.0, moves) == 0
    assert relative_tensors(theirs + 3e-9, theirs, 1.0, moves) == pytest.approx(1e-9, rel=1e-5)
    assert relative_tensors(theirs * math.nan, theirs, 1.0, moves) == math.inf
