"""Hyperparameters of a SageMaker job, as its toolkit passes them, laid over the job file's values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.errors import UserError
from samestep.synonyms import meaning_of
from samestep.variables import Variables

# Names under which tuning jobs and notebooks know these keys.
_ALSO = {
    "learning_rate": "recipe.optimizer.lr",
    "batch_size": "recipe.batch",
    "momentum": "recipe.optimizer.momentum",
}

# What SageMaker adds for itself.
_THEIRS = ("sagemaker_", "_tuning")


def overrides(environ: Mapping[str, str], flags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return dotted key, value and source of each hyperparameter in SM_HPS; empty if it is not set.

    A name is a dotted key (recipe.optimizer.lr), a flag of the command line (layout, micro-batch: `flags` has their
    keys), or a key of the recipe or its optimizer alone (seed, lr); dashes and underscores are the same. Raises
    UserError for any other name.
    """
    values: dict[str, tuple[str, str, str]] = {}
    names = _names(flags)
    for name, value in _given(environ).items():
        if name.startswith(_THEIRS):
            continue
        key = _key(name, names)
        if key in values:
            raise UserError(f"{values[key][2]} and hyperparameter {name} both set {key}; keep one of them")
        values[key] = (key, value if isinstance(value, str) else json.dumps(value), f"hyperparameter {name}")
    return list(values.values())


def without(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Remove from a command line the hyperparameters that SageMaker has appended: SM_HPS holds them all.

    With a -- in the command line nothing is removed: what follows it is another program's command.
    """
    user_args = Variables(environ).json("SM_USER_ARGS", list, 'a list such as ["--lr","1e-3"]') or []
    words = [str(word) for word in user_args]
    if words and "--" not in arguments and list(arguments[-len(words) :]) == words:
        return list(arguments[: -len(words)])
    return list(arguments)


def _given(environ: Mapping[str, str]) -> dict[str, Any]:
    return Variables(environ).json("SM_HPS", dict, 'a mapping such as {"lr": 1e-3}') or {}


def _names(flags: Mapping[str, str]) -> dict[str, str]:
    """Map each short name to its dotted key."""
    from dataclasses import fields

    from samestep.recipe import AdamW, Recipe

    recipe = {field.name: f"recipe.{field.name}" for field in fields(Recipe)}
    optimizer = {field.name: f"recipe.optimizer.{field.name}" for field in fields(AdamW) if field.name != "name"}
    return {**_ALSO, **optimizer, **recipe, **{flag.replace("-", "_"): key for flag, key in flags.items()}}


def _key(name: str, names: Mapping[str, str]) -> str:
    from samestep.validation import closest

    plain = name.replace("-", "_")
    if plain.startswith(("recipe.", "run.")):
        return plain
    if plain not in names:
        meaning = meaning_of(name)
        instead = meaning.as_key() if meaning is not None else closest(plain, names)
        raise UserError(f"hyperparameter {name}: {instead}, or a dotted key such as recipe.data.source")
    return names[plain]
