"""Checks that a checkpoint belongs to a job: the same training and frozen parameters, visible to all hosts.

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
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict
from torch import Tensor

from samestep.errors import CheckpointError, printable
from samestep.parallel.state_shards import MODEL, Piece

# A training may go on for longer, with another learning rate or other evaluations. What it learns from, and what is
# saved of it, must stay.
_MAY_CHANGE = ("steps", "epochs", "optimizer", "schedule", "clip", "precision", "dropout", "evaluation", "early_stop")
_STAYS_OF_OPTIMIZER = ("optimizer.name", "optimizer.state")
_MOST_WRITTEN = 200  # characters of a value in a message
_ABSENT = object()  # in place of the value of a key that a recipe doesn't have
_OF_CODE = ("task", "optimizer.name")  # may name something in a user's file
_BEFORE_THE_KEY = {"optimizer.state": "full"}  # the value in effect for recipes saved before the key existed


def differences(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """How a job's recipe differs from the one that a checkpoint was saved under: a line a key."""
    if not saved:
        return []
    before, now = _both(saved, recipe)
    return [
        _difference(key, before, now) for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)
    ]


def changes(
    saved: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    same: Collection[str] = (),
    same_code: bool = False,
    accepted: Collection[str] | None = None,
) -> list[str]:
    """The changes of a job to the recipe that a checkpoint was saved under, one line for each key.

    `same`: keys whose files have the same contents as then, at whatever path; `same_code`: so have the user's source
    files, whatever they are called. `accepted`: other data may be named, by
    these keys or below data; None: they may not. Raises CheckpointError if a change would make it another training.
    Without a saved recipe nothing is compared.
    """
    if not saved:
        return []
    before, now = _both(saved, recipe)
    lines: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        named = _without_file if same_code else _without_folder
        if key in same or named(key, before.get(key)) == named(key, now.get(key)):
            continue
        line = _difference(key, before, now)
        of_data = key.startswith("data.")
        may_change = key.partition(".")[0] in _MAY_CHANGE and key not in _STAYS_OF_OPTIMIZER
        if not may_change and (accepted is None or not (of_data or key in accepted)):
            accept = ", accept it with run.checkpoint.accept_data: true (--accept-data-change)" if of_data else ""
            raise CheckpointError(
                f"the checkpoint is of another training: {line}; set it back{accept}, or train without resuming"
            )
        lines.append(line)
    return lines


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A key's value now and then, as a job file has it."""
    return f"recipe.{printable(key, _MOST_WRITTEN)} is {_written(key, now)}, and was {_written(key, before)}"


def _written(key: str, recipe: Mapping[str, Any]) -> str:
    value = recipe.get(key, _ABSENT)
    words = {None: "null", True: "true", False: "false", _ABSENT: "not given"}
    plain = value is None or isinstance(value, bool) or value is _ABSENT
    return words[value] if plain else printable(str(value), _MOST_WRITTEN)


def _without_file(key: str, value: Any) -> Any:
    """The value of a key that names something in a user's file as file.py:Name: the name."""
    if key in _OF_CODE and isinstance(value, str) and ".py:" in value:
        return value.rpartition(".py:")[2]
    return value


def _without_folder(key: str, value: Any) -> Any:
    """The value of a key that names something in a user's file as file.py:Name: a folder may lie elsewhere."""
    if key in _OF_CODE and isinstance(value, str) and ".py:" in value:
        return value.rpartition("/")[2]
    return value


def _both(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both recipes as flat mappings; a key that `saved` predates gets the value that was in effect then."""
    before, now = _flat(saved), _flat(recipe)
    return {**{key: value for key, value in _BEFORE_THE_KEY.items() if key in now}, **before}, now


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, such as optimizer.lr, so that recipes can be compared key by key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = None if value == [] else value  # recipes from before the key existed have None
    return flat


_PATIENCE = 5.0  # seconds; a network file system may report for a while that a new file doesn't exist


def check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, if a host doesn't see the files that rank 0's host writes into a folder.

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
    """Whether this host sees a file, within the seconds that a network file system may take to show it."""
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
    """The frozen parameters that a checkpoint leaves out, and what identifies them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    left_out: tuple[str, ...]  # names of parameters
    fingerprint: str  # of sampled values of each
    # Contents of PEFT's adapter_config.json, and the adapter's name in PEFT; both empty for a model without adapters.
    adapter: Mapping[str, Any] = field(default_factory=dict)
    adapter_name: str = ""


def fingerprint(pieces: Mapping[str, Piece], names: Collection[str], group: dist.ProcessGroup | None = None) -> str:
    """SHA-256 of the named parameters: their names, and 16 evenly spaced values of each, in float32.

    It does not depend on how the parameters are sharded. `pieces` are this rank's, under `model.<name>`. Every rank
    of `group`, a CPU group, must call this; without a group this process holds all parameters whole.
    """
    looks: list[Tensor] = []
    for name in sorted(names):
        looked_at = torch.full((_LOOKED_AT,), -math.inf)
        piece = pieces.get(MODEL + name)
        if piece is not None:
            _look(piece, looked_at)
        looks.append(looked_at)
    values = torch.cat(looks) if looks else torch.zeros(0)
    if group is not None and looks:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)  # values that a rank does not hold are -inf
    text = "\n".join(sorted(names)).encode()
    return hashlib.sha256(text + values.numpy().tobytes()).hexdigest()


def _look(piece: Piece, looked_at: Tensor) -> None:
    """Write the sampled values that this rank holds into `looked_at` [16]."""
    total = piece.shape.numel()
    for place in range(min(_LOOKED_AT, total)):
        flat = place * (total - 1) // max(1, min(_LOOKED_AT, total) - 1)
        index = (
            [int(coordinate) for coordinate in torch.unravel_index(torch.tensor(flat), piece.shape)]
            if piece.shape
            else []
        )
        for box in piece.boxes:
            inner = [at - first for at, first in zip(index, box.offsets, strict=True)]
            if all(0 <= at < size for at, size in zip(inner, box.values.shape, strict=True)):
                value = box.values[tuple(inner)]
                value = value.real if value.is_complex() else value
                looked_at[place] = torch.nan_to_num(value.detach().float().cpu())


def check_base(base: Base, names: Collection[str], own_fingerprint: str, where: Any) -> None:
    """Raise CheckpointError unless the model has the base's parameters, with the same fingerprint.

    `names`: of the model's parameters. `own_fingerprint`: theirs. `where`: the checkpoint, for the message.
    """
    for name in base.left_out:
        if name not in names:
            raise CheckpointError(f"checkpoint {where} leaves out {name}, and the job's model has no such parameter")
    if own_fingerprint != base.fingerprint:
        raise CheckpointError(
            f"checkpoint {where} was trained with other frozen parameters than those of the job's model; "
            "use the base that it was trained with (the same recipe.model, and the same files in its folder)"
        )
