"""Base: the frozen parameters of a model, which a checkpoint of its trained ones leaves out and is told apart by."""

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.parallel.state_shards import MODEL, Piece

_LOOKED_AT = 16  # numbers of each parameter


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a checkpoint does not hold, since no step changes it."""

    left_out: tuple[str, ...]  # names of parameters
    fingerprint: str  # of some numbers of each
    # What PEFT's adapter_config.json says of the model's adapters, and the name that PEFT has for them; empty where
    # it has none.
    adapter: Mapping[str, Any] = field(default_factory=dict)
    adapter_name: str = ""


def base_of_json(values: Mapping[str, Any]) -> Base:
    """A base as a checkpoint's info has it. Raises TypeError or KeyError where it is none."""
    return Base(**{**values, "left_out": tuple(values["left_out"])})


def fingerprint(pieces: Mapping[str, Piece], names: Collection[str], group: dist.ProcessGroup | None = None) -> str:
    """A sum over 16 numbers of each of some parameters, in float32, evenly spaced over the whole parameter.

    It is the same however ranks hold the parameters. `pieces` are those of this rank, `model.<name>` among them;
    every rank of the group, which is on the CPU, must ask. Without a group this process holds everything.
    """
    looks: list[Tensor] = []
    for name in sorted(names):
        found = torch.full((_LOOKED_AT,), -math.inf)
        piece = pieces.get(MODEL + name)
        if piece is not None:
            _look(piece, found)
        looks.append(found)
    values = torch.cat(looks) if looks else torch.zeros(0)
    if group is not None and looks:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)  # what a rank does not hold is -inf there
    text = "\n".join(sorted(names)).encode()
    return hashlib.sha256(text + values.numpy().tobytes()).hexdigest()


def _look(piece: Piece, found: Tensor) -> None:
    """Put what this rank holds of the numbers that are looked at into `found` [16]."""
    total = piece.shape.numel()
    for place in range(min(_LOOKED_AT, total)):
        flat = place * (total - 1) // max(1, min(_LOOKED_AT, total) - 1)
        index = [int(each) for each in torch.unravel_index(torch.tensor(flat), piece.shape)] if piece.shape else []
        for box in piece.boxes:
            inner = [at - first for at, first in zip(index, box.offsets, strict=True)]
            if all(0 <= at < size for at, size in zip(inner, box.values.shape, strict=True)):
                value = box.values[tuple(inner)]
                value = value.real if value.is_complex() else value
                found[place] = torch.nan_to_num(value.detach().float().cpu())


def check_base(base: Base, names: Collection[str], found: str, where: Any) -> None:
    """Raise CheckpointError unless a model's parameters, of these names and this fingerprint, are those of a base."""
    for name in base.left_out:
        if name not in names:
            raise CheckpointError(f"checkpoint {where} leaves out {name}, and the job's model has no such parameter")
    if found != base.fingerprint:
        raise CheckpointError(
            f"checkpoint {where} was trained beside other frozen parameters than those of the job's model; "
            "use the base that it was trained with (the same recipe.model, and the same files in its folder)"
        )
