"""Now: the moment of the running forward, for what must not depend on the rank that runs it (masks, statistics)."""

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.data.loader import Moment


class Now:
    """Which samples the running forward works on; none outside of training. One a model, shared by its parts."""

    def __init__(self) -> None:
        self.moment: Moment | None = None

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before
