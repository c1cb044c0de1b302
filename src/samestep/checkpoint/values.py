"""What a task and its model hold: what a configuration file, a variable of the environment or an argument chose.

It is no code and no data of the recipe, and a step depends on it: a weight in the loss, a rate, a switch, an
activation function, the class of a module.
"""

import hashlib
import inspect
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from samestep.torch_internals.modules import own_children

_PLAIN = (bool, int, float, type(None))
_MOST = 1000  # values in lists and sections
_MOST_TEXT = 10_000  # characters
_MOST_DEEP = 4  # configurations in configurations
_MOST_NUMBERED = 20  # children of one sequence that are told apart
# Of a module: whether it trains, and where it is. Of a configuration of transformers: who wrote it, and what a model
# finds in its first batch.
_NO_SETTINGS = ("training", "device", "transformers_version", "problem_type")


@dataclass(frozen=True)
class _Name:
    """The name of a class or a function, which stands for it."""

    text: str

    def __repr__(self) -> str:
        return self.text


def values_of(task: Any, model: nn.Module, excluded: Collection[Any] = ()) -> dict[str, str]:
    """Numbers and names as text and hashes of all else, by class and attribute, such as "Dropout.p".

    The values of the model's modules of a class count together. The class of a module stands at its place in the
    model, such as "blocks.*.act". Left out are names of files and folders, the plain values of samestep's own tasks,
    and the values `excluded`, which are compared elsewhere.
    """
    held: dict[str, list[Any]] = {}
    seen: set[int] = set()
    ours = type(task).__module__.startswith("samestep.")
    for name, value in _settings_in(task, seen):
        if ours and ("." in name or not (value is None or isinstance(value, _Name))):
            continue
        if not any(value is other or (type(value) is type(other) and value == other) for other in excluded):
            held[f"{type(task).__name__}.{name.lstrip('_') if ours else name}"] = [value]
    for module in model.modules():
        for name, value in _settings_in(module, seen):
            if not name.startswith("_"):
                held.setdefault(f"{type(module).__name__}.{name}", []).append(value)
    for place, kind in _classes_in(model):
        held.setdefault(place, []).append(kind)
    return {name: _text(values) for name, values in sorted(held.items())}


def _settings_in(holder: Any, seen: set[int], deep: int = 0) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that are plain values, functions, or configurations, whose own are named as well.

    Plain are numbers, texts, and lists and sections of them. `seen`: the configurations that were named, each once,
    where it is first held: a model's modules share one.
    """
    for name, value in getattr(holder, "__dict__", {}).items():
        if name in _NO_SETTINGS:
            continue
        if isinstance(value, partial):
            yield from (
                (f"{name}.{key}", argument) for key, argument in value.keywords.items() if _count(argument) <= _MOST
            )
        if (function := _function(value)) is not None:
            yield name, function
        elif _is_configuration(value):
            if deep < _MOST_DEEP and id(value) not in seen:
                seen.add(id(value))
                inner = _settings_in(value, seen, deep + 1)
                yield from ((f"{name}.{key}", setting) for key, setting in inner if not key.startswith("_"))
        elif _count(value) <= _MOST:
            yield name, value


def _function(value: Any) -> _Name | None:
    """The name of a function, also of one that another wraps."""
    while isinstance(value, partial) or "__wrapped__" in getattr(value, "__dict__", {}):
        value = value.func if isinstance(value, partial) else value.__wrapped__
    if not inspect.isroutine(value):
        return None
    # PyTorch's own are methods of a hidden class.
    return _Name(value.__name__ if inspect.isbuiltin(value) else getattr(value, "__qualname__", value.__name__))


def _is_configuration(value: Any) -> bool:
    """Whether an object is there to hold settings: a dataclass, a namespace, a configuration of transformers."""
    if isinstance(value, (type, nn.Module, Mapping)):
        return False
    is_record = is_dataclass(value) or isinstance(value, (SimpleNamespace, Namespace))
    return is_record or any(callable(getattr(type(value), name, None)) for name in ("to_dict", "model_dump"))


def _classes_in(model: nn.Module, place: str = "") -> Iterator[tuple[str, _Name]]:
    """The class of each module by its place, in which layers of a list or a long sequence have no number.

    A parameter that a module holds itself has none; it counts with the checkpoint's tensors.
    """
    numbered = not isinstance(model, nn.ModuleList) and len(own_children(model)) <= _MOST_NUMBERED
    for name, child in model.named_children():
        below = f"{place}{name if numbered or not name.isdigit() else '*'}"
        yield below, _Name(type(child).__name__)
        yield from _classes_in(child, f"{below}.")


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
        return 1 + sum(_count(key) + _count(item) for key, item in value.items())
    return _MOST + 1


def _names_a_file(text: str) -> bool:
    if "/" in text or "\\" in text:
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _text(values: list[Any]) -> str:
    """A number or a name that all have, or a hash: a text may be a secret."""
    if isinstance(values[0], (*_PLAIN, _Name)) and all(repr(value) == repr(values[0]) for value in values):
        return repr(values[0])[:80]
    return f"#{hashlib.sha256(repr(values).encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def changed_values(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """What of the values that both know isn't the same, in words."""
    return tuple(
        f"{name} is another" if "#" in value + before[name] else f"{name} is {value}, and was {before[name][:80]}"
        for name, value in now.items()
        if before.get(name, value) != value
    )
