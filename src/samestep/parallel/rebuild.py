"""An optimizer made again by another maker: with the same groups and settings, and kept at the same settings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def follow(inner: Optimizer, groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Give an inner optimizer's groups the settings, such as the rate, of the groups that a schedule sets."""
    for number, mine in zip(numbers, inner.param_groups, strict=True):
        mine.update({name: value for name, value in groups[number].items() if name != "params"})
