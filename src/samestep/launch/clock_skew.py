"""Measures clock skew between the hosts of a job, by messages in the store of the handshake.

A host asks for the time, and another answers with its clock. The answer was given after the question and before it
was received, which bounds the skew however slow hosts and store are.

What needs it: PyTorch's rendezvous compares the hosts' clocks, so clocks 2 s apart make hosts lose each other, which
looks like a broken network; and the rank that failed first is found by them. The warning is documented under "Clocks"
in docs/elastic.md. docs/tested.md has no row for it: hosts that are made on one machine share its clock.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from samestep.launch.node_spec import NodeSpec

_ASKED = "samestep/clock/asked"
_ANSWER = "samestep/clock/answer"
_ANSWERERS = 4  # hosts that answer, by node rank: all would be too much traffic, one may be gone
_PATIENCE = 1.5  # seconds to wait for an answer; hosts with running ranks poll every half second
_APART = 1.0  # tolerated skew in seconds


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Bounds of this host's clock minus another's."""

    host: str
    least: float  # seconds; negative: this clock is behind
    most: float

    @property
    def too_large(self) -> bool:
        return self.least > _APART or self.most < -_APART

    def told(self, mine: str) -> str:
        """Describe the skew for the user of host `mine`."""
        seconds, unsure = (self.least + self.most) / 2, (self.most - self.least) / 2
        where = "ahead of" if seconds > 0 else "behind"
        return (
            f"the clock of {mine} is {abs(seconds):.1f} s {where} that of {self.host} "
            f"(give or take {unsure:.1f} s): another rank than the first may be named as the one that failed first, "
            "and with 2 s or more hosts may lose each other; use NTP (chrony, systemd-timesyncd) on both"
        )


class Clocks:
    """This host's question for the time, and its answers to other hosts' questions."""

    def __init__(self, store: dist.TCPStore, part: NodeSpec, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._store = store
        self._part = part
        self._clock = clock
        self._mine = 0  # number of this host's question, from 1
        self._asked_at = 0.0
        self._until = 0.0
        self._answered = 0
        self._heard: Difference | None = None

    def go_on_with(self, store: dist.TCPStore) -> None:
        """Continue with a new connection to the store."""
        self._store = store

    def ask(self) -> None:
        """Ask for the time, before taking a seat: hosts that wait for this one answer until they see it."""
        self._until = time.monotonic() + _PATIENCE
        self._asked_at = self._clock()
        self._mine = self._store.add(_ASKED, 1)
        self._answered = self._answered or self._mine  # earlier questions are left to earlier hosts

    def answer(self) -> None:
        """Answer new questions of other hosts; to be called repeatedly."""
        if self._part.node_rank >= _ANSWERERS and self._mine != 1:
            return
        with suppress(RuntimeError):  # a lost store is handled elsewhere
            asked = self._store.add(_ASKED, 0)
            for number in set(range(self._answered + 1, asked + 1)) - {self._mine}:
                told = json.dumps({"host": self._part.host, "time": self._clock()})
                self._store.compare_set(f"{_ANSWER}/{number}", "", told)
            self._answered = asked

    def listen(self) -> bool:
        """Read the answer if it has come; return whether there is nothing more to wait for."""
        if self._mine == 1 or self._heard is not None or time.monotonic() > self._until:
            return True
        key = f"{_ANSWER}/{self._mine}"
        with suppress(RuntimeError):  # a lost store is handled elsewhere
            if self._store.check([key]):
                told = json.loads(self._store.get(key))
                now = self._clock()
                self._heard = Difference(
                    host=told["host"], least=self._asked_at - told["time"], most=now - told["time"]
                )
        return self._heard is not None

    @property
    def difference(self) -> Difference | None:
        """Return the skew; None if no host answered."""
        return self._heard
