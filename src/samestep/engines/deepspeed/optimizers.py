"""The optimizer of a ds_config.json as a recipe says it, where recipes have it."""

from dataclasses import fields
from typing import Any

from samestep.engines.deepspeed import config as configuration
from samestep.errors import UserError
from samestep.recipe import SGD, AdamW, NamedOptimizer, Recipe
from samestep.validation import checked

_SCHEMAS: dict[str, type[AdamW] | type[SGD]] = {"adam": AdamW, "adamw": AdamW, "sgd": SGD}
_PYTORCH_LR = 1e-3
_PYTORCH_DECAY = 0.01  # of torch.optim.AdamW; DeepSpeed's own have none

# Parameters that recipes don't have: those that change no number, and those that change none at this value.
_HARMLESS = {"torch_adam", "fused", "foreach", "fp32_optimizer_states"}
_NEUTRAL: dict[str, Any] = {"amsgrad": False, "bias_correction": True, "maximize": False, "dampening": 0}


def optimizer_of(given: configuration.Config, recipe: Recipe) -> AdamW | SGD:
    """The recipe's optimizer, or the configuration's where the recipe has the default one.

    A kind that recipes don't have is DeepSpeed's own business. Raises UserError where both say different ones.
    """
    section, mine = given.get("optimizer"), recipe.optimizer
    if isinstance(mine, NamedOptimizer):
        raise UserError(
            f'recipe.optimizer is {mine.name}, and engine "deepspeed" takes adamw or sgd; use one, or engine native'
        )
    if section is None:
        return mine
    theirs = None if _foreign(section) else _mirrored(section, recipe)
    if theirs is None and configuration.has_auto(section):
        raise UserError(
            f'the DeepSpeed configuration has optimizer {section}, whose "auto" samestep fills for an optimizer that '
            f"recipes have alone, and {_foreign(section)} is none; a value for each would do"
        )
    if recipe.optimizer != AdamW() and recipe.optimizer != theirs:
        raise UserError(
            f"recipe.optimizer is {recipe.optimizer} and the DeepSpeed configuration has optimizer {section}; "
            "leave one of them out"
        )
    return theirs or mine


def check_proof(given: configuration.Config) -> None:
    """Raise UserError for an optimizer of which one process's step is not known."""
    section = given.get("optimizer")
    if section is not None and (what := _foreign(section)):
        raise UserError(
            f"the DeepSpeed configuration has {what}, which recipes don't have, so there is no reference to hold it "
            "against; AdamW, Adam with adam_w_mode, or SGD would do, and samestep train takes it as it is"
        )


def _foreign(section: configuration.Config) -> str | None:
    """What of an optimizer recipes don't have; None where they have all of it."""
    kind, params = str(section.get("type", "")), section.get("params", {})
    schema = _SCHEMAS.get(kind.lower())
    if schema is None:
        return f"optimizer {kind}"
    if _adds_decay_to_gradient(section) and params.get("weight_decay", 0) != 0:
        return f"{kind} with adam_w_mode false and weight_decay {params['weight_decay']}"
    known = {field.name for field in fields(schema)} | {"adam_w_mode"} | _HARMLESS
    for name, value in params.items():
        if name not in known and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            return f"{kind} with {name} {value}"
    return None


def _adds_decay_to_gradient(section: configuration.Config) -> bool:
    """Adam of Kingma & Ba 2015, where AdamW decays the parameter. Without decay both are one."""
    return str(section["type"]).lower() == "adam" and section.get("params", {}).get("adam_w_mode", True) is False


def _mirrored(section: configuration.Config, recipe: Recipe) -> AdamW | SGD:
    schema = _SCHEMAS[str(section["type"]).lower()]
    mine = recipe.optimizer if isinstance(recipe.optimizer, schema) else schema()
    params = section.get("params", {})
    names = {field.name for field in fields(schema)}
    values = {
        name: getattr(mine, name) if value == "auto" else value for name, value in params.items() if name in names
    }
    # Where the configuration names none, it is that of the optimizer which DeepSpeed makes then.
    torch_decays = bool(params.get("torch_adam")) and not _adds_decay_to_gradient(section)
    defaults = {"lr": _PYTORCH_LR, "weight_decay": _PYTORCH_DECAY if torch_decays else 0.0}
    decay_all = mine.decay_all if configuration.has_auto(section) else True  # DeepSpeed makes one group of all
    return checked(schema, {**defaults, **values, "decay_all": decay_all})
