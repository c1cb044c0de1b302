"""Roles: which linears and tables of a model are sliced by columns, by rows or by the vocabulary; given or found."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeGuard, get_args

from torch import nn

from samestep.errors import LayoutError
from samestep.job import TensorRole
from samestep.parallel.low_rank import adapted
from samestep.parallel.tensor.kinds import is_embedding, is_linear, is_multihead, out_features

Role = TensorRole

# What transformers calls the roles. Its others are for what it can't slice, or no linear, and say nothing here.
_TRANSFORMERS: Mapping[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",
    "embedding_rowwise": "vocabulary",
}


def named(model: nn.Module, given: Mapping[str, str]) -> dict[str, Role]:
    """The roles that a user's plan (name or pattern -> role) gives to modules.

    Raises LayoutError for a pattern without a module, and for a role that is none or can't be the module's.
    """
    roles: dict[str, Role] = {}
    for pattern, role in given.items():
        if not _is_role(role):
            raise LayoutError(f'run.tensor_plan: {pattern} is "{role}"; it can be {", ".join(get_args(Role))}')
        matches = {name: can_be(module) for name, module in model.named_modules() if fnmatchcase(name, pattern)}
        fitting = [name for name, able in matches.items() if role in able]
        if not any(matches.values()):
            raise LayoutError(
                f'run.tensor_plan: the model has no linear layer, table or attention called "{pattern}"; '
                f"it has {', '.join(_some_names(model))}"
            )
        if not fitting:
            name, able = next((name, able) for name, able in matches.items() if able)
            kind = type(model.get_submodule(name)).__name__
            raise LayoutError(f'run.tensor_plan: {name} ({kind}) can\'t be "{role}"; it can be {", ".join(able)}')
        for name in fitting:
            roles[name] = role
    return roles


def of_transformers(model: nn.Module, vocabulary: int | None) -> dict[str, Role]:
    """The roles in the plan that a transformers model brings; empty for models that bring none."""
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    roles: dict[str, Role] = {}
    for name, module in model.named_modules():
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        role = _TRANSFORMERS.get(styles[-1]) if styles else None
        if role == "vocabulary" and is_linear(module) and out_features(module) != vocabulary:
            role = None  # a projection whose output is gathered at once
        if role is not None and role in can_be(module):
            roles[name] = role
    return roles


def can_be(module: nn.Module) -> tuple[Role, ...]:
    """The roles that a module can have; none for what has no weight to slice."""
    if adapted(module) is not None:
        return ("column", "row", "whole")
    if is_linear(module):
        return get_args(Role)
    if is_embedding(module):
        return ("vocabulary", "whole")
    if is_multihead(module):
        return ("column", "whole")
    return ()


def _is_role(value: str) -> TypeGuard[Role]:
    return value in get_args(Role)


def _some_names(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if can_be(module)]
    return [*names[:5], *(["..."] if len(names) > 5 else [])]
