"""Which modules are sharded as one: FSDP2 gathers the parameters of a unit when the unit's forward is called."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch import nn

from samestep.parallel.blocks import has_forward
from samestep.parallel.calls import Trace


def shard_units(model: nn.Module, blocks: Sequence[nn.Module], seen: Trace | None) -> list[nn.Module]:
    """The blocks, or parts of them, that can be gathered by themselves, in the order in which they run.

    What is in none of them is gathered with the model. `seen` is what the model's forward does: a unit must be
    called, and its parameters must be used in its forward alone. Where the forward was followed to a module that
    decides by values what it calls, its parts are gathered with it, since another rank's samples may want others.
    Without a trace every block with a forward is taken.
    """
    finder = _Finder(model, seen)
    units = dict.fromkeys(chain.from_iterable(finder.within(block) for block in blocks))
    return sorted(units, key=finder.began)


@dataclass(frozen=True, kw_only=True)
class Units:
    """The units of all ranks that share out one model's parameters."""

    modules: Sequence[nn.Module]
    may_differ: bool  # whether samples may decide which of them run


def agreed_units(
    model: nn.Module, blocks: Sequence[nn.Module], seen: Trace | None, group: dist.ProcessGroup
) -> Units:
    """The units that every rank of a group found; every rank asks."""
    units = shard_units(model, blocks, seen)
    names = {module: name for name, module in model.named_modules()}
    followed = seen is not None and seen.stop is None
    found: list[tuple[list[str], bool] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, ([names[unit] for unit in units], followed), group=group)
    everyone = [each for each in found if each is not None]
    modules = [model.get_submodule(name) for name in everyone[0][0] if all(name in theirs for theirs, _ in everyone)]
    return Units(modules=modules, may_differ=not all(whole for _, whole in everyone))


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that FSDP2 can't shard: scalars, empty ones, and trained ones of another dtype than most."""
    numbers: dict[object, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim:
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
    usual = max(numbers, key=lambda dtype: numbers[dtype], default=None)
    return {p for p in model.parameters() if not p.ndim or not p.numel() or (p.requires_grad and p.dtype != usual)}


class _Finder:
    def __init__(self, model: nn.Module, seen: Trace | None) -> None:
        self._model = model
        self._seen = seen
        self._followed = seen is not None and seen.stop is None
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {parameter: name for name, parameter in model.named_parameters()}
        self._began: dict[str, int] = {}
        for call in seen.calls if seen is not None else ():
            self._began.setdefault(call.name, call.began)

    def began(self, unit: nn.Module) -> int:
        """The position of a unit's first call; those that were not followed come last."""
        return self._began.get(self._names[unit], len(self._began) * 2)

    def within(self, module: nn.Module) -> Iterator[nn.Module]:
        """The module where it can be a unit, or else the largest parts of it that can."""
        if self._fits(module):
            yield module
        elif self._followed or not has_forward(module):  # else nobody knows whether every rank calls its parts
            for child in module.children():
                yield from self.within(child)

    def _fits(self, module: nn.Module) -> bool:
        if not has_forward(module) or not any(True for _ in module.parameters()) or _shares(self._model, module):
            return False
        if self._seen is None:
            return True
        name, stop = self._names[module], self._seen.stop
        if stop is not None:
            if not stop.module or name.startswith(f"{stop.module}."):
                return False
            if name not in self._began and name not in stop.modules:
                return self._is_like_a_followed_one(module)
        elif name not in self._began:
            return False
        return all(
            name in running
            for parameter in module.parameters()
            for running in self._seen.uses.get(self._parameters[parameter], ())
        )

    def _is_like_a_followed_one(self, module: nn.Module) -> bool:
        return any(
            type(other) is type(module) and name in self._began and self._fits(other)
            for other, name in self._names.items()
        )


def _shares(model: nn.Module, block: nn.Module) -> bool:
    """Whether a block has a parameter that also stands elsewhere; tied ones are sharded together, with the rest."""
    mine = {id(parameter) for parameter in block.parameters()}
    inside = {id(module) for module in block.modules()}
    return any(
        id(parameter) in mine
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    )
