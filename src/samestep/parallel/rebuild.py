"""An optimizer made again: with the same groups and settings, by another maker."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def rebuild(optimizer: Optimizer, make: Callable[..., Optimizer]) -> Optimizer:
    """`make(groups, **settings)` with the groups and settings that an optimizer was made with."""
    accepted = inspect.signature(type(optimizer)).parameters  # its defaults also hold what it sets for itself
    settings: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [
        {name: value for name, value in group.items() if name == "params" or name in accepted}
        for group in optimizer.param_groups
    ]
    return make(groups, **settings)
