"""Membership: which hosts take part in a job's next round, agreed on through one value in the hosts' store.

That value, a `Meeting`, is changed by compare-and-set alone, so all hosts see the same changes in one order. Each
change raises its version; a host refuses a version that is older than one that it has seen.

    gathering   hosts add themselves to `members`. It is complete with all hosts that the job takes, or with as many
                as it needs once the last call is over: 30 s at a job's start, where hosts come one by one, else 2 s.
    complete    `members` are fixed, and their order, by node rank, is that of the ranks. The first one serves a store
                for the round and announces its `place`; the others wait for that. Then the round runs. Hosts that
                come now are `waiting`: the members poll their number, and end the round to take them in.
    over        each member that looks for its next round, or is silent, is added to `left`. With the last of them the
                next meeting begins: gathering, `turn` + 1, and the waiting hosts add themselves to it.
    closed      the job is over, and no host meets any more.

A host is silent if its heartbeat has not changed for 2 s by the clock of the host that looks for it: hosts compare no
clocks. It is then dropped from what it took part in, and adds itself again if it was only paused. An agent that was
started again takes the place of its host's former agent at once.
"""

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from samestep.fault_tolerance.watchdog import Clock
from samestep.launch.options import LaunchTimeouts
from samestep.launch.signed_store import ForeignValueError, Name, Number, Port, SignedStore

_LOOK = 0.1  # seconds between two looks at the meeting, with few hosts
_LONGEST_LOOK = 0.5  # the same with hundreds, which share one store
_PLACE_LOOK = 0.02  # seconds between two looks for the round's store, which is announced at once

_REMOVED = "it was removed"


@dataclass(frozen=True, kw_only=True)
class RoundMember:
    """A host of a round."""

    node: Number
    name: Name
    address: Name
    agent: Name  # id of the agent process, new after a restart of the host's agent


@dataclass(frozen=True, kw_only=True)
class RoundPlace:
    """Where a round's store is."""

    address: Name
    port: Port
    number: Number  # of the round
    scope: Name  # part of every signature in that store


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The state that all hosts share."""

    version: Number = 0
    turn: Number = 0
    begun: Number = 0  # rounds that have begun
    complete: bool = False
    closed: bool = False
    members: tuple[RoundMember, ...] = ()
    left: tuple[Name, ...] = ()  # agents of the complete meeting that take no more part in its round
    waiting: tuple[RoundMember, ...] = ()
    place: RoundPlace | None = None

    def has(self, agent: str) -> bool:
        """Whether an agent takes part."""
        return agent not in self.left and any(member.agent == agent for member in self.members)

    def without(self, agents: Collection[str]) -> "Meeting":
        """Leave out agents; a complete meeting that all have left makes room for the next one."""
        waiting = tuple(host for host in self.waiting if host.agent not in agents)
        if not self.complete:
            members = tuple(host for host in self.members if host.agent not in agents)
            return replace(self, members=members, waiting=waiting)
        gone = tuple(host.agent for host in self.members if host.agent in agents and host.agent not in self.left)
        left = self.left + gone
        if len(left) < len(self.members):
            return replace(self, left=left, waiting=waiting)
        return replace(self, turn=self.turn + 1, complete=False, members=(), left=(), waiting=waiting, place=None)

    def joined_by(self, host: RoundMember, *, fewest: int, most: int, last_call_over: bool) -> "Meeting":
        """Add a host to the members; to the waiting hosts if the meeting is complete without it."""
        former = {
            other.agent
            for other in (*self.members, *self.waiting)
            if other.node == host.node and other.agent != host.agent
        }
        there = self.without(former)
        if there.complete:
            waits = there.has(host.agent) or host in there.waiting
            return there if waits else replace(there, waiting=(*there.waiting, host))
        members = there.members if host in there.members else (*there.members, host)
        waiting = tuple(other for other in there.waiting if other != host)
        enough = len(members) >= most or (len(members) >= fewest and last_call_over)
        if enough:
            members = tuple(sorted(members, key=lambda member: member.node))
        return replace(there, members=members, waiting=waiting, complete=enough)


class Membership:
    """One host's part in the meetings of a job. Not thread-safe."""

    def __init__(
        self,
        store: SignedStore,
        host: RoundMember,
        *,
        key: str,
        fewest: int,
        most: int,
        timeouts: LaunchTimeouts,
        silent: Callable[[Sequence[RoundMember]], Collection[str]],
    ) -> None:
        """`silent` returns the agents of those hosts whose heartbeat has stopped; it is called at every look."""
        self._store = store
        self._host = host
        self._key = key
        self._fewest, self._most = fewest, most
        self._timeouts = timeouts
        self._silent = silent
        self._turn = -1  # of the meeting that this host takes part in
        self._look = min(_LONGEST_LOOK, max(_LOOK, most / 200))
        self._version = store.claim(key, Meeting(), Meeting).version  # the latest one seen

    def meet(self) -> Meeting:
        """Take part in the next meeting until it is complete, and return it.

        Raises RendezvousClosedError if the job is over, RendezvousTimeoutError if too few hosts come within
        `start_timeout`, and what stores raise.
        """
        agent = self._host.agent
        self._change(lambda meeting: meeting.without({agent}))
        until = time.monotonic() + self._timeouts.start_timeout
        joins = self._joins()
        while True:
            meeting = self._change(joins)
            if meeting.closed:
                raise RendezvousClosedError
            if meeting.complete and meeting.has(agent):
                self._turn = meeting.turn
                return meeting
            if time.monotonic() > until:
                self.leave()
                raise RendezvousTimeoutError
            time.sleep(self._look)

    def _joins(self) -> Callable[[Meeting], Meeting]:
        """Return the change by which this host takes part, leaves out silent hosts, and ends the last call."""
        last_call = _LastCall(self._fewest, self._timeouts, apart=self._look)

        def change(meeting: Meeting) -> Meeting:
            over = last_call.over(meeting)
            others = [host for host in (*meeting.members, *meeting.waiting) if host.agent != self._host.agent]
            there = meeting.without(self._silent(others))
            return there.joined_by(self._host, fewest=self._fewest, most=self._most, last_call_over=over)

        return change

    def announce(self, address: str, port: int) -> RoundPlace:
        """As the first member of a complete meeting: tell the others where the round's store is.

        Raises RendezvousConnectionError if the meeting is over.
        """
        scope = secrets.token_hex(16)

        def change(meeting: Meeting) -> Meeting:
            self._check(meeting)
            place = RoundPlace(address=address, port=port, number=meeting.begun, scope=scope)
            return replace(meeting, place=place, begun=meeting.begun + 1)

        place = self._change(change).place
        assert place is not None
        return place

    def place(self, within: float) -> RoundPlace:
        """As another member: wait for that. Raises RendezvousConnectionError if it isn't told in so many seconds."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            _, meeting = self._read()
            self._check(meeting)
            if meeting.place is not None:
                return meeting.place
            time.sleep(_PLACE_LOOK)
        raise RendezvousConnectionError("the first host has not told where the round's store is")

    def _check(self, meeting: Meeting) -> None:
        """Raise RendezvousConnectionError if the meeting that this host takes part in is over."""
        if meeting.turn != self._turn or not meeting.has(self._host.agent):
            raise RendezvousConnectionError("the meeting is over")

    def number_waiting(self) -> int:
        """Return how many hosts wait for the running round's end. A value of a stranger's is left out."""
        try:
            _, meeting = self._read()
        except ForeignValueError as error:
            self._store.leave_out(error)
            return 0
        # Others that took all members of this round for dead meet without them.
        return len(meeting.waiting) if meeting.turn == self._turn else max(1, len(meeting.members))

    @property
    def closed(self) -> bool:
        """Whether the job is over."""
        return self._read()[1].closed

    def close(self) -> None:
        """End the job for all hosts."""
        self._change(lambda meeting: replace(meeting, closed=True))

    def leave(self) -> None:
        """Take no more part, so that the others need not wait until this host is silent."""
        self._change(lambda meeting: meeting.without({self._host.agent}))

    def _read(self) -> tuple[bytes, Meeting]:
        """Return the meeting, and as what it is stored. Raises ForeignValueError."""
        if not self._store.raw.check([self._key]):
            raise self._store.foreign(self._key, _REMOVED)
        stored = self._store.raw.get(self._key)
        return stored, self._latest(stored)

    def _latest(self, stored: bytes) -> Meeting:
        meeting = self._store.opened(self._key, stored, Meeting)
        if meeting.version < self._version:
            raise self._store.foreign(self._key, "it is an old one that was put back")
        self._version = meeting.version
        return meeting

    def _change(self, change: Callable[[Meeting], Meeting]) -> Meeting:
        """Change the meeting, again if another host was faster; return what it is then. A closed one stays so."""
        stored, meeting = self._read()
        while True:
            changed = meeting if meeting.closed else change(meeting)
            if changed == meeting:
                return meeting
            before, new = stored, self._store.sealed(self._key, replace(changed, version=meeting.version + 1))
            stored = self._store.raw.compare_set(self._key, before.decode(), new)
            if stored == before:  # what a store answers that has no such key
                raise self._store.foreign(self._key, _REMOVED)
            meeting = self._latest(stored)
            if stored == new.encode():
                return meeting


class _LastCall:
    """Measures how long enough hosts have met, by a clock that stops while this process is stopped."""

    def __init__(self, fewest: int, timeouts: LaunchTimeouts, *, apart: float) -> None:
        self._fewest = fewest
        self._timeouts = timeouts
        self._clock = Clock(apart)
        self._since: tuple[int, float] | None = None  # turn of the meeting, and the time

    def over(self, meeting: Meeting) -> bool:
        """Whether the hosts of a meeting have waited long enough for more; to be called at every look."""
        now = self._clock.look()
        if meeting.complete or len(meeting.members) < self._fewest:
            self._since = None
            return False
        if self._since is None or self._since[0] != meeting.turn:
            self._since = meeting.turn, now
        calls = self._timeouts.later_join_timeout if meeting.begun else self._timeouts.join_timeout
        return now - self._since[1] >= calls
