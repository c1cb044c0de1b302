"""Find the checkpoint to go on from: the newest whose files are as they were written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from samestep.checkpoint.load import Loader
from samestep.errors import CheckpointError
from samestep.run_folder import candidates


def open_newest(place: Path, group: dist.ProcessGroup, warn: Callable[[str], None]) -> Loader | None:
    """The newest checkpoint of a place that is whole; `warn` is told of each that isn't. None where there is none.

    Every rank must ask. Raises CheckpointError where there are checkpoints and all are damaged.
    """
    # By their place in the folder, which each host may have at a path of its own.
    found: list[Any] = [[os.path.relpath(path, place) for path in candidates(place)]]
    dist.broadcast_object_list(found, src=0, group=group)
    paths = [place / path for path in found[0]]
    fault = ""
    for path in paths:
        loader, fault = _opened(path, group)
        if loader is not None:
            return loader
        if len(paths) == 1:
            raise CheckpointError(f"{fault}; there is no other in {path.parent}")
        warn(f"{fault}; the one before it is tried")
    if paths:
        raise CheckpointError(f"all {len(paths)} checkpoints in {paths[0].parent} are damaged; the last: {fault}")
    return None


def _opened(path: Path, group: dist.ProcessGroup) -> tuple[Loader | None, str]:
    """A checkpoint whose files are whole, or what is wrong with it, the same on every rank."""
    loader: Loader | None = None
    fault: str | None = None
    try:
        loader = Loader(path, group)
    except CheckpointError as error:
        fault = str(error)
    faults: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(faults, fault, group=group)
    if loader is not None and not any(faults):
        try:
            loader.verify()
            return loader, ""
        except CheckpointError as error:  # on all ranks alike
            faults = [str(error)]
    return None, next(each for each in faults if each is not None)
