"""The folder of a training's checkpoints: `step-<number>` each, and only complete ones bear that name."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.info import INFO_FILE, Info, read_info
from samestep.errors import CheckpointError

UNFINISHED = ".saving"
_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{1,15})")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint, as far as its name and its info say."""

    path: Path
    info: Info


def name_of(step: int) -> str:
    return f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None where it is another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match is not None else None


def steps_in(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, first to last."""
    if not folder.is_dir():
        return []
    steps = [step_of(path) for path in folder.iterdir() if (path / INFO_FILE).is_file()]
    return sorted(step for step in steps if step is not None)


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


def prune(folder: Path, *, keep: int, best: Path | None) -> None:
    """Remove all checkpoints but the last `keep` and the best one."""
    for step in steps_in(folder)[:-keep]:
        path = folder / name_of(step)
        if path != best:
            # First out of sight, so that a half removed one is never taken for a checkpoint.
            gone = path.with_name(path.name + _REPLACED)
            path.rename(gone)
            shutil.rmtree(gone)
