"""Shards of a training's state: boxes of parameters and optimizer state with their offsets in the whole tensor.

A checkpoint is a set of (name, offsets, values): each rank writes its boxes, and reads the parts of saved boxes that
overlap its own. Names and offsets are the whole model's, so the layouts of writer and reader need not agree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.optimizer.joined import Joined
from samestep.parallel.optimizer.master_weights import MasterWeights
from samestep.parallel.optimizer.offloaded import OffloadedOptimizer
from samestep.parallel.optimizer.whole import LocalOptimizer, WholeOptimizer
from samestep.parallel.sharding import Entry, Part, ShardTable, local, places_of

MODEL = "model."


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]  # in the whole tensor
    values: Tensor  # a view of this rank's memory


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a tensor that a rank holds."""

    shape: torch.Size  # of the whole
    dtype: torch.dtype
    boxes: Sequence[Box]


def whole_piece(tensor: Tensor) -> Piece:
    """The piece of an unsharded tensor."""
    return piece_of(tensor, Part(), tensor.shape)


def piece_of(tensor: Tensor, part: Part, shape: torch.Size, memory: Tensor | None = None) -> Piece:
    """The piece that a rank's tensor holds of a whole tensor of this shape.

    `memory`: values in place of the tensor's, such as the optimizer state of a shard.
    """
    memory = local(tensor.detach()) if memory is None else memory
    boxes = [Box(offsets=place.offsets, values=memory[place.memory]) for place in places_of(tensor, part, shape)]
    return Piece(shape=shape, dtype=memory.dtype, boxes=boxes)


def model_pieces(model: nn.Module, parts: ShardTable) -> dict[str, Piece]:
    """This rank's pieces of the model: `model.<name>` for every parameter once, and every persistent buffer."""
    return {
        MODEL + name: piece_of(tensor, parts.part(name), entry.shape) for name, entry, tensor in _held(model, parts)
    }


def model_entries(parts: ShardTable) -> dict[str, Entry]:
    """The whole model's tensors, by the same names."""
    return {MODEL + name: entry for name, entry in {**parts.buffers(), **parts.parameters}.items()}


def _held(model: nn.Module, parts: ShardTable) -> Iterator[tuple[str, Entry, Tensor]]:
    """Yield (name, entry of the whole model, this rank's tensor) of parameters and buffers."""
    values: Mapping[str, Any] = {**model.state_dict(), **dict(model.named_parameters())}
    for name, entry in {**parts.parameters, **parts.buffers()}.items():
        if parts.holds(name):
            yield name, entry, values[name]


OPTIMIZER = "optimizer."

# Types of Python numbers in an optimizer's state, and the dtypes with which they are saved.
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}


@dataclass(frozen=True, kw_only=True)
class _Stepped:
    """The tensors that an optimizer steps, with their names and the parameters of the model."""

    optimizer: Optimizer
    names: Mapping[Tensor, str]
    held: Mapping[Tensor, nn.Parameter]  # empty for a WholeOptimizer, whose state is unsharded


def innermost(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers, inside of wrappers, that hold this rank's optimizer state."""
    if isinstance(optimizer, Joined):
        for member in optimizer.optimizers():
            yield from innermost(member)
    elif isinstance(optimizer, WholeOptimizer):
        yield from (inner for inner, _ in optimizer.owned())
    elif isinstance(optimizer, LocalOptimizer):
        if optimizer.inner is not None:
            yield optimizer.inner
    elif hasattr(optimizer, "optim"):  # ZeroRedundancyOptimizer keeps the one of its part there
        yield from innermost(optimizer.optim)
    else:
        yield optimizer


def _stepped(optimizer: Any, model: nn.Module) -> Iterator[_Stepped]:
    """Yield all optimizers with state on this rank, with the names of the parameters that they step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    if isinstance(optimizer, Joined):
        for member in optimizer.optimizers():
            yield from _stepped(member, model)
    elif isinstance(optimizer, WholeOptimizer):
        for inner, owned in optimizer.owned():
            yield _Stepped(optimizer=inner, names=owned, held={})
    elif isinstance(optimizer, LocalOptimizer):
        if optimizer.inner is not None:
            held = optimizer.stepped()
            of_shards = {shard: names[parameter] for shard, parameter in held.items()}
            yield _Stepped(optimizer=optimizer.inner, names=of_shards, held=held)
    elif hasattr(optimizer, "optim"):
        yield from _stepped(optimizer.optim, model)
    else:
        yield _Stepped(
            optimizer=optimizer, names=names, held={parameter: parameter for parameter in model.parameters()}
        )


def optimizer_pieces(optimizer: Optimizer, model: nn.Module, parts: ShardTable) -> dict[str, Piece]:
    """This rank's pieces of an optimizer's state: `optimizer.<parameter>.<key>`.

    Raises UserError for state that is neither a tensor nor a number.
    """
    pieces: dict[str, Piece] = {}
    for some in _stepped(optimizer, model):
        for stepped, name in some.names.items():
            for key, value in some.optimizer.state.get(stepped, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    key, value = _saved_number(some.optimizer, key, value)
                pieces[f"{OPTIMIZER}{name}.{key}"] = _piece(name, some.held.get(stepped), key, value, parts)
    return pieces


def _saved_number(optimizer: Optimizer, key: str, value: Any) -> tuple[str, Tensor]:
    """Convert a Python number to a tensor, with its type appended to the key."""
    for kind, (of, dtype) in _NUMBERS.items():
        if type(value) is of:
            return f"{key}#{kind}", torch.tensor(value, dtype=dtype)
    raise UserError(
        f"a checkpoint can't hold {key} of {type(optimizer).__name__}, which is a {type(value).__name__}; use "
        "an optimizer whose state is tensors and numbers, such as AdamW or SGD"
    )


def _piece(name: str, parameter: nn.Parameter | None, key: str, value: Tensor, parts: ShardTable) -> Piece:
    """The piece of a state tensor: sharded like the parameter if it has its shape, otherwise whole, such as a count.

    `parameter`: None for a whole parameter.
    """
    if parameter is None:
        return whole_piece(value)
    whole = parts.parameters[name].shape
    if value.ndim and value.shape == parameter.shape:
        return piece_of(value, parts.part(name), whole)
    if value.ndim and value.shape == local(parameter.detach()).shape:
        return piece_of(parameter, parts.part(name), whole, memory=local(value.detach()))
    if value.ndim and parameter.shape != whole:
        raise UserError(
            f"a checkpoint can't hold {key} of {name}: it has shape {tuple(value.shape)}, the parameter "
            f"{tuple(parameter.shape)}, so what it is in the whole model is not known; use layout single or dp"
        )
    return whole_piece(value)


class OptimizerToFill:
    """Loads an optimizer's state from a checkpoint.

    In three steps: allocate state in the shapes of the saved one (`pieces`), let the checkpoint's reader fill it in
    place, and pass it to the optimizers' `load_state_dict` (`fill`).
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, parts: ShardTable, saved: Mapping[str, Entry]) -> None:
        self._filled: list[tuple[Optimizer, dict[Tensor, dict[str, Tensor]]]] = []
        self.pieces: dict[str, Piece] = {}
        keys = _keys(saved)
        for some in _stepped(optimizer, model):
            states: dict[Tensor, dict[str, Tensor]] = {}
            for parameter in _parameters(some.optimizer):
                name, held = some.names[parameter], some.held.get(parameter)
                for key in keys.get(name, ()):
                    full_name = f"{OPTIMIZER}{name}.{key}"
                    # The state of these is that of local copies, not of DTensors.
                    copies = isinstance(some.optimizer, (OffloadedOptimizer, MasterWeights))
                    like = local(parameter.detach()) if copies else parameter.detach()
                    value = _empty(like, held, saved[full_name], parts.parameters[name])
                    states.setdefault(parameter, {})[key] = value
                    self.pieces[full_name] = _piece(name, held, key, value, parts)
            self._filled.append((some.optimizer, states))

    def fill(self) -> None:
        """Pass the state to the optimizers, without changing their groups' settings."""
        for optimizer, states in self._filled:
            numbers: dict[Tensor, int] = {
                parameter: number for number, parameter in enumerate(_parameters(optimizer))
            }
            groups: list[dict[str, Any]] = [
                {**group, "params": [numbers[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]
            state = {
                numbers[parameter]: dict(_restored(key, value) for key, value in values.items())
                for parameter, values in states.items()
            }
            kept = optimizer.param_groups  # wrappers and schedules refer to these groups
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            optimizer.param_groups = kept


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _restored(key: str, value: Tensor) -> tuple[str, Any]:
    """Convert a saved tensor back to a Python number if its key says so."""
    name, _, kind = key.partition("#")
    return (name, _NUMBERS[kind][0](value.item())) if kind in _NUMBERS else (key, value)


def _keys(saved: Mapping[str, Entry]) -> dict[str, list[str]]:
    """The keys of the saved state, by parameter."""
    keys: dict[str, list[str]] = {}
    for full_name in saved:
        if full_name.startswith(OPTIMIZER):
            name, _, key = full_name.removeprefix(OPTIMIZER).rpartition(".")
            keys.setdefault(name, []).append(key)
    return keys


def _empty(stepped: Tensor, held: nn.Parameter | None, saved: Entry, whole: Entry) -> Tensor:
    """Allocate a state tensor: sharded like the stepped tensor if it has the parameter's shape, otherwise whole."""
    if held is not None and saved.shape == whole.shape and len(saved.shape):
        # For a DTensor, a DTensor with the same shards.
        return torch.zeros_like(stepped, dtype=saved.dtype)
    return torch.zeros(saved.shape, dtype=saved.dtype)
