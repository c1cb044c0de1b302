"""How many collectives this rank has entered in each of its process groups, asked from any thread."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

# A group -> collectives entered. The group's key is its ranks and which of the groups of those ranks it is, since
# names of groups need not be the same on all ranks.
Counts = Mapping[str, int]


def counts() -> Counts:
    """Read the counters that process groups keep by themselves; a message between two ranks is not counted."""
    if not dist.is_initialized():
        return {}
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_group_ranks
    found: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for group, members in list(groups.items()):
        if not isinstance(group, dist.ProcessGroup):  # the mark of groups that this rank is not in
            continue
        ranks = ",".join(map(str, sorted(members)))
        seen[ranks] += 1
        with suppress(RuntimeError):  # a back end that does not count
            of: Any = group
            found[f"{ranks}#{seen[ranks]}"] = of._get_sequence_number_for_group()
    return found


def write(folder: Path, rank: int, entered: Counts) -> None:
    """Leave the counts where `read` finds them, never half-written."""
    new = folder / f"counts-{rank}.new"
    new.write_text(json.dumps(entered), encoding="utf-8")
    new.replace(folder / f"counts-{rank}.json")


def read(folder: Path, ranks: Iterable[int]) -> dict[int, Counts]:
    """The counts of some ranks, as their files say; a rank that has written none is left out."""
    found: dict[int, Counts] = {}
    for rank in ranks:
        with suppress(FileNotFoundError):
            found[rank] = json.loads((folder / f"counts-{rank}.json").read_text(encoding="utf-8"))
    return found


def members(key: str) -> list[int]:
    """The ranks of a group's key."""
    return [int(rank) for rank in key.partition("#")[0].split(",")]
