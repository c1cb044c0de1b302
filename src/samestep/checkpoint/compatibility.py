"""Whether a checkpoint's training and a job's are the same, and whether all hosts of a job see the same folder."""

import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.errors import CheckpointError

# A training may go on for longer, with another rate or another eye on it; what it learns from, and what is saved of
# it, stays.
_MAY_CHANGE = ("steps", "epochs", "optimizer", "schedule", "clip", "precision", "dropout", "evaluation", "early_stop")
_STAYS_OF_OPTIMIZER = ("optimizer.name", "optimizer.state")
_BEFORE_THE_KEY = {"optimizer.state": "full"}  # what recipes meant that were saved before they had it


def differences(saved: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """What a job's recipe says otherwise than the one that a checkpoint was saved under: a line a key."""
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
    before, now = _flat(saved), _flat(recipe)
    return {**{key: value for key, value in _BEFORE_THE_KEY.items() if key in now}, **before}, now


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = None if value == [] else value  # as of a recipe from before there was the key
    return flat


_PATIENCE = 5.0  # seconds; a network file system may remember for a while what it did not find


def check_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on all ranks, where a host doesn't see what rank 0's host writes into a folder.

    Every rank must ask. `group` is of all ranks, on the CPU. Ranks of one host have nothing to find out.
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
