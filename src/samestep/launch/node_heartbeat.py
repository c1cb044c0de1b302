"""Publishes this node's heartbeat through the hosts' store, and detects nodes whose heartbeat has stopped.

A thread with a connection of its own sends the heartbeats, so that a long call of the elastic agent stops none of
them. `lost` judges by a clock that stands still while this process does, so that an agent that was paused for a
while doesn't take the others for dead.
"""

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed import TCPStore

from samestep.fault_tolerance.watchdog import Clock
from samestep.launch.network import reach, store_client
from samestep.launch.node_spec import Limits

State = Literal["meets", "runs", "failed", "changes", "done"]

_LOOKS = 0.1  # seconds between two calls of `lost`, at most
_LAST = 1.0  # seconds for the last word
_GONE = 1.0  # seconds after which a store that refuses a connection counts as ended


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another host of the present round."""

    node: int
    name: str
    agent: str  # which of the agents that may have run on that host


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Why this host's ranks can't go on."""

    what: Literal["host", "store", "round"]  # silent, out of reach, left by a host that is still there
    host: str
    seconds: float = 0.0
    state: State = "failed"  # of the host that left

    def __str__(self) -> str:
        """What a host, or the store, has not done, for how long."""
        if self.what == "host":
            return f"{self.host} has sent no heartbeat for {self.seconds:.1f} s"
        if self.what == "store":
            return f"the store of the job at {self.host} has not answered for {self.seconds:.1f} s"
        return f"{self.host} has left the round"


class NodeHeartbeat:
    """Sends this host's heartbeats, and watches those of the others."""

    def __init__(
        self, address: str, port: int, *, job: str, node: int, limits: Limits, identity: bytes | None = None
    ) -> None:
        """The store is at `address`:`port`. Raises RuntimeError where none answers, or another than `identity`."""
        self._address, self._port = address, port
        self._limits = limits
        self._prefix = f"samestep/{job}"
        self._node = node
        self.agent = uuid.uuid4().hex
        self._tells: Callable[[], Mapping[str, Any]] = dict
        self._round, self._state, self._count = -1, "meets", 0
        self._peers: Sequence[Peer] = ()
        self._said: Mapping[int, Mapping[str, Any]] = {}  # node -> its last word
        self._answers = 0
        self._refused = False
        self._store: TCPStore | None = store_client(address, port, answer_within=limits.silence)
        self.identity = self._store.compare_set(f"{self._prefix}/identity", "", uuid.uuid4().hex)
        if identity not in (None, self.identity):
            raise RuntimeError("another store stands where this job's was")
        self._replaced = False
        self._mind = _Mind(limits)
        self._beat(self._store)
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alive", daemon=True)
        self._thread.start()

    def enter(self, number: int, peers: Sequence[Peer], tells: Callable[[], Mapping[str, Any]]) -> None:
        """A round has begun. `tells` gives what the others are to know of this host's ranks."""
        self._mind = _Mind(self._limits)
        self._said = {}  # what was said in an earlier round may be of an agent that is no more
        self._tells = tells
        self._state = "runs"
        self._round, self._peers = number, peers

    def leave(self, state: State) -> None:
        """This host's ranks have ended, or will now; without effect where they have done all."""
        self._state = "done" if self._state == "done" else state
        self._tells = dict
        if state != "changes":  # ranks that save for a change would wait for those of a host that is lost meanwhile
            self._peers = ()
        self._wake.set()

    def done(self) -> None:
        """This host's ranks have done all that there was to do."""
        self._state = "done"
        self._wake.set()

    @property
    def all_done(self) -> bool:
        """Whether the ranks of all hosts of the round have."""
        said = self._said
        return all(said.get(peer.node, {}).get("state") == "done" for peer in self._peers)

    @property
    def said(self) -> Mapping[int, Mapping[str, Any]]:
        """What the hosts of this round told last, by node rank."""
        return {node: word for node, word in self._said.items() if word.get("round") == self._round}

    def lost(self) -> Lost | None:
        """Why this round is over for this host's ranks; None where it isn't. To be asked every tenth of a second."""
        store = f"{self._address}:{self._port}"
        if self._replaced:
            return Lost(what="store", host=store, seconds=self._mind.store_silent)
        said, peers = self._said, self._peers
        self._mind.look(self._answers, said)
        if self._mind.store_silent > (_GONE if self._refused else self._limits.silence):
            return Lost(what="store", host=store, seconds=self._mind.store_silent)
        for peer in peers:
            word = said.get(peer.node)
            if word is None or word["state"] == "done":
                continue
            if word["agent"] != peer.agent:
                return Lost(what="round", host=peer.name)
            # Its first word of this round may still be to come.
            if word["round"] > self._round or (word["round"] == self._round and word["state"] != "runs"):
                return Lost(what="round", host=peer.name, state=word["state"])
            if (seconds := self._mind.silent(peer.node)) > self._limits.silence:
                return Lost(what="host", host=peer.name, seconds=seconds)
        return None

    def close(self) -> None:
        """Send a last heartbeat, where the store still answers."""
        self._over = True
        self._wake.set()
        self._thread.join(_LAST)

    def _run(self) -> None:
        """The thread: a heartbeat every half second, over a connection that is made anew where it breaks.

        Ends with one more heartbeat that tells the host's last state, so that the others need not wait for its
        silence.
        """
        over = False
        while not over:
            self._wake.wait(self._limits.beat)
            self._wake.clear()
            over = self._over  # read before the last heartbeat, which then has the state in which it ended
            try:
                if self._store is None:
                    self._store = self._connected()
                self._beat(self._store)
            except (RuntimeError, ValueError):  # what PyTorch's stores raise
                self._store = None
                self._refused = reach(self._address, self._port, within=1.0) == "refuses"

    def _connected(self) -> TCPStore:
        """A connection to the store, once its port answers within a second. Notes a store of another life."""
        if reach(self._address, self._port, within=1.0) != "answers":
            raise RuntimeError("nobody is there")
        store = store_client(self._address, self._port, answer_within=self._limits.silence)
        self._refused = False
        # Another store at the same place knows nothing of this job.
        self._replaced = store.compare_set(f"{self._prefix}/identity", "", "another") != self.identity
        return store

    def _beat(self, store: TCPStore) -> None:
        """Set this host's word (a count that grows, round, state, what its ranks do), read the peers' words."""
        self._count += 1
        word = {
            "agent": self.agent,
            "count": self._count,
            "round": self._round,
            "state": self._state,
            **self._tells(),
        }
        store.set(self._key(self._node), json.dumps(word))
        peers = self._peers
        nodes = [peer.node for peer in peers]
        if nodes:
            words = store.multi_get([self._key(node) for node in nodes])
            if peers is self._peers:  # no other round has begun meanwhile
                self._said = {node: json.loads(word) for node, word in zip(nodes, words, strict=True)}
        self._answers += 1

    def _key(self, node: int) -> str:
        return f"{self._prefix}/alive/{node}"


class _Mind:
    """How long each has been silent."""

    def __init__(self, limits: Limits) -> None:
        self._clock = Clock(_LOOKS)
        self._beat = limits.beat
        self._answers = -1
        self._answered_at = self._looked_at = 0.0
        self._last: dict[int, Any] = {}
        self._silent: dict[int, float] = {}

    def look(self, answers: int, said: Mapping[int, Mapping[str, Any]]) -> None:
        """Add to each host's silence (seconds) the time since the last look, unless its count has grown.

        Seconds are those of a clock that stands still while this process does, and don't count while the store
        doesn't answer.
        """
        now = self._clock.look()
        since, self._looked_at = now - self._looked_at, now
        if answers != self._answers:
            self._answers, self._answered_at = answers, now
        # While the store didn't answer, no host counts as silent.
        hears = now - self._answered_at <= 2 * self._beat
        for node, word in said.items():
            count = word["agent"], word["count"]
            if count != self._last.get(node):
                self._last[node], self._silent[node] = count, 0.0
            elif hears:
                self._silent[node] += since

    @property
    def store_silent(self) -> float:
        """Seconds."""
        return self._looked_at - self._answered_at

    def silent(self, node: int) -> float:
        """Seconds."""
        return self._silent.get(node, 0.0)
