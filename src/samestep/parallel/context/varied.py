"""A model with other numbers in place of those that hide what is computed, while its outputs are compared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def varied(model: nn.Module) -> Iterator[None]:
    """Give parameters that are one number throughout, such as zero, larger ones, and the old ones back after.

    A branch whose last matrix or scale begins as zero gives nothing, whatever goes wrong in it. Every rank takes the
    same numbers.
    """
    generator = torch.Generator().manual_seed(0)
    before: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for parameter in model.parameters():
            if _is_constant(parameter):
                before.append((parameter, parameter.detach().clone()))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.3 * noise.abs()).to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)


def _is_constant(parameter: nn.Parameter) -> bool:
    if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
        return False
    first = parameter.detach().flatten()[0]
    return bool(torch.isfinite(first)) and bool((parameter == first).all())
