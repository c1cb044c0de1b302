"""The plain values that a task and its model hold: what a configuration file or a variable of the environment set.

They are no code and no data of the recipe, and a step depends on them: a weight in the loss, a rate, a switch.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, type(None))
_MOST = 1000  # values in lists and sections
_MOST_TEXT = 10_000  # characters
# Of a module: whether it trains, and where it is.
_NO_SETTINGS = ("training", "device")


def values_of(task: Any, model: nn.Module, known: Collection[Any] = ()) -> dict[str, str]:
    """Numbers as text and hashes of all else, by class and attribute, such as "Dropout.p".

    The values of the model's modules of a class count together. Left out are names of files and folders, the
    attributes of samestep's own tasks, and the values `known`, which are compared elsewhere.
    """
    held: dict[str, list[Any]] = {}
    if not type(task).__module__.startswith("samestep."):
        for name, value in _plain_in(task):
            if not any(value is each or (type(value) is type(each) and value == each) for each in known):
                held[f"{type(task).__name__}.{name}"] = [value]
    for module in model.modules():
        for name, value in _plain_in(module):
            if not name.startswith("_") and name not in _NO_SETTINGS:
                held.setdefault(f"{type(module).__name__}.{name}", []).append(value)
    return {name: _text(values) for name, values in sorted(held.items())}


def _plain_in(holder: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that are plain values: numbers, texts, and lists and sections of them."""
    for name, value in getattr(holder, "__dict__", {}).items():
        if _count(value) <= _MOST:
            yield name, value


def _count(value: Any) -> int:
    """How many plain values are in a value; more than any limit where something else is."""
    if isinstance(value, _PLAIN):
        return 1
    if isinstance(value, str):
        return _MOST + 1 if len(value) > _MOST_TEXT or _names_a_file(value) else 1
    # A library's own sequence may have no length, or take long for it, as e3nn's lists of representations do.
    if type(value) in (list, tuple) and len(value) <= _MOST:
        return 1 + sum(map(_count, value))
    if type(value) in (dict, OrderedDict) and len(value) <= _MOST:
        return 1 + sum(_count(key) + _count(each) for key, each in value.items())
    return _MOST + 1


def _names_a_file(text: str) -> bool:
    if "/" in text or "\\" in text:
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _text(values: list[Any]) -> str:
    """A number that all have, or a hash: a text may be a secret."""
    if isinstance(values[0], _PLAIN) and all(repr(value) == repr(values[0]) for value in values):
        return repr(values[0])[:80]
    return f"#{hashlib.sha256(repr(values).encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def changed_values(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What of the values that both know isn't the same, in words."""
    return tuple(
        f"{name} is another" if "#" in value + before[name] else f"{name} is {value}, and was {before[name][:80]}"
        for name, value in now.items()
        if before.get(name, value) != value
    )
