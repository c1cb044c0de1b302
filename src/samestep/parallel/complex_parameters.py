"""Complex parameters: kept complex under layouts that support them, and refused under others."""

import torch
from torch import Tensor, nn

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout


def check_complex(model: nn.Module, layout: Layout, precision: str) -> None:
    """Raise UserError if PyTorch would lose a complex parameter's imaginary part, or fail in a step."""
    name = first_complex(model)
    if name is None:
        return
    what = f"the parameter {name} is complex"
    if precision == "fp16":
        raise UserError(f"recipe.precision is fp16 and {what}, whose gradient can't be unscaled; use bf16 or fp32")
    if layout.zero >= 2:
        ranks = layout.data_ranks
        raise LayoutError(
            f'layout "{layout}": {what}, and shards of complex parameters are not stepped as whole ones are by '
            f"PyTorch's AdamW, nor sharded with real ones by FSDP2; use dp{ranks} or zero1x{ranks}"
        )


def first_complex(model: nn.Module) -> str | None:
    """The name of the first complex parameter; None if there is none."""
    return next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)


def as_real(values: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, [..., 2], as safetensors has no complex128; others unchanged."""
    return torch.view_as_real(values.resolve_conj()).contiguous() if values.is_complex() else values
