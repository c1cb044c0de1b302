"""A host that stays away: it is told once, and tried less and less often."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from queue import SimpleQueue

import pytest

from samestep.cluster.start import controller
from samestep.cluster.start.controller import Controller
from samestep.cluster.start.link import Ended, Event, Told
from samestep.cluster.start.outcome import Outcome
from samestep.cluster.start.part import Part
from samestep.cluster.start.starter import Bring

TRIES = 5


class Reached:
    """What stands for the process by which a host is reached: worker-2 never is, worker-1 ends after its last try."""

    def __init__(self, bring: Bring, request: bytes, events: "SimpleQueue[Event]") -> None:
        self.bring = bring
        self.started: set[str] = set()
        self._events = events
        if bring.hosts == "worker-2":
            self.tries.append(time.monotonic())
            events.put(Ended(link=self))  # pyright: ignore[reportArgumentType]
            if len(self.tries) == TRIES:
                self.first[0].end()
        else:
            self.first.append(self)

    tries: list[float]
    first: "list[Reached]"

    def end(self) -> None:
        values = {"host": "worker-1", "outcome": asdict(Outcome())}
        self._events.put(Told(link=self, values=values))  # pyright: ignore[reportArgumentType]
        self._events.put(Ended(link=self))  # pyright: ignore[reportArgumentType]

    def why(self, hosts: Sequence[str]) -> str:
        return f"{hosts[0]} can't be reached"

    def kill(self) -> None:
        pass


def test_a_dead_host_is_told_once_and_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Reached, "tries", [], raising=False)
    monkeypatch.setattr(Reached, "first", [], raising=False)
    monkeypatch.setattr(controller, "Link", Reached)
    monkeypatch.setattr(controller, "_FIRST_WAIT", 0.1)
    monkeypatch.setattr(controller, "_LONGEST_WAIT", 0.4)
    parts = [Part(job="one", host=f"worker-{n}", num_procs=1, command=("x",), logs="logs") for n in (1, 2)]
    brings = [Bring(command=("ssh",), parts=(part,)) for part in parts]
    job = Controller(brings, ".", {}, notice=1.0, elastic=True)
    assert job.run().exit_code == 0
    assert capfd.readouterr().err.count("worker-2 can't be reached; the others go on") == 1
    apart = [after - before for before, after in itertools.pairwise(Reached.tries)]
    assert len(apart) == TRIES - 1
    assert all(waited >= wanted for waited, wanted in zip(apart, (0.1, 0.2, 0.4, 0.4), strict=True))
    assert list(job._waits.values()) == [0.4]  # no more than the longest
