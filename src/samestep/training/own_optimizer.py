"""The optimizer of a loop of one's own, which was made before its model was spread."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.optim import Optimizer

from samestep.errors import UserError


def point_to(
    optimizer: Optimizer, names: Mapping[int, str], parameters: Iterator[tuple[str, nn.Parameter]]
) -> Optimizer:
    """Point an optimizer's groups to the parameters that now stand under the same names."""
    now = dict(parameters)
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise UserError(f"session.prepare: the optimizer has {len(unknown)} parameters that the model has not")
        held = [names[id(parameter)] for parameter in group["params"]]
        group["params"] = [now[name] for name in held if name in now]  # a pipeline's rank holds some of them
    return optimizer


def no_schedule(optimizer: Optimizer) -> None:
    """A loop of one's own advances its schedule itself."""
