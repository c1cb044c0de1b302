"""An optimizer's state as pieces, by the names of the parameters that it belongs to, and back into an optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.parts import Entry, Parts
from samestep.parallel.pieces import Piece, piece_of, whole_piece

OPTIMIZER = "optimizer."


def optimizer_pieces(optimizer: Optimizer, model: nn.Module, parts: Parts) -> dict[str, Piece]:
    """What this rank holds of an optimizer's state: `optimizer.<parameter>.<key>`.

    Raises UserError for state that isn't a tensor.
    """
    inner = _innermost(optimizer)
    pieces: dict[str, Piece] = {}
    for name, parameter in model.named_parameters():
        for key, value in inner.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise UserError(
                    f"a checkpoint can't hold {key} of {type(inner).__name__}, which is a {type(value).__name__}; "
                    "an optimizer whose state is tensors, such as AdamW or SGD, would do"
                )
            pieces[f"{OPTIMIZER}{name}.{key}"] = _piece(name, parameter, key, value, parts)
    return pieces


def _piece(name: str, parameter: nn.Parameter, key: str, value: Tensor, parts: Parts) -> Piece:
    """State of a parameter's shape is cut as the parameter is; other state is every rank's, such as a count."""
    whole = parts.parameters[name].shape
    if value.shape == parameter.shape and value.ndim:
        return piece_of(value, parts.part(name), whole)
    if value.ndim and parameter.shape != whole:
        raise UserError(
            f"a checkpoint can't hold {key} of {name}: it has shape {tuple(value.shape)}, the parameter "
            f"{tuple(parameter.shape)}, so what it is in the whole model is not known; layout single or dp would do"
        )
    return whole_piece(value)


class OptimizerToFill:
    """An optimizer that is to get its state from a checkpoint, read into `pieces` first."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, parts: Parts, saved: Mapping[str, Entry]) -> None:
        self._optimizer = _innermost(optimizer)
        self._state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.pieces: dict[str, Piece] = {}
        names = {parameter: name for name, parameter in model.named_parameters()}
        keys = _keys(saved)
        for parameter in self._parameters():
            name = names[parameter]
            for key in keys.get(name, ()):
                full_name = f"{OPTIMIZER}{name}.{key}"
                entry = saved[full_name]
                value = _empty(parameter, entry, parts.parameters[name])
                self._state.setdefault(parameter, {})[key] = value
                self.pieces[full_name] = _piece(name, parameter, key, value, parts)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def fill(self) -> None:
        """Give the optimizer what was read, and leave its groups' settings as they are."""
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        groups: list[dict[str, Any]] = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        state = {numbers[parameter]: values for parameter, values in self._state.items()}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


def _innermost(optimizer: Any) -> Optimizer:
    while hasattr(optimizer, "optim"):  # ZeroRedundancyOptimizer keeps the one of its part there
        optimizer = optimizer.optim
    return optimizer


def _keys(saved: Mapping[str, Entry]) -> dict[str, list[str]]:
    """The keys of the state that was saved, by parameter."""
    keys: dict[str, list[str]] = {}
    for full_name in saved:
        if full_name.startswith(OPTIMIZER):
            name, _, key = full_name.removeprefix(OPTIMIZER).rpartition(".")
            keys.setdefault(name, []).append(key)
    return keys


def _empty(parameter: nn.Parameter, saved: Entry, whole: Entry) -> Tensor:
    if saved.shape == whole.shape and len(saved.shape):
        return torch.zeros_like(parameter.detach(), dtype=saved.dtype)
    return torch.zeros(saved.shape, dtype=saved.dtype)
