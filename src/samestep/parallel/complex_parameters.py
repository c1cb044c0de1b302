"""Complex parameters: kept complex under every layout that can, and refused in one sentence under the others."""

import torch
from torch import Tensor, nn

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout


def check_complex(model: nn.Module, layout: Layout, precision: str) -> None:
    """Raise UserError where PyTorch would lose a complex parameter's imaginary part, or fail in a step."""
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
            f"PyTorch's AdamW, nor sharded beside real ones by FSDP2; use dp{ranks} or zero1x{ranks}"
        )


def first_complex(model: nn.Module) -> str | None:
    """The name of the first complex parameter, where there is one."""
    return next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)


def as_real(values: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, [..., 2]; others as they are. safetensors has no complex128."""
    return torch.view_as_real(values.resolve_conj()).contiguous() if values.is_complex() else values
