"""ZeRO-1: whole parameters on every data rank, and each keeps the optimizer state of a part and steps that part."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from samestep.parallel.optimizer_kinds import Make
from samestep.parallel.rebuild import rebuild


def shard_optimizer(optimizer: Optimizer, group: ProcessGroup, kind: Callable[..., Optimizer]) -> Optimizer:
    """An optimizer that does what the given one would, each rank of `group` for its part of the parameters.

    `kind` makes the optimizer of a part.
    """
    sharded = rebuild(optimizer, partial(_class(), optimizer_class=kind, process_group=group))
    # The same groups, so that a schedule of the given optimizer also sets the rates here.
    sharded.param_groups = optimizer.param_groups
    return sharded


def shard_joined(optimizer: Optimizer, group: ProcessGroup, make: Make) -> Optimizer:
    """The same of an optimizer that `make` makes of groups with their settings."""
    groups = optimizer.param_groups
    # PyTorch hands on the defaults that it was given, and settings of groups beside them.
    sharded = _class()([{**each} for each in groups], optimizer_class=lambda part: make(part), process_group=group)
    sharded.param_groups = groups
    return sharded


def _class() -> Any:
    """PyTorch's sharded optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's own, from what it imports along
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class OfAnyDtype(ZeroRedundancyOptimizer):
        """Parameters of several dtypes, such as real and complex ones.

        PyTorch asks for one dtype for the sake of `parameters_as_bucket_view`, which is not used here: each
        parameter is sent by itself.
        """

        def _verify_same_dense_param_type(self) -> None:
            pass

    return OfAnyDtype
