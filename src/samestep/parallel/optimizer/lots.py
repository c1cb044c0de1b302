"""Lots: groups of parameters that are stepped together, so that a step's temporaries exist for one lot at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.parallel.optimizer.joined import follow
from samestep.parallel.sharding import local

_LARGEST = 1 << 24  # numbers of a lot, unless one parameter alone has more


class Lot:
    """Parameters, or copies of them, with an inner optimizer of their own.

    PyTorch's foreach optimizers allocate temporaries of the size of all parameters that they step; with lots these
    have the size of one lot.
    """

    def __init__(
        self,
        kind: Callable[..., Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        lot: Mapping[int, Sequence[nn.Parameter]],  # by the number of their group
        stepped: Mapping[nn.Parameter, nn.Parameter],  # parameter -> the one that is stepped: itself, or a copy
    ) -> None:
        self.stepped = {parameter: stepped[parameter] for own in lot.values() for parameter in own}
        self._numbers = list(lot)
        own_groups = [{**groups[number], "params": [stepped[p] for p in some]} for number, some in lot.items()]
        self.optimizer = kind(own_groups, **settings)

    def complete(self, groups: Sequence[dict[str, Any]]) -> None:
        """Add the optimizer's default settings to the outer groups, where a schedule looks for them."""
        for number, group in zip(self._numbers, self.optimizer.param_groups, strict=True):
            for name, value in group.items():
                groups[number].setdefault(name, value)

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Step with the current settings, such as the learning rate, of the outer groups."""
        follow(self.optimizer, groups, self._numbers)
        self.optimizer.step()


def lots(groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[int, list[nn.Parameter]]]:
    """Split groups into lots of limited size: {number of the group: parameters}."""
    lot: dict[int, list[nn.Parameter]] = {}
    size = 0
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            lot.setdefault(number, []).append(parameter)
            size += local(parameter.detach()).numel()
            if size >= _LARGEST:
                yield lot
                lot, size = {}, 0
    if lot:
        yield lot
