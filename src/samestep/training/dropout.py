"""Dropout switched off: what a proof needs, and what a recipe may ask for."""

import copy
from typing import Any

from torch import nn


def switch_off(model: nn.Module) -> None:
    """Set every dropout probability of a model to zero: modules', and those kept as plain numbers.

    Attention keeps its probability as a number of its own or in the model's configuration, under names such as
    `dropout`, `attention_dropout` and `hidden_dropout_prob`. A task may make its next model of the same
    configuration, so the modules get a copy of it.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_floats(module)
        config = getattr(module, "config", None)
        if config is None or isinstance(config, nn.Module):
            continue
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            _zero_floats(copies[id(config)])
        vars(module)["config"] = copies[id(config)]


def _zero_floats(holder: Any) -> None:
    """Set what is called dropout in an object or a dictionary; also where its class lets nobody set anything."""
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    for name, value in values.items():
        if "drop" in str(name) and isinstance(value, float):
            values[name] = 0.0
