"""A model as the user built it: refused where no layout could train it, and its lazy layers given their shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from samestep.data.loader import to_device
from samestep.errors import UserError, described
from samestep.tasks.base import call

_SPARSE = (nn.Embedding, nn.EmbeddingBag)
_WRAPPERS = (DataParallel, DistributedDataParallel)


def check_model(model: Any, what: str) -> None:
    """Raise UserError for what is no plain module, or can't be trained. `what` gave it."""
    if not isinstance(model, nn.Module):
        given = "None" if model is None else f"a {type(model).__name__}"
        raise UserError(f"{what} gave {given}; use an nn.Module, a new one in each call")
    if hasattr(model, "_orig_mod"):
        raise UserError(f"{what} gave a module that torch.compile made; use the module itself, and run.compile: true")
    for name, module in model.named_modules():
        which = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, _WRAPPERS):
            raise UserError(f"{what}: {which} is wrapped for several processes or devices; use its .module")
        if isinstance(module, _SPARSE) and module.sparse:
            raise UserError(
                f"{what}: {which} has sparse gradients, which are neither clipped nor sharded; use sparse=False"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{what}: the model has no parameter that needs a gradient; use requires_grad=True for some")


def check_memory(model: nn.Module, what: str) -> None:
    """Raise UserError for parameters and buffers on the meta device, which have no values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise UserError(f"{what}: {name} is on the meta device, and has no values; use a model built on the CPU")


def lazy_modules(model: nn.Module) -> list[str]:
    """The modules that get their shapes in the first forward, by name and type."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(is_lazy(tensor) for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]


def materialize(model: nn.Module, inputs_of: Callable[[], Any], what: str) -> None:
    """Give lazy layers their shapes by one forward; their values are drawn from torch's generator.

    The forward is in evaluation mode: statistics stay as they are, and dropout draws nothing.
    """
    lazy = lazy_modules(model)
    if not lazy:
        return
    training = [module for module in model.modules() if module.training]
    inputs = to_device(inputs_of(), torch.device("cpu"), torch.float32)
    try:
        with torch.no_grad():
            call(model.eval(), inputs)
    except Exception as error:
        raise UserError(
            f"{what}: {lazy[0]} gets its shape in a first forward, which fails ({described(error)}); use layers that "
            "are given their sizes"
        ) from error
    finally:
        model.eval()
        for module in training:
            module.training = True
    if left := lazy_modules(model):
        raise UserError(
            f"{what}: {left[0]} has no shape after a forward of the first samples; use layers that are given their "
            "sizes"
        )
