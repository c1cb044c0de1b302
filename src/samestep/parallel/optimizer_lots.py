"""Lots: parameters that are stepped together, so that what a step makes of them exists for one lot at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.parallel.joined_optimizer import follow
from samestep.parallel.sharding import local

_LARGEST = 1 << 24  # numbers of a lot, unless one parameter alone has more


class Lot:
    """Parameters that an optimizer of their own steps together, or copies of them.

    PyTorch's optimizers over many tensors (foreach) make temporaries of the size of all parameters that they step: by
    lots these have the size of one.
    """

    def __init__(
        self,
        kind: Callable[..., Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        lot: Mapping[int, Sequence[nn.Parameter]],  # by the number of their group
        stepped: Mapping[nn.Parameter, nn.Parameter],  # what is stepped for each: itself, or a copy
    ) -> None:
        self.stepped = {parameter: stepped[parameter] for mine in lot.values() for parameter in mine}
        self._numbers = list(lot)
        mine = [{**groups[number], "params": [stepped[p] for p in some]} for number, some in lot.items()]
        self.optimizer = kind(mine, **settings)

    def complete(self, groups: Sequence[dict[str, Any]]) -> None:
        """Write into the groups what was not said, so that a schedule finds the settings of the kind of optimizer."""
        for number, mine in zip(self._numbers, self.optimizer.param_groups, strict=True):
            for name, value in mine.items():
                groups[number].setdefault(name, value)

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Step with the settings, such as the rate, that the outer groups have now."""
        follow(self.optimizer, groups, self._numbers)
        self.optimizer.step()


def lots(groups: Sequence[Mapping[str, Any]]) -> Iterator[dict[int, list[nn.Parameter]]]:
    """Parameters of up to some numbers together, by the number of their group."""
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
