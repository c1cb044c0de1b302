"""Whether a checkpoint's training and a job's are the same one."""

from collections.abc import Mapping
from typing import Any

from samestep.errors import CheckpointError

# A training may go on for longer, with another rate or another eye on it; what it learns from, and what is saved of
# it, stays.
_MAY_CHANGE = ("steps", "epochs", "optimizer", "schedule", "clip", "precision", "dropout", "evaluation", "early_stop")
_STAYS_OF_OPTIMIZER = "optimizer.name"


def differences(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What a job's recipe says otherwise than the one that a checkpoint was saved under: a line a key."""
    if not saved:
        return []
    before, now = _flat(saved), _flat(recipe)
    return [
        f"recipe.{key} is {now.get(key)}, and was {before.get(key)}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]


def changes(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What a job changes of the recipe that a checkpoint was saved under: a line a key.

    Raises CheckpointError where it would be another training. A recipe that was not saved is nobody's.
    """
    if not saved:
        return []
    before, now = _flat(saved), _flat(recipe)
    lines: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) == now.get(key):
            continue
        line = f"recipe.{key} is {now.get(key)}, and was {before.get(key)}"
        if key == _STAYS_OF_OPTIMIZER or key.partition(".")[0] not in _MAY_CHANGE:
            raise CheckpointError(
                f"the checkpoint is of another training: {line}; set it back, or train without resuming"
            )
        lines.append(line)
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = None if value == [] else value  # as of a recipe from before there was the key
    return flat
