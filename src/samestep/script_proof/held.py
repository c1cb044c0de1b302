"""Weights that no optimizer holds: averages, teachers, snapshots, in modules, mappings or lists of the script.

They are found among the objects of the process, by the names and shapes of the parameters of a trained model.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.recording import shards
from samestep.torch_internals.modules import own_parameters
from samestep.torch_internals.sharded import local_part

_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
_LEAST = 2  # tensors that are a copy
_Named = list[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One tensor of a copy."""

    name: str  # of the copy, and the parameter's
    value: Tensor


_EACH = 16  # steps in which copies are looked for one by one; later in each of so many


class HeldWeights:
    """Finds copies of the trained models' weights."""

    def __init__(self) -> None:
        # What was imported before the script's first line is no copy, and isn't looked through again and again.
        gc.freeze()

    def looks(self, number: int) -> bool:
        """Whether copies are looked for before a step, counted from 0."""
        return number < _EACH or number % _EACH == 0

    def find(self, models: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> list[HeldTensor]:
        """Return the tensors of all copies of models that an optimizer trains; none where these are sharded."""
        held = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        models = {name: model for name, model in models.items() if any(id(one) in held for one in model.parameters())}
        trained = {
            name: tensor for model in models.values() for name, tensor in _parameters(model) if _is_plain(tensor)
        }
        if len(trained) < _LEAST:
            return []
        taken = {_address(tensor) for tensor in _tensors_in_use(trained.values(), optimizers)}
        own = {id(module) for model in models.values() for module in model.modules()}
        new_tensors: list[HeldTensor] = []
        labels: dict[str, int] = {}
        for holder, tensors in _candidates(trained, own):
            new = [(name, value) for name, value in tensors if _address(value) not in taken]
            if len(new) < _LEAST or len(new) < len(tensors):
                continue
            taken |= {_address(value) for _, value in new}
            label = _label(holder)
            labels[label] = labels.get(label, 0) + 1
            place = label + (f" {labels[label]}" if labels[label] > 1 else "")
            new_tensors += [HeldTensor(name=f"{place}/{name}", value=value) for name, value in new]
        return new_tensors


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in shards.named_modules(model):
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                yield f"{name}.{key}" if name else key, parameter


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.itemsize


def _tensors_in_use(trained: Any, optimizers: Sequence[Any]) -> Iterator[Tensor]:
    """Parameters, their gradients, and what optimizers hold."""
    for parameter in trained:
        yield parameter
        if isinstance(parameter.grad, Tensor):
            yield parameter.grad
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with numbers, by its type: proxies say that they are of other classes."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta


def _candidates(trained: Mapping[str, Tensor], own: set[int]) -> Iterator[tuple[Any, _Named]]:
    """Yield the objects that may hold a copy, with its tensors: modules first, the largest before others."""
    objects = gc.get_objects()
    modules = []
    for object_ in objects:
        if issubclass(type(object_), nn.Module) and id(object_) not in own and "_parameters" in vars(object_):
            tensors = _matching(_parameters(object_), trained)
            if tensors is not None:
                modules.append((object_, tensors))
    yield from sorted(modules, key=lambda pair: -len(pair[1]))
    shapes = [tuple(value.shape) for value in trained.values()]
    for object_ in objects:
        if type(object_) in (list, tuple) and len(object_) == len(shapes) and all(map(_is_plain, object_)):
            if [tuple(value.shape) for value in object_] == shapes:
                yield object_, list(zip(trained, object_, strict=True))
        # By dict's own methods: those of a subclass may do work, such as importing all of transformers' models.
        elif issubclass(type(object_), dict) and 2 * dict.__len__(object_) >= len(shapes):
            items = list(dict.items(object_))
            named = ((key, value) for key, value in items if type(key) is str and _is_plain(value))
            tensors = _matching(named, trained)
            if tensors is not None:
                yield object_, tensors


def _matching(tensors: Iterator[tuple[str, Tensor]], trained: Mapping[str, Tensor]) -> _Named | None:
    """Return the tensors that have names and shapes of trained parameters; None if they are less than half."""
    alike = []
    for name, value in tensors:
        plain = _plain_name(name)
        if plain in trained and _is_plain(value) and value.shape == trained[plain].shape:
            alike.append((plain, value))
    return alike if len(alike) >= _LEAST and 2 * len(alike) >= len(trained) else None


def _plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _label(holder: Any) -> str:
    """What to call a copy: a module's class, or the attribute that holds a mapping or a list."""
    if isinstance(holder, nn.Module):
        return type(holder).__name__
    for referrer in gc.get_referrers(holder):
        attributes = referrer if type(referrer) is dict else getattr(referrer, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        for key, value in list(attributes.items()):
            if value is holder and isinstance(key, str) and key.isidentifier() and not key.startswith("__"):
                return f"{_owner(referrer)}{key}"
    return type(holder).__name__


def _owner(referrer: Any) -> str:
    """The class of the object to which a dictionary of attributes belongs, and a dot."""
    if type(referrer) is not dict:
        return f"{type(referrer).__name__}."
    for other in gc.get_referrers(referrer):
        if (
            getattr(other, "__dict__", None) is referrer
            and not isinstance(other, type)
            and hasattr(other, "__class__")
        ):
            name = type(other).__name__
            return "" if name == "module" else f"{name}."
    return ""


class Changes:
    """Which parameters have changed since an optimizer's step."""

    def __init__(self) -> None:
        self._after: dict[int, tuple[float, float]] = {}

    def noted(self, parameters: Sequence[Tensor]) -> None:
        """Remember parameters after a step."""
        self._after |= {id(parameter): _fingerprint(parameter) for parameter in parameters}

    def since(self, parameters: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Return the names of parameters that are others than after the last step."""
        return [
            name
            for name, parameter in parameters
            if id(parameter) in self._after and self._after[id(parameter)] != _fingerprint(parameter)
        ]


def _fingerprint(parameter: Tensor) -> tuple[float, float]:
    value = local_part(parameter).detach().double()
    return value.sum().item(), value.square().sum().item()
