"""The folder of a training's checkpoints: `step-<number>` each, and only complete ones bear that name."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.info import Info, read_info
from samestep.errors import CheckpointError
from samestep.run_folder import name_of, steps_in

UNFINISHED = ".saving"
_REPLACED = ".replaced"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint, as far as its name and its info say."""

    path: Path
    info: Info


def found_in(folder: Path) -> list[Found]:
    """All complete checkpoints whose info can be read, first to last."""
    found: list[Found] = []
    for step in steps_in(folder):
        path = folder / name_of(step)
        try:
            found.append(Found(path=path, info=read_info(path)))
        except CheckpointError:
            continue
    return found


def remove_unfinished(folder: Path) -> None:
    """Remove what a run that was ended in the middle of saving has left."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.endswith((UNFINISHED, _REPLACED)):
                shutil.rmtree(path)


def make_complete(unfinished: Path) -> Path:
    """Give a written checkpoint its name, from which moment on it is one."""
    path = unfinished.with_name(unfinished.name.removesuffix(UNFINISHED))
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():  # one that turned out to be damaged, or of a way that was left again
        path.rename(replaced)
    unfinished.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def best_of(found: Sequence[Found], metric: str, *, lowest: bool) -> Found | None:
    """The checkpoint with the best value of a metric; the earlier one where two are alike."""
    scored = [each for each in found if metric in each.info.metrics]
    if not scored:
        return None
    values = [each.info.metrics[metric] for each in scored]
    return scored[values.index(min(values) if lowest else max(values))]


def prune(folder: Path, *, keep: int, best: Path | None = None) -> None:
    """Remove all checkpoints but the last `keep` and the best one."""
    for step in steps_in(folder)[:-keep]:
        path = folder / name_of(step)
        if path != best:
            # First out of sight, so that a half removed one is never taken for a checkpoint.
            gone = path.with_name(path.name + _REPLACED)
            path.rename(gone)
            shutil.rmtree(gone)
