"""Combine several optimizers, each for some parameters, such as Muon for matrices and AdamW for the rest."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.errors import LayoutError, UserError
from samestep.layout import Layout
from samestep.parallel.optimizer.kinds import Make, OptimizerKind, Shapes, kind_of


def rebuild(optimizer: Optimizer, make: Callable[..., Optimizer]) -> Optimizer:
    """Call `make(groups, **settings)` with the groups and settings of an optimizer."""
    accepted = inspect.signature(type(optimizer)).parameters  # its defaults may have further entries
    settings: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [
        {name: value for name, value in group.items() if name == "params" or name in accepted}
        for group in optimizer.param_groups
    ]
    return make(groups, **settings)


def follow(inner: Optimizer, groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> None:
    """Copy the settings, such as the learning rate, from the outer groups to an inner optimizer's groups."""
    for number, inner_group in zip(numbers, inner.param_groups, strict=True):
        inner_group.update({name: value for name, value in groups[number].items() if name != "params"})


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure given to an optimizer's `step`; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@dataclass(frozen=True, kw_only=True)
class OptimizerMember:
    """One of several optimizers, and the parameters of the whole model that it steps."""

    title: str  # for messages, such as "recipe.optimizer (torch.optim.Muon)"
    make: Make
    groups: Sequence[Shapes]  # of its parameters in the whole model
    optimizer: Optimizer | None  # None: this rank holds none of its parameters
    turn: str | None = None  # of a step in turns: the one in which it steps; None: in each

    def kind(self, layout: Layout) -> OptimizerKind:
        """Find the optimizer's kind. Raises UserError or LayoutError if its step would differ under this layout."""
        kind = kind_of(self.make, self.groups, self.title)
        if kind.draws and layout.size > 1:
            raise UserError(
                f'layout "{layout}": {self.title} draws random numbers in its step, and every rank would draw '
                "others; use layout single, or an optimizer that draws none"
            )
        apart = layout.pipeline > 1 or layout.zero or layout.tensor > 1 or layout.expert > 1
        if not kind.alone and apart:
            others = layout.replicate * layout.shard * layout.expert * layout.pipeline * layout.tensor
            raise LayoutError(
                f'layout "{layout}": {self.title} steps a parameter by what all parameters together are, of which a '
                f"rank holds a part; use dp{others}"
            )
        return kind


class Joined(Optimizer):
    """Steps every member. Group 0 has no parameters and the recipe's learning rate; the members' groups follow."""

    def __init__(self, members: Sequence[OptimizerMember], *, lr: float) -> None:
        super().__init__([{"params": [], "lr": lr}], {"lr": lr})
        self.members = members
        self._turn: str | None = None  # the turn that is taken; None: every member steps
        # The members' own dictionaries, so that a schedule that sets a rate here sets it there.
        self.param_groups += [group for optimizer in self.optimizers() for group in optimizer.param_groups]

    def optimizers(self) -> Iterator[Optimizer]:
        """The optimizers of members with parameters on this rank."""
        for member in self.members:
            if member.optimizer is not None:
                yield member.optimizer

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """Only step the members of one turn, as an optimizer may change its state even without gradients."""
        self._turn = name
        try:
            yield
        finally:
            self._turn = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for member in self.members:
            if member.optimizer is not None and (self._turn is None or member.turn in (None, self._turn)):
                member.optimizer.step()
        return loss

    def each(self, function: Callable[[OptimizerMember], Optimizer | None]) -> "Joined":
        """Replace each member's optimizer by `function(member)`; group 0, which a schedule may refer to, is kept."""
        members = [replace(member, optimizer=function(member)) for member in self.members]
        joined = Joined(members, lr=self.param_groups[0]["lr"])
        joined.param_groups[0] = self.param_groups[0]
        return joined
