"""Which differences of tensors are rounding, by the sizes of the others in the same step."""

from functools import reduce

import pytest
import torch
from torch import Tensor

from samestep.recording.differences import TensorDifference, limits_of, tensor_difference

EPS = torch.finfo(torch.float32).eps
USUAL = 0.02  # a typical number of the step's gradients


def difference(known: Tensor, value: Tensor) -> TensorDifference:
    return tensor_difference("bias", known.double(), value.double(), usual=USUAL)


def judged(tensor: TensorDifference, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tensor departs, among three whose second run had the same bits."""
    same = difference(torch.full((64,), USUAL), torch.full((64,), USUAL))
    return limits_of([same, same, tensor], dtype).exceeded(tensor)


def test_a_gradient_whose_terms_cancel_has_the_rounding_of_its_terms() -> None:
    """The bias behind two outputs that are subtracted: numbers and their negatives, summed in several orders."""
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(8, generator=generator) * USUAL
    numbers = torch.cat([terms, -terms])
    orders = [torch.randperm(16, generator=generator) for _ in range(4)]
    sums = [reduce(torch.add, numbers[order].unbind()).reshape(1) for order in orders]  # each rounded to float32
    assert len({total.item() for total in sums}) > 1
    for total in sums[1:]:
        assert not judged(difference(sums[0], total))


@pytest.mark.parametrize("size", [1.0, 1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("numbers", [1, 64])
def test_a_small_gradient_that_is_two_percent_off_is_no_rounding(size: float, numbers: int) -> None:
    known = torch.full((numbers,), size * USUAL)
    assert judged(difference(known, known * 1.02))
    assert judged(difference(known, torch.zeros_like(known)))


def test_in_float64_what_float32_rounds_departs() -> None:
    known = torch.full((1,), 1e-3 * USUAL, dtype=torch.float64)
    assert judged(difference(known, known + EPS * USUAL), torch.float64)
