"""The optimizers of a loop of one's own, which were made before its model was spread."""

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.joined_optimizer import Joined, Member
from samestep.parallel.offload_optimizer import BY_NUMBER
from samestep.parallel.optimizer_kinds import Shapes


class OwnOptimizers:
    """Optimizers of the whole model's parameters; called with those that a rank then holds, it gives one of them."""

    def __init__(self, given: Optimizer | Sequence[Optimizer], model: nn.Module) -> None:
        self._given = [given] if isinstance(given, Optimizer) else list(given)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        seen: set[str] = set()
        self._names: list[list[list[str]]] = []
        for optimizer in self._given:
            held = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
            if unknown := sum(name is None for group in held for name in group):
                raise UserError(f"session.prepare: the optimizer has {unknown} parameters that the model has not")
            known = [[name for name in group if name is not None] for group in held]
            for name in (name for group in known for name in group):
                if name in seen:
                    raise UserError(f"session.prepare: two optimizers have {name}; give each parameter to one")
                seen.add(name)
            self._names.append(known)
        self._shapes = shapes

    def __call__(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> Optimizer:
        """Point the optimizers' groups to the parameters that now stand under the same names."""
        now = dict(parameters)
        members = []
        for optimizer, names in zip(self._given, self._names, strict=True):
            settings = [{n: v for n, v in group.items() if n != "params"} for group in optimizer.param_groups]
            for group, held in zip(optimizer.param_groups, names, strict=True):
                group["params"] = [now[name] for name in held if name in now]  # a pipeline's rank holds some of them
            whole = [
                Shapes(settings=each, shapes=[self._shapes[name] for name in held])
                for each, held in zip(settings, names, strict=True)
                if held
            ]
            title = f"the optimizer {type(optimizer).__name__}"
            members.append(Member(title=title, make=partial(_again, optimizer), groups=whole, optimizer=optimizer))
        (first, *others) = self._given
        if not others and type(first) in BY_NUMBER:
            return first
        return Joined(members, lr=float(first.param_groups[0].get("lr", 0.0)))


def _again(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and settings, of other parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings: dict[str, Any] = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        return type(optimizer)(list(groups), **settings)  # pyright: ignore[reportCallIssue]
    except TypeError as error:
        raise UserError(
            f"session.prepare: another {type(optimizer).__name__} can't be made of its defaults: {error}; keep what "
            "it takes in its defaults"
        ) from error


def no_schedule(optimizer: Optimizer) -> None:
    """A loop of one's own advances its schedule itself."""
