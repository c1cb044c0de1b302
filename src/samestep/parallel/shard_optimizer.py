"""ZeRO-1: whole parameters and gradients on every data rank, and each keeps the optimizer state of a part."""

import inspect
import warnings

from torch.distributed import ProcessGroup
from torch.optim import Optimizer


def shard_optimizer(optimizer: Optimizer, group: ProcessGroup) -> Optimizer:
    """An optimizer that does what the given one would, each rank of `group` for its part of the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, from what it imports along
        from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters  # an optimizer's defaults also hold what it sets for itself
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [
        {name: value for name, value in each.items() if name == "params" or name in accepted}
        for each in optimizer.param_groups
    ]
    sharded = ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=group, **settings)
    # The same groups, so that a schedule of the given optimizer also sets the rates here.
    sharded.param_groups = optimizer.param_groups
    return sharded
