"""Finds the optimizer that a recipe names by class or function, and checks its arguments."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.errors import UserError, closest
from samestep.parallel.optimizer.kinds import Shapes
from samestep.recipe import SGD, AdamW, NamedOptimizer
from samestep.tasks.registry import checked_value, find_callable, hints_of

Make = Callable[[Sequence[dict[str, Any]]], Optimizer]  # from groups of parameters with their settings

_WHAT = "a class or function such as torch.optim.Muon, package.module:function or path/to/file.py:function"


def maker_of(spec: NamedOptimizer, where: str) -> Make:
    """The function that makes the optimizer from parameter groups. `where`: the key in the recipe, for messages.

    Raises UserError if there is no such class or function, or it doesn't accept the arguments.
    """
    function = _find(spec.name, f"{where}.name")
    settings: dict[str, Any] = {
        name: value for name, value in (("lr", spec.lr), ("weight_decay", spec.weight_decay)) if value is not None
    }
    for name in ("lr", "weight_decay"):
        if name in spec.args:
            raise UserError(f"{where}.args.{name} must stand one level higher, as {where}.{name}")
    placed = {**{name: (f"{where}.{name}", value) for name, value in settings.items()}}
    placed |= {name: (f"{where}.args.{name}", value) for name, value in spec.args.items()}
    arguments = _checked(function, placed, str(spec.name))
    return partial(_made, function, arguments, where, title_of(spec))


def try_out() -> list[Shapes]:
    """The shape of a small matrix, with which an optimizer is tried before a model is built."""
    return [Shapes(settings={}, shapes=[torch.Size((4, 3))])]


def takes(spec: NamedOptimizer, argument: str, where: str) -> bool:
    """Whether an optimizer, and so its groups, accept an argument such as weight_decay."""
    parameters = _parameters(_find(spec.name, f"{where}.name"))
    return argument in parameters or _takes_any(parameters)


def _made(
    function: Callable[..., Any], arguments: dict[str, Any], where: str, shown: str, groups: Sequence[dict[str, Any]]
) -> Optimizer:
    """Make the optimizer. Raises UserError if that fails, gives no optimizer, or a group without a learning rate."""
    try:
        made = function(list(groups), **arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where} is {shown}, which can't be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Optimizer):
        raise UserError(
            f"{where} is {shown}, which gave a {type(made).__name__}; it must give a torch.optim.Optimizer"
        )
    for group in made.param_groups:
        if not _is_rate(group.get("lr")):
            raise UserError(
                f"{where} is {shown}, whose groups have no lr that a schedule could scale; give {where}.lr"
            )
    return made


def _is_rate(value: Any) -> bool:
    """Whether a value can be a learning rate."""
    try:
        return not isinstance(value, bool) and float(value) >= 0
    except (TypeError, ValueError):
        return False


def title_of(spec: AdamW | SGD | NamedOptimizer) -> str:
    """What messages and tables call an optimizer."""
    return spec.name if isinstance(spec.name, str) else getattr(spec.name, "__qualname__", str(spec.name))


def _find(name: Any, where: str) -> Callable[..., Any]:
    """Find a class or function by "package.name", "package:name" or "file.py:name"."""
    return find_callable(name, where, _WHAT, _is_optimizer)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a callable; empty if Python can't inspect it."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # not written in Python
        return {}


def _takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    return not parameters or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _checked(function: Callable[..., Any], placed: dict[str, tuple[str, Any]], shown: str) -> dict[str, Any]:
    """Check the arguments, except the parameters to step, and convert them to the function's type hints.

    `placed`: name -> (key in the recipe, value).
    """
    parameters = _parameters(function)
    hints = hints_of(function.__init__ if isinstance(function, type) else function)
    names = list(parameters)[1:]
    for name, (where, _) in placed.items():
        if name not in names and not _takes_any(parameters):
            raise UserError(f'unknown key "{where}": {shown} takes no {name}; {closest(name, names)}')
    for name in names:
        parameter = parameters[name]
        must = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if must and name not in placed:
            raise UserError(f"{shown} needs {name}; give it in args, or as lr or weight_decay")
    return {name: checked_value(value, hints.get(name), where) for name, (where, value) in placed.items()}
