"""Puts a recipe's LoRA adapters into a task's model, and describes a model's adapters in PEFT's format."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from samestep.errors import UserError
from samestep.parallel.blocks import repeated_layers
from samestep.parallel.low_rank import adapt, adapted_layers, can_adapt
from samestep.parallel.tensor.layers import no_fast_path
from samestep.recipe import LoRA, Recipe

_NO_LAYER = "the model has no linear layer that could have an adapter"


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """The adapters of a model as PEFT's `adapter_config.json` describes them."""

    config: Mapping[str, Any]
    name: str = ""  # PEFT's name of the adapter in its modules; empty for a recipe's


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The layers that get an adapter, and the modules that are trained whole."""

    layers: Mapping[str, nn.Module] = field(default_factory=dict)
    whole: Mapping[str, nn.Module] = field(default_factory=dict)


def put_adapters(model: nn.Module, spec: LoRA) -> None:
    """Freeze a model and add adapters to its linear layers, in place, initialized from torch's generator.

    Raises UserError where a pattern matches nothing, or the model already has adapters.
    """
    choice = _chosen(model, spec)
    model.requires_grad_(False)
    for layer in choice.layers.values():
        adapt(layer, rank=spec.rank, scaling=spec.scaling, dropout=spec.dropout)
    for module in choice.whole.values():
        module.requires_grad_(True)
    no_fast_path(model)  # which reads the weights of layers without calling them


def facts_of(model: nn.Module, recipe: Recipe | None = None) -> AdapterFacts | None:
    """Describe the adapters of a model that is not spread yet; None if it has none.

    `recipe` is that of a model that `put_adapters` changed.
    """
    for module in model.modules():
        configs = vars(module).get("peft_config")
        if isinstance(configs, Mapping) and configs:
            name, config = next(iter(configs.items()))
            return AdapterFacts(config=_json(config.to_dict()), name=str(name))
    if recipe is None or recipe.adapter is None:
        return None
    spec, layers = recipe.adapter, adapted_layers(model)
    folder = recipe.model.get("folder", recipe.model.get("name"))
    whole = [name for name, _ in _matching(model, spec.also_train)]
    return AdapterFacts(
        config={
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": folder if isinstance(folder, str) else None,
            "r": spec.rank,
            "lora_alpha": spec.alpha,
            "use_rslora": spec.rank_stabilized,
            "lora_dropout": spec.dropout,
            "target_modules": list(layers),
            "modules_to_save": whole or None,
            "bias": "none",
            "fan_in_fan_out": not all(isinstance(model.get_submodule(name), nn.Linear) for name in layers),
            "inference_mode": True,
        }
    )


def _chosen(model: nn.Module, spec: LoRA) -> _Choice:
    """Choose the layers that get an adapter and the modules that are trained whole.

    Raises UserError for patterns without a match.
    """
    if adapted_layers(model) or facts_of(model) is not None:
        raise UserError(
            "recipe.adapter is given, and the task's model has adapters already; use one of them, and leave "
            "recipe.adapter out for those of the task"
        )
    able = dict(_layers(model))
    layers = _fitting(model, spec.targets, able) if spec.targets else _usual(model, able)
    whole: dict[str, nn.Module] = {}
    for pattern in spec.also_train:
        matched = dict(_matching(model, (pattern,)))
        if not any(True for module in matched.values() for _ in module.parameters()):
            names = [
                name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
            ]
            raise UserError(
                f'recipe.adapter.also_train: no module with parameters is called "{pattern}"; use names such as '
                f"{_some(names)}"
            )
        whole |= matched
    inside = [name for name in layers if any(f"{name}.".startswith(f"{outer}.") for outer in whole)]
    return _Choice(layers={name: layer for name, layer in layers.items() if name not in inside}, whole=whole)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers that can have an adapter: not those of nn.MultiheadAttention, which reads their weights."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        around = modules[name.rpartition(".")[0]] if name else None
        if can_adapt(module) and name and not isinstance(around, nn.MultiheadAttention):
            yield name, module


def _usual(model: nn.Module, able: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """The default layers: all linear ones in the repeated blocks, or without such blocks all but the last."""
    inside = {id(module) for block in repeated_layers(model) for module in block.modules()}
    chosen = {name: module for name, module in able.items() if id(module) in inside}
    chosen = chosen or dict(list(able.items())[:-1])
    if not chosen:
        raise UserError(f"recipe.adapter: {_NO_LAYER}; use a model with layers of nn.Linear, or no adapter")
    return chosen


def _fitting(model: nn.Module, patterns: Sequence[str], able: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    """The layers that match `patterns`. Raises UserError for a pattern without a match."""
    modules: dict[str, nn.Module] = {}
    for pattern in patterns:
        fitting = {name: module for name, module in able.items() if _fits(name, pattern)}
        if not fitting:
            raise UserError(f"recipe.adapter.targets: {_why_none(model, pattern, able)}; use {_some(able) or 'none'}")
        modules |= fitting
    return modules


def _why_none(model: nn.Module, pattern: str, able: Mapping[str, nn.Module]) -> str:
    """The reason why a pattern matches no layer, for a message."""
    if not able:
        return _NO_LAYER
    other = next(iter(_matching(model, (pattern,))), None)
    if other is None:
        return f'nothing in {type(model).__name__} is called "{pattern}"'
    name, module = other
    around = model.get_submodule(name.rpartition(".")[0])
    if isinstance(around, nn.MultiheadAttention):
        return f"{name} is read by the nn.MultiheadAttention around it, which does not call it"
    return f"{name} is a {type(module).__name__}, and adapters are for linear layers"


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose names match `patterns`, without the model itself."""
    for name, module in model.named_modules():
        if name and any(_fits(name, pattern) for pattern in patterns):
            yield name, module


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _some(names: Mapping[str, Any] | Sequence[str]) -> str:
    """The last components of some names, without duplicates, for a message."""
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return ", ".join([*short[:8], *(["..."] if len(short) > 8 else [])])


def _json(value: Any) -> Any:
    """Convert a value to types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_json(inner) for inner in value)
    if isinstance(value, (list, tuple)):
        return [_json(inner) for inner in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
