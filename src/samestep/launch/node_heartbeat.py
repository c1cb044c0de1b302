"""Publishes this node's heartbeat in the job's store, and detects nodes whose heartbeat has stopped.

A thread with its own connection sends the heartbeats, so that a long call of the elastic agent delays none. `lost`
uses a clock that stops while this process is stopped, so that a paused agent doesn't take the others for dead.
"""

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from samestep.fault_tolerance.status import Counts, Progress
from samestep.fault_tolerance.watchdog import Clock
from samestep.launch.job_secret import JobSecret
from samestep.launch.network import reach, store_client
from samestep.launch.options import LaunchTimeouts
from samestep.launch.signed_store import ForeignValueError, Name, Number, SignedStore, where_hosts_meet

State = Literal["meets", "runs", "failed", "changes", "done"]

_LOOKS = 0.1  # maximum seconds between two calls of `lost`
_LAST = 1.0  # seconds for the last heartbeat
_GONE = 1.0  # seconds after which a store that refuses a connection counts as ended


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another host of the current round."""

    node: int
    name: str
    agent: str  # id of the agent process, new after a restart of the host's agent


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """A heartbeat: what a host tells of itself."""

    agent: Name
    count: Number  # of this agent's heartbeats; one with a lower count is an old one
    round: Annotated[int, Ge(-1)]
    state: State
    ranks: tuple[Progress, ...] = ()  # times since 1970
    entered: Mapping[int, Counts] = field(default_factory=dict)  # rank -> collectives


@dataclass(frozen=True, kw_only=True)
class RoundEndReason:
    """The reason why this host's round is over."""

    what: Literal["host", "store", "round"]  # no heartbeat; unreachable; left by a live host
    host: str
    seconds: float = 0.0
    state: State = "failed"  # of the host that left

    def __str__(self) -> str:
        """Describe which host or store was lost, and for how long."""
        if self.what == "host":
            return f"{self.host} has sent no heartbeat for {self.seconds:.1f} s"
        if self.what == "store":
            return f"the store of the job at {self.host} has not answered for {self.seconds:.1f} s"
        return f"{self.host} has left the round"


class NodeHeartbeat:
    """Sends this host's heartbeats, and monitors the other hosts'."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        job: str,
        node: int,
        timeouts: LaunchTimeouts,
        secret: JobSecret | None = None,
        identity: str | None = None,
    ) -> None:
        """Connect to the store. Raises RuntimeError if none answers, or its identity isn't `identity`."""
        self._address, self._port = address, port
        self._secret = secret
        self._timeouts = timeouts
        self._prefix = f"samestep/{job}"
        self._node = node
        self.agent = uuid.uuid4().hex
        self._tells: Callable[[], Mapping[str, Any]] = dict
        self._round, self._count = -1, 0
        self._state: State = "meets"
        self._peers: Sequence[Peer] = ()
        self._said: Mapping[int, HostStatus] = {}  # node -> its last heartbeat
        self._answers = 0
        self._refused = False
        self._store: SignedStore | None = self._opened()
        self.identity = self._store.scope
        if identity not in (None, self.identity):
            raise RuntimeError("another store stands where this job's was")
        self._replaced = False
        self._silence = _SilenceClock(timeouts)
        self._beat(self._store)
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)
        self._thread.start()

    def enter(self, number: int, peers: Sequence[Peer], tells: Callable[[], Mapping[str, Any]]) -> None:
        """Start of a round. `tells` returns the status of this host's ranks for the other hosts."""
        self._silence = _SilenceClock(self._timeouts)
        self._said = {}  # an earlier round's heartbeats may be of a former agent
        self._tells = tells
        self._state = "runs"
        self._round, self._peers = number, peers

    def leave(self, state: State) -> None:
        """Announce that this host's ranks end now; no effect if they are done."""
        self._state = "done" if self._state == "done" else state
        self._tells = dict
        if state != "changes":  # ranks that save still watch for lost hosts, whose ranks they would wait for
            self._peers = ()
        self._wake.set()

    def done(self) -> None:
        """Announce that this host's ranks are done."""
        self._state = "done"
        self._wake.set()

    @property
    def all_done(self) -> bool:
        """Whether all hosts of the round have announced that."""
        statuses = self._said
        return all(peer.node in statuses and statuses[peer.node].state == "done" for peer in self._peers)

    @property
    def said(self) -> Mapping[int, HostStatus]:
        """Last heartbeats of this round, by node rank."""
        return {node: status for node, status in self._said.items() if status.round == self._round}

    def silent(self, hosts: Sequence[Peer]) -> set[str]:
        """Return the agents of those hosts that meet for a round whose heartbeat has stopped.

        To be called every tenth of a second.
        """
        if hosts != self._peers:  # the thread compares identities
            self._peers = hosts
        self._silence.look(self._answers, self._said)
        limit = self._timeouts.meeting_silence
        return {host.agent for host in hosts if self._silence.silent(host.node) > limit}

    def lost(self) -> RoundEndReason | None:
        """Return why this round is over for this host; None if it isn't. To be called every tenth of a second."""
        store = f"{self._address}:{self._port}"
        if self._replaced:
            return RoundEndReason(what="store", host=store, seconds=self._silence.store_silent)
        statuses, peers = self._said, self._peers
        self._silence.look(self._answers, statuses)
        if self._silence.store_silent > (_GONE if self._refused else self._timeouts.heartbeat_timeout):
            return RoundEndReason(what="store", host=store, seconds=self._silence.store_silent)
        for peer in peers:
            status = statuses.get(peer.node)
            if status is None or status.state == "done":
                continue
            if status.agent != peer.agent:
                return RoundEndReason(what="round", host=peer.name)
            # Its first heartbeat of this round may still be missing.
            if status.round > self._round or (status.round == self._round and status.state != "runs"):
                return RoundEndReason(what="round", host=peer.name, state=status.state)
            if (seconds := self._silence.silent(peer.node)) > self._timeouts.heartbeat_timeout:
                return RoundEndReason(what="host", host=peer.name, seconds=seconds)
        return None

    def close(self) -> None:
        """Send a last heartbeat if the store still answers, and stop."""
        self._over = True
        self._wake.set()
        self._thread.join(_LAST)

    def _run(self) -> None:
        """Thread: sends a heartbeat every half second, and reconnects when the connection breaks.

        The last heartbeat carries the host's final state, so that the others need not wait for the timeout.
        """
        over = False
        while not over:
            self._wake.wait(self._timeouts.heartbeat_interval)
            self._wake.clear()
            over = self._over  # read before the heartbeat, so that the last one has the final state
            try:
                if self._store is None:
                    self._store = self._connected()
                self._beat(self._store)
            except (RuntimeError, ValueError):  # what PyTorch's stores raise
                self._store = None
                self._refused = reach(self._address, self._port, within=1.0) == "refuses"

    def _opened(self) -> SignedStore:
        """Connect to the store. Raises RuntimeError if none answers, ForeignValueError if it is another job's."""
        store = store_client(self._address, self._port, answer_within=self._timeouts.heartbeat_timeout)
        return where_hosts_meet(store, self._secret, f"{self._address}:{self._port}")

    def _connected(self) -> SignedStore:
        """Connect to the store if its port answers within a second, and check that it is the same store."""
        if reach(self._address, self._port, within=1.0) != "answers":
            raise RuntimeError("nothing answers there")
        try:
            store = self._opened()
        except ForeignValueError:
            self._replaced = True
            raise RuntimeError("another store stands where this job's was") from None
        self._refused = False
        self._replaced = store.scope != self.identity  # a new store at this address has no data of this job
        return store

    def _beat(self, store: SignedStore) -> None:
        """Write this host's heartbeat (count, round, state, ranks' status), and read the peers'."""
        self._count += 1
        told: Mapping[str, Any] = self._tells()
        store.write(
            self._key(self._node),
            HostStatus(agent=self.agent, count=self._count, round=self._round, state=self._state, **told),
        )
        peers = self._peers
        if peers:
            before, nodes = self._said, [peer.node for peer in peers]
            read = store.read_all_own([self._key(node) for node in nodes], HostStatus)
            statuses = {node: _later(before.get(node), status) for node, status in zip(nodes, read, strict=True)}
            if peers is self._peers:  # unless another round has begun
                self._said = {node: status for node, status in statuses.items() if status is not None}
        self._answers += 1

    def _key(self, node: int) -> str:
        return f"{self._prefix}/alive/{node}"


def _later(before: HostStatus | None, now: HostStatus | None) -> HostStatus | None:
    """Return the later one of two heartbeats of a host: an old one that was put back does not count."""
    if before is None or now is None:
        return before if now is None else now
    return before if before.agent == now.agent and now.count < before.count else now


class _SilenceClock:
    """Measures how long each peer, and the store, has been silent."""

    def __init__(self, timeouts: LaunchTimeouts) -> None:
        self._clock = Clock(_LOOKS)
        self._beat = timeouts.heartbeat_interval
        self._answers = -1
        self._answered_at = self._looked_at = 0.0
        self._last: dict[int, Any] = {}
        self._silent: dict[int, float] = {}

    def look(self, answers: int, statuses: Mapping[int, HostStatus]) -> None:
        """Add the time since the last call to each peer's silence (seconds), or reset it if its count has changed.

        Time doesn't count while this process is stopped, nor while the store doesn't answer.
        """
        now = self._clock.look()
        since, self._looked_at = now - self._looked_at, now
        if answers != self._answers:
            self._answers, self._answered_at = answers, now
        # No host counts as silent while the store doesn't answer.
        hears = now - self._answered_at <= 2 * self._beat
        for node, status in statuses.items():
            count = status.agent, status.count
            if count != self._last.get(node):
                self._last[node], self._silent[node] = count, 0.0
            elif hears:
                self._silent[node] += since

    @property
    def store_silent(self) -> float:
        """Seconds since the store last answered."""
        return self._looked_at - self._answered_at

    def silent(self, node: int) -> float:
        """Seconds since a peer's last heartbeat."""
        return self._silent.get(node, 0.0)
