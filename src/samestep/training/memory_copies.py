"""Copies of a training's state in memory that outlives the ranks: the last complete one, and the one being made."""

from functools import partial
from pathlib import Path

from torch.distributed import ProcessGroup

from samestep import environment
from samestep.checkpoint.find import open_newest
from samestep.checkpoint.folder import prune
from samestep.checkpoint.load import Loader
from samestep.checkpoint.neighbours import Neighbours
from samestep.checkpoint.save import Saver
from samestep.comm.mesh import new_group
from samestep.training.session import Session


class MemoryCopies:
    """In a folder of each host's memory; where there are several hosts, each keeps another's part as well."""

    def __init__(self, session: Session, place: Path, every: int) -> None:
        """`every`: steps between two copies."""
        self.every = every
        self._place = place
        group = new_group(range(session.world.world_size), backend="gloo")
        ranks = environment.ranks()
        self._neighbours = Neighbours.find(group, ranks.local_rank if ranks is not None else 0)
        self.saver = Saver(
            place,
            group,
            asynchronous=True,
            durable=False,
            neighbours=self._neighbours,
            saved=lambda *_: prune(place, keep=1),
        )

    def newer(self, on_disk: Loader | None, group: ProcessGroup) -> Loader | None:
        """The copy in memory where there is one and the disk has no newer state; what the disk has otherwise."""
        together = partial(self.saver.together, where=self._place)
        if self._neighbours is not None and not self._neighbours.gather(self._place, together):
            return on_disk
        found = open_newest(self._place, group, lambda _: None)
        if found is None or (on_disk is not None and on_disk.info.step >= found.info.step):
            return on_disk
        return found
