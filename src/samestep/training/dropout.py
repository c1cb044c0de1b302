"""Dropout switched off: what a proof needs, and what a recipe may ask for."""

from torch import nn


def switch_off(model: nn.Module) -> None:
    """Set every dropout probability of a model to zero: modules', and those kept as plain numbers.

    Attention keeps its probability as a number of its own or in the model's configuration, under names such as
    `dropout`, `attention_dropout` and `hidden_dropout_prob`.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_floats(module)
        if hasattr(module, "config"):
            _zero_floats(module.config)


def _zero_floats(holder: object) -> None:
    for name, value in vars(holder).items():
        if "drop" in name and isinstance(value, float):
            setattr(holder, name, 0.0)
