"""Whether a checkpoint belongs to a job: the same training, beside the same frozen parameters, seen by all hosts.

`changes` compares recipes. A checkpoint of adapters or of other trained parameters alone leaves out its `Base`, the
frozen parameters, which a fingerprint tells apart. `check_shared` finds a host that doesn't see the others' folder.
"""

import hashlib
import math
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.parallel.state_shards import MODEL, Piece

# A training may go on for longer, with another learning rate or other evaluations. What it learns from, and what is
# saved of it, must stay.
_MAY_CHANGE = ("steps", "epochs", "optimizer", "schedule", "clip", "precision", "dropout", "evaluation", "early_stop")
_STAYS_OF_OPTIMIZER = ("optimizer.name", "optimizer.state")
_BEFORE_THE_KEY = {"optimizer.state": "full"}  # what recipes meant that were saved before they had it


def differences(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """How a job's recipe differs from the one that a checkpoint was saved under: a line a key."""
    if not saved:
        return []
    before, now = _both(saved, recipe)
    return [
        f"recipe.{key} is {now.get(key)}, and was {before.get(key)}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]


def changes(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What a job changes of the recipe that a checkpoint was saved under: a line a key.

    Raises CheckpointError where it would be another training. A recipe that was not saved is not compared.
    """
    if not saved:
        return []
    before, now = _both(saved, recipe)
    lines: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) == now.get(key):
            continue
        line = f"recipe.{key} is {now.get(key)}, and was {before.get(key)}"
        if key in _STAYS_OF_OPTIMIZER or key.partition(".")[0] not in _MAY_CHANGE:
            raise CheckpointError(
                f"the checkpoint is of another training: {line}; set it back, or train without resuming"
            )
        lines.append(line)
    return lines


def _both(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both recipes as flat mappings, keys that came later filled in as they were before."""
    before, now = _flat(saved), _flat(recipe)
    return {**{key: value for key, value in _BEFORE_THE_KEY.items() if key in now}, **before}, now


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, such as optimizer.lr, so that recipes can be compared key by key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = None if value == [] else value  # as of a recipe from before there was the key
    return flat


_PATIENCE = 5.0  # seconds; a network file system may answer for a while that a new file is not there


def check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, where a host doesn't see what rank 0's host writes into a folder.

    Every rank must call this. `group` is of all ranks, on the CPU. Ranks of one host share its file systems.
    """
    hosts = _gathered(socket.gethostname(), group)
    if len(set(hosts)) == 1:
        return
    probe = folder / f".shared-{_gathered(uuid.uuid4().hex, group)[0]}"
    first = dist.get_rank() == 0
    fault: str | None = None
    if first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            fault = f"{folder} can't be written by {hosts[0]}: {error.strerror}"
    fault = _gathered(fault, group)[0]
    blind = [rank for rank, sees in enumerate(_gathered(fault is None and _sees(probe), group)) if not sees]
    if first:
        probe.unlink(missing_ok=True)
    if fault is not None:
        raise CheckpointError(f"run.checkpoint: {fault}; use a folder that all hosts may write")
    if blind:
        raise CheckpointError(
            f"run.checkpoint: {hosts[blind[0]]} (rank {blind[0]}) doesn't see what {hosts[0]} writes into {folder}; "
            "use run.checkpoint.folder on a file system that all hosts share"
        )


def _sees(probe: Path) -> bool:
    """Whether a file is seen here, at once or after a network file system has had time to notice it."""
    until = time.monotonic() + _PATIENCE
    while not probe.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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

    It does not depend on how ranks hold the parameters. `pieces` are those of this rank, `model.<name>` among them;
    every rank of the group, which is on the CPU, must call this. Without a group this process holds everything.
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
