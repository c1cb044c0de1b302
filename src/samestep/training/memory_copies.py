"""Copies of a training's state in memory that outlives the ranks: the last complete one, and the one being made."""

from collections.abc import Callable
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
from samestep.errors import CheckpointError
from samestep.training.session import Session


class MemoryCopies:
    """In a folder of each host's memory; where there are several hosts, each keeps another's part as well."""

    def __init__(self, session: Session, place: Path, every: int) -> None:
        """`every`: steps between two copies."""
        self._session = session
        self._every: int | None = every  # None: there is no room for them
        self._place = place
        group = new_group(range(session.world.world_size), backend="gloo")
        ranks = environment.ranks()
        self._neighbours = Neighbours.find(group, ranks.local_rank if ranks is not None else 0)
        self._saver = Saver(
            place,
            group,
            asynchronous=True,
            durable=False,
            neighbours=self._neighbours,
            saved=lambda *_: prune(place, keep=1),
        )

    def due(self, done: int) -> bool:
        """Whether a copy is due after `done` steps; the same on every rank."""
        return self._every is not None and done % self._every == 0

    def save(self, save_into: Callable[[Saver], None]) -> None:
        """Make a copy. Without room for it the training goes on without copies, and says so."""
        self._unless_full(lambda: save_into(self._saver))

    def prepare(self) -> None:
        self._unless_full(self._saver.prepare)

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        self._unless_full(self._saver.wait)

    def _unless_full(self, act: Callable[[], None]) -> None:
        try:
            act()
        except CheckpointError as error:  # on all ranks alike
            self._every = None
            self._session.warn(f"{error}; the training goes on without copies in memory")

    @property
    def waited_seconds(self) -> float:
        return self._saver.waited_seconds

    def newer(self, on_disk: Loader | None, group: ProcessGroup) -> Loader | None:
        """The copy in memory where it is whole and the disk has no newer state; what the disk has otherwise."""
        try:
            if not self._neighbours.gather(self._place, partial(self._saver.together, where=self._place)):
                return on_disk
            found = open_newest(self._place, group, lambda _: None)
        except CheckpointError as error:  # on all ranks alike
            self._session.warn(f"{error}; the last checkpoint is taken")
            return on_disk
        if found is None or (on_disk is not None and on_disk.info.step >= found.info.step):
            return on_disk
        return found
