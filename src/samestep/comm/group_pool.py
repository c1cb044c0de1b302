"""Process groups that several layouts take one after the other, in one start of ranks; a replaced `new_group`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh


@contextmanager
def new_group_replaced(new_group: Callable[..., Any]) -> Iterator[None]:
    """Within the block PyTorch's meshes, and calls of `dist.new_group`, make groups by another function."""
    make = dist.new_group
    places: tuple[Any, ...] = (dist, device_mesh)
    for place in places:
        place.new_group = new_group
    try:
        yield
    finally:
        for place in places:
            place.new_group = make


class GroupPool:
    """The process groups that layouts have made on this rank, for the layouts after them.

    Each group of gloo has three threads and its connections, and lives as long as anything refers to it, such as a
    cache of DTensor's that knows its mesh. Without a pool every layout makes five groups or more, and after sixty
    layouts a proof took eight times the processor's time.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, list[Any]] = defaultdict(list)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within the block a new group is one that an earlier block made of the same ranks, where there is one.

        Groups of the same ranks within a block stay different ones, since their collectives may overlap. Every rank
        must enter and leave the block, as it must make every group, in the same order.
        """
        make = dist.new_group
        taken: dict[Any, int] = defaultdict(int)

        def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
            if options.get("pg_options") is not None:  # of one group alone
                return make(ranks, *args, **options)
            how = {name: value for name, value in options.items() if name != "group_desc"}  # what it is for
            key = (None if ranks is None else tuple(ranks), args, tuple(sorted(how.items(), key=str)))
            number, taken[key] = taken[key], taken[key] + 1
            groups = self._groups[key]
            if number == len(groups):
                groups.append(make(ranks, *args, **options))
            return groups[number]

        with new_group_replaced(new_group):
            yield
