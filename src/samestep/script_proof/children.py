"""Follows the ranks that a script starts itself, by `torch.multiprocessing.spawn` or `multiprocessing.Process`.

What a process is to call is replaced, before it starts, by an object that installs the recorder and calls it. A rank
is known when it joins a process group; until then its records are in a folder named by its process.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep import environment
from samestep.recording.calls import Call
from samestep.recording.store import events
from samestep.torch_internals import dataloading

CHILD = "child-"  # of the folder of a process whose rank isn't known yet
LAUNCHER = "launcher"  # the folder of the process that started the ranks


def is_followed(process: Any) -> bool:
    """Whether a process may be a rank: not a DataLoader's worker, nor one of multiprocessing's own."""
    target = getattr(process, "_target", None)
    if target is None or target is dataloading.WORKER:
        return False
    return not str(getattr(target, "__module__", "")).startswith("multiprocessing.")


def limited(call: Call, args: Any, kwargs: Any, ranks: int) -> tuple[Any, Any, int | None]:
    """Arguments of `init_process_group` for fewer ranks: the first ones join a smaller group, and others end.

    And how many ranks the script would have had; None if no more.
    """
    bound = inspect.signature(inspect.unwrap(call)).bind(*args, **kwargs)
    rank, size = _given(bound.arguments, "rank"), _given(bound.arguments, "world_size")
    if rank is None or size is None or size <= ranks:
        return args, kwargs, None
    if rank >= ranks:
        raise SystemExit(0)
    bound.arguments |= {"world_size": ranks, "rank": rank}
    return bound.args, bound.kwargs, size


def _given(arguments: Mapping[str, Any], name: str) -> int | None:
    """A rank's number or their count: an argument, or the variable that takes its place."""
    value = arguments.get(name, -1)
    if isinstance(value, int) and value >= 0:
        return value
    ranks = environment.ranks()
    return None if ranks is None else ranks.rank if name == "rank" else ranks.world_size


def has_own_ranks(place: Path) -> bool:
    """Whether processes that a run has started joined a process group."""
    return bool(_joined(place))


def gather(place: Path) -> None:
    """Give the folders of the ranks that a run has started the names of ranks; the launcher's gets one of its own."""
    joined = _joined(place)
    if not joined:
        return
    (place / "rank-0").rename(place / LAUNCHER)
    for folder, rank in sorted(joined.items(), key=lambda item: item[1]):
        if not (place / f"rank-{rank}").exists():
            folder.rename(place / f"rank-{rank}")


def _joined(place: Path) -> dict[Path, int]:
    """Ranks by the folders of their processes; where a script starts ranks several times, those that trained."""
    ranks_by_folder: dict[Path, int] = {}
    for folder in sorted(place.glob(f"{CHILD}*/")):
        ranks = [event["rank"] for event in events(folder) if event["event"] == "joined"]
        if ranks and any(event["event"] == "step" for event in events(folder)):
            ranks_by_folder[folder] = ranks[-1]
    return ranks_by_folder
