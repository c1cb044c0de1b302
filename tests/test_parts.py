"""Gradients as sums of the parts of ranks and micro-batches: which weights the fit finds, and when it finds none."""

import pytest
import torch

from samestep.verification.departure import after_equal_steps
from samestep.verification.parts import Part, weights_of_parts

COUNTS = (17.0, 16.0, 5.0)


def parts() -> list[Part]:
    generator = torch.Generator().manual_seed(3)
    return [
        Part(count=count, gradient=count * torch.randn(40, generator=generator, dtype=torch.float64))
        for count in COUNTS
    ]


def summed(*weights: float) -> torch.Tensor:
    return torch.stack([weight * part.gradient for weight, part in zip(weights, parts(), strict=True)]).sum(0)


WHOLE = 1 / sum(COUNTS)


@pytest.mark.parametrize(
    ("weights", "ratios", "mean_of_means"),
    [
        ([WHOLE] * 3, [1.0, 1.0, 1.0], False),
        ([1 / (3 * count) for count in COUNTS], [38 / 51, 38 / 48, 38 / 15], True),
        ([WHOLE, WHOLE, 0.0], [1.0, 1.0, 0.0], False),
        ([2 * WHOLE, WHOLE, WHOLE], [2.0, 1.0, 1.0], False),
    ],
)
@pytest.mark.parametrize("times", [1.0, 0.1])  # an average of gradients has a part of them
def test_weights_are_found(weights: list[float], ratios: list[float], mean_of_means: bool, times: float) -> None:
    before = torch.linspace(-1, 1, 40, dtype=torch.float64)
    alone, split = (times * summed(*each) + 0.9 * before for each in ([WHOLE] * 3, weights))
    found = weights_of_parts(parts(), alone, split, [before])
    assert found is not None
    assert found.ratios == pytest.approx(ratios, abs=1e-9)
    assert found.mean_of_means is mean_of_means


def test_what_is_no_sum_of_parts_is_not_explained() -> None:
    alone, other = summed(WHOLE, WHOLE, WHOLE), torch.ones(40, dtype=torch.float64)
    assert weights_of_parts(parts(), alone, alone + 0.01 * other, []) is None
    assert weights_of_parts(parts(), alone + other, alone, []) is None  # a loss that isn't a sum over samples
    assert weights_of_parts(parts()[:1], alone, alone, []) is None
    assert weights_of_parts(parts(), torch.ones(3), torch.ones(3), []) is None


def test_where_no_step_departs_a_buffer_or_the_metrics_are_left() -> None:
    same = {"loss": 0.0, "grad_norm": 0.0, "parameters": 0.0, "metrics": 0.0}
    assert after_equal_steps(same, "0.weight", 1e-10) is None
    metrics = after_equal_steps({**same, "metrics": 0.01}, "0.weight", 1e-10)
    assert metrics is not None
    assert (metrics.kind, metrics.relative) == ("evaluation-differs", 0.01)
    buffer = after_equal_steps({**same, "parameters": 0.1, "metrics": 0.01}, "norm.running_mean (a buffer)", 1e-10)
    assert buffer is not None
    assert (buffer.kind, buffer.module) == ("buffer", "norm.running_mean")
