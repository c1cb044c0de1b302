"""Clocks: whether those of a job's hosts agree, asked through the store where the hosts meet.

A host that comes asks what time it is, and another answers from its own clock. The answer was given after the
question and before it was heard, which bounds the difference of the two clocks, however slow hosts and store may be.
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
_ANSWERERS = 4  # hosts, by node rank: all of them would be much traffic in a large job, and one may be gone
_PATIENCE = 1.5  # seconds for an answer; hosts whose ranks run look for questions every half second
_APART = 1.0  # seconds by which clocks may differ


@dataclass(frozen=True, kw_only=True)
class Difference:
    """By how much this host's clock is ahead of another's."""

    host: str
    least: float  # seconds; less than 0: it is behind
    most: float

    @property
    def too_large(self) -> bool:
        return self.least > _APART or self.most < -_APART

    def told(self, mine: str) -> str:
        """What is said of it on this host, `mine`."""
        seconds, unsure = (self.least + self.most) / 2, (self.most - self.least) / 2
        where = "ahead of" if seconds > 0 else "behind"
        return (
            f"the clock of {mine} is {abs(seconds):.1f} s {where} that of {self.host} "
            f"(give or take {unsure:.1f} s): another rank than the first may be named as the one that failed first, "
            "and with 2 s or more hosts may lose each other; use NTP (chrony, systemd-timesyncd) on both"
        )


class Clocks:
    """What this host asks, answers and hears."""

    def __init__(self, store: dist.TCPStore, part: NodeSpec, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._store = store
        self._part = part
        self._clock = clock
        self._mine = 0  # the number of this host's question, from 1
        self._asked_at = 0.0
        self._until = 0.0
        self._answered = 0
        self._heard: Difference | None = None

    def go_on_with(self, store: dist.TCPStore) -> None:
        """The connection to the store was lost, and this is another one."""
        self._store = store

    def ask(self) -> None:
        """Ask, before this host is seen to be there: a host that waits for it answers before it stops waiting."""
        self._until = time.monotonic() + _PATIENCE
        self._asked_at = self._clock()
        self._mine = self._store.add(_ASKED, 1)
        self._answered = self._answered or self._mine  # earlier questions are for those who were here

    def answer(self) -> None:
        """Answer what others have asked since; to be called again and again."""
        if self._part.node_rank >= _ANSWERERS and self._mine != 1:
            return
        with suppress(RuntimeError):  # a store that is gone is met elsewhere
            asked = self._store.add(_ASKED, 0)
            for number in set(range(self._answered + 1, asked + 1)) - {self._mine}:
                told = json.dumps({"host": self._part.host, "time": self._clock()})
                self._store.compare_set(f"{_ANSWER}/{number}", "", told)
            self._answered = asked

    def listen(self) -> bool:
        """Take note of an answer that has come; whether there is none to wait for any more."""
        if self._mine == 1 or self._heard is not None or time.monotonic() > self._until:
            return True
        key = f"{_ANSWER}/{self._mine}"
        with suppress(RuntimeError):  # a store that is gone is met elsewhere
            if self._store.check([key]):
                told = json.loads(self._store.get(key))
                now = self._clock()
                self._heard = Difference(
                    host=told["host"], least=self._asked_at - told["time"], most=now - told["time"]
                )
        return self._heard is not None

    @property
    def difference(self) -> Difference | None:
        """By how much the clocks differ; None where no host answered."""
        return self._heard
