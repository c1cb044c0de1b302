"""ZeRO's partitions: where in the ranks' flat tensors each parameter lies, at stages 1 and 2, and at stage 3."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.parallel.parts import Entry

Readers = dict[str, tuple[Entry, Callable[[], Tensor]]]
States = Sequence[Mapping[str, Any]]


def of_flat_groups(folder: Path, models: States, states: States) -> Readers:
    """Stages 1 and 2: a group's parameters lie end to end in one flat tensor, of which each rank has a stretch."""
    readers: Readers = {}
    groups = models[0]["param_shapes"]
    paddings = states[0].get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    for number, (shapes, after) in enumerate(zip(groups, paddings, strict=True)):
        stretches = [state["single_partition_of_fp32_groups"][number] for state in states]
        offset = 0
        for (name, shape), padding in zip(shapes.items(), after, strict=True):
            readers[name] = _reader(stretches, offset, shape)
            offset += shape.numel() + padding
        _check_length(folder, offset, sum(map(len, stretches)), slack=2 * len(states))
    shared = models[0].get("shared_params") or {}
    for name, value in models[0]["module"].items():  # whole at these stages: what no optimizer steps is there alone
        if name not in readers and name not in shared:
            readers[name] = Entry(shape=value.shape, dtype=value.dtype), lambda value=value: value
    return readers


def of_stage_3(folder: Path, models: States, states: States) -> Readers:
    """Stage 3: each parameter is cut into as many equal stretches as ranks, the last filled up with padding.

    A rank's stretches of all parameters lie end to end in its flat tensors, over the borders of these.
    """
    ranks = len(states)
    shapes = {name: shape for group in models[0]["param_shapes"] for name, shape in group.items()}
    flat = [state["fp32_flat_groups"] for state in states]
    readers: Readers = {}
    offset = 0
    for name, shape in shapes.items():
        length = -(-shape.numel() // ranks)
        readers[name] = _reader_of_ranks(flat, offset, length, shape)
        offset += length
    _check_length(folder, offset, sum(map(len, flat[0])), slack=0)
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        length = -(-shape.numel() // len(parts))
        readers[name] = _reader_of_ranks([[part] for part in parts], 0, length, shape)
    return readers


def _reader(stretches: Sequence[Tensor], offset: int, shape: torch.Size) -> tuple[Entry, Callable[[], Tensor]]:
    entry = Entry(shape=shape, dtype=stretches[0].dtype)
    return entry, lambda: _taken(stretches, offset, shape.numel()).view(shape)


def _reader_of_ranks(
    flat: Sequence[Sequence[Tensor]], offset: int, length: int, shape: torch.Size
) -> tuple[Entry, Callable[[], Tensor]]:
    def read() -> Tensor:
        padded = torch.cat([_taken(stretches, offset, length) for stretches in flat])
        return padded[: shape.numel()].view(shape)

    return Entry(shape=shape, dtype=flat[0][0].dtype), read


def _taken(stretches: Sequence[Tensor], offset: int, length: int) -> Tensor:
    """`length` numbers from `offset` on, of tensors that lie end to end."""
    starts = accumulate(chain([0], map(len, stretches)))
    parts = [
        stretch[max(0, offset - start) : max(0, offset + length - start)]
        for stretch, start in zip(stretches, starts, strict=False)
    ]
    return torch.cat(parts)


def _check_length(folder: Path, used: int, there: int, *, slack: int) -> None:
    """Raise CheckpointError unless the partitions are as long as the parameters; `slack`: of padding at the end."""
    if not used <= there <= used + slack:
        raise CheckpointError(
            f"{folder}: its parameters have {used:,} numbers, and the ranks' partitions {there:,}; "
            "they are not of one checkpoint"
        )
