"""Whether all hosts of a job see the same folder: found out before the first step, not when it is needed."""

import socket
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.errors import CheckpointError

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
        raise CheckpointError(f"run.checkpoint: {fault}; a folder that all hosts may write would do")
    if blind:
        raise CheckpointError(
            f"run.checkpoint: {hosts[blind[0]]} (rank {blind[0]}) doesn't see what {hosts[0]} writes into {folder}; "
            "run.checkpoint.folder on a file system that all hosts share would do"
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
