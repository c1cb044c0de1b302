"""A layout applied to a module, in this order: cut, slice, recompute, compile, shard or replicate."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.replicate import replicate


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A module spread over ranks."""

    module: nn.Module  # what forward calls
    accumulating: Callable[[], AbstractContextManager[None]]  # forward and backward without messages


def spread(model: nn.Module, layout: Layout, mesh: Mesh, device: torch.device) -> Spread:
    """Spread a model as its layout says. Raises LayoutError where it could not take the same step then."""
    if layout.replicate == 1:
        return Spread(module=model, accumulating=nullcontext)
    _check_batch_norm(model, layout)
    replicated = replicate(model, mesh.grid.get_group("replicate"), device)
    return Spread(module=replicated, accumulating=replicated.no_sync)


def _check_batch_norm(model: nn.Module, layout: Layout) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise LayoutError(
                f'layout "{layout}": {name} ({type(module).__name__}) would take its statistics from one rank\'s '
                "samples, which is another step than one process takes; layer norm or group norm would do"
            )
