"""Varied parameters: for comparisons of outputs, constant parameters such as zeros get random values added.

A branch whose last matrix or scale is zero has a zero output, which would hide errors in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.parallel.valueless import has_values


@contextmanager
def varied(model: nn.Module) -> Iterator[None]:
    """Context in which constant parameters have random values added, the same on every rank; restored afterwards.

    Parameters may be replaced by slices of themselves inside; both are restored.
    """
    generator = torch.Generator().manual_seed(0)
    before: list[tuple[str, nn.Parameter, Tensor]] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _is_constant(parameter):
                before.append((name, parameter, parameter.detach().flatten()[0].clone()))
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.3 * noise.abs()).to(parameter.device, parameter.dtype))
    try:
        yield
    finally:
        held = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter, value in before:
                parameter.fill_(value)
                held.get(name, parameter).fill_(value)


def _is_constant(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one finite number throughout, as biases and scales are when a model begins."""
    if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel() or not has_values(parameter):
        return False
    first = parameter.detach().flatten()[0]
    return bool(torch.isfinite(first)) and bool((parameter == first).all())
