"""Rendezvous of elastic agents: PyTorch's, with short timeouts, for several hosts; or of a single host.

PyTorch's c10d rendezvous uses one store for all rounds, in which later ranks could read what earlier ones left; here
every round has its own store.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from samestep import environment
from samestep.errors import HostLostError
from samestep.launch.network import LOOPBACK, address_towards, reach, store_at, store_client
from samestep.launch.node_heartbeat import NodeHeartbeat, Peer, RoundEndReason, State
from samestep.launch.options import LaunchTimeouts

_APART = 0.5  # seconds between polls; PyTorch's rendezvous polls once a second


class WaitingHosts:
    """Polls, during a round, for hosts that wait to join."""

    def __init__(self, rendezvous: RendezvousHandler) -> None:
        self.number = 0
        self._rendezvous = rendezvous
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling, and wait for the current poll, since the rendezvous isn't thread-safe."""
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        """Thread: polls the number of waiting hosts twice a second."""
        while not self._over.wait(_APART):
            with suppress(RendezvousError, DistError):  # a lost store is detected elsewhere
                self.number = self._rendezvous.num_nodes_waiting()


BACKEND = "samestep-hosts"

# Raised by PyTorch's stores and rendezvous if the other side is gone.
BROKEN = (DistError, RendezvousConnectionError)

# seconds between two tries to reach a store
_PART = 10.0  # seconds that hosts of a new round wait for each other's data
_CLOSE = 5.0  # seconds to close a job


@dataclass(frozen=True, kw_only=True)
class RoundMember:
    """A host of a round."""

    node: int
    name: str
    address: str
    agent: str


@dataclass(frozen=True, kw_only=True)
class HostRound:
    """A round's hosts in the order of their ranks, and its store."""

    number: int  # from 0
    members: tuple[RoundMember, ...]
    first: bool  # whether this host is the first one
    store: Store


class _NoHeartbeat:
    """Stand-in for the heartbeat in a single-host job."""

    said: Mapping[int, Mapping[str, Any]] = {}
    all_done = True

    def enter(self, number: int, peers: Sequence[Peer], tells: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def leave(self, state: State) -> None:
        pass

    def done(self) -> None:
        pass


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous of a single agent. Its store is not reachable from other hosts."""

    node = 0

    def __init__(self, run_id: str, name: str = "") -> None:
        """`name`: this host's name in messages, if needed."""
        self.name = name
        self.heartbeat = _NoHeartbeat()
        self.round: HostRound | None = None
        self._run_id = run_id
        self._posts: dict[str, dict[str, Any]] = {}
        self._asked = 0
        self._closed = False

    # Interface of RendezvousHandler.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin the next round, with its own store."""
        number = self.round.number + 1 if self.round is not None else 0
        store = store_at(LOOPBACK)
        member = RoundMember(node=self.node, name=self.name, address=LOOPBACK, agent=self._run_id)
        self.round = HostRound(number=number, members=(member,), first=True, store=store)
        self._asked = 0
        self.post(f"round/{number}", {"members": [asdict(member)]})
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return self._asked

    def shutdown(self) -> bool:
        self._closed = True
        return True

    # Further methods for samestep's agent, as in MultiNodeRendezvous.

    def ask_for_round(self) -> None:
        self._asked = 1

    def leave(self) -> None:
        self.shutdown()

    def lost(self) -> RoundEndReason | None:
        return None

    def peers(self) -> tuple[Peer, ...]:
        return ()

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        self._posts[key] = dict(value)

    def posted(self, key: str) -> dict[str, Any] | None:
        return self._posts.get(key)


class MultiNodeRendezvous(RendezvousHandler):
    """Rendezvous of one host's agent with others, or of the only host of a job whose store another process serves."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Connect to the store. `parameters` has node_rank, name, timeouts. Raises HostLostError if none answers."""
        self._parameters = parameters
        host, _, port = parameters.endpoint.rpartition(":")
        self._store_address, self._store_port = host.strip("[]"), int(port)
        self.timeouts: LaunchTimeouts = parameters.get("timeouts") or LaunchTimeouts()
        self.node: int = parameters.get("node_rank") or 0
        self._address: str = parameters.local_addr or address_towards(self._store_address)
        self.name: str = parameters.get("name") or self._address
        self._timeout = _Timeout(self.timeouts)
        self._store, self.heartbeat = self._reached()
        self._inner = self._handler(self._store)
        self._waiting: WaitingHosts | None = None
        self._asked = 0
        self.round: HostRound | None = None

    # Interface of RendezvousHandler.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Rendezvous with the other hosts, repeatedly if hosts are lost meanwhile.

        Raises HostLostError, and RendezvousClosedError if the job is over.
        """
        self._end_round()
        until = time.monotonic() + self.timeouts.start_timeout
        while time.monotonic() < until:
            try:
                return self._meet()
            except RendezvousTimeoutError:
                break
            except BROKEN:
                if not self._answers():
                    self.reconnect()
        raise HostLostError(
            f"{self.name}: fewer hosts than the {self._parameters.min_nodes} that the job needs have met in "
            f"{self.timeouts.start_timeout:.0f} s"
        )

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the last polled number, without waiting for a store that doesn't answer."""
        return max(self._waiting.number if self._waiting is not None else 0, self._asked)

    def ask_for_round(self) -> None:
        """Make the elastic agent begin another round, as if a host were waiting to join."""
        self._asked = 1

    def shutdown(self) -> bool:
        """Close the job for all hosts; no effect if its store is gone."""
        self._end_round()
        self.heartbeat.close()
        with suppress(*BROKEN):
            return self._inner.shutdown()
        return False

    # Further methods for samestep's agent.

    def leave(self) -> None:
        """Leave the job; the other hosts go on if they can."""
        self._end_round()
        self.heartbeat.leave("failed")
        self.heartbeat.close()

    def lost(self) -> RoundEndReason | None:
        """Return why the current round is over for this host; None if it isn't."""
        return self.heartbeat.lost()

    def reconnect(self) -> None:
        """Reconnect to the store after it was lost. Raises HostLostError after the timeout."""
        at = self._store_address, self._store_port
        self.heartbeat.close()
        until = time.monotonic() + self.timeouts.rejoin_timeout
        while True:
            found = reach(*at, within=min(1.0, max(0.1, until - time.monotonic())))
            if found == "answers":
                with suppress(HostLostError):
                    self._store, self.heartbeat = self._reached(self.heartbeat.identity)
                    break
            if found == "refuses" or time.monotonic() > until:
                what = "has ended" if found == "refuses" else "could not be reached again"
                raise HostLostError(
                    f"{self.name}: the job's store at {at[0]}:{at[1]} {what}, so its part of the job ends; started "
                    "again with --resume, the training goes on from its last checkpoint"
                )
            time.sleep(min(_APART, max(0.0, until - time.monotonic())))
        self._inner = self._handler(self._store)

    def _answers(self) -> bool:
        """Whether the connection to the job's store works."""
        try:
            self._store.check([self._key("rounds")])
        except DistError:
            return False
        return True

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        """Post a value for all hosts of the job, including later ones."""
        with suppress(*BROKEN):
            self._store.set(self._key(key), json.dumps(value))

    def posted(self, key: str) -> dict[str, Any] | None:
        """Return a posted value; None if there is none."""
        with suppress(*BROKEN):
            if self._store.check([self._key(key)]):
                return json.loads(self._store.get(self._key(key)))
        return None

    def _key(self, key: str) -> str:
        return f"samestep/{self._parameters.run_id}/{key}"

    def _reached(self, identity: bytes | None = None) -> tuple[TCPStore, NodeHeartbeat]:
        """Connect to the job's store, and start this host's heartbeat. Raises HostLostError if the store is gone."""
        at = self._store_address, self._store_port
        job = self._parameters.run_id
        try:
            store = store_client(*at, answer_within=self.timeouts.heartbeat_timeout)
            return store, NodeHeartbeat(*at, job=job, node=self.node, timeouts=self.timeouts, identity=identity)
        except RuntimeError as error:
            raise HostLostError(f"{self.name}: no store of the job answers at {at[0]}:{at[1]}") from error

    def _handler(self, store: TCPStore) -> RendezvousHandler:
        """Build PyTorch's c10d rendezvous, with the node rank in this host's name, by which PyTorch numbers hosts."""
        parameters = self._parameters
        if parameters.max_nodes == 1:
            return SingleNodeRendezvous(parameters.run_id)
        return DynamicRendezvousHandler.from_backend(
            parameters.run_id,
            store,
            C10dRendezvousBackend(store, parameters.run_id),
            parameters.min_nodes,
            parameters.max_nodes,
            # PyTorch orders ranks by these names.
            local_addr=f"{self.node:06d} {self.name}",
            timeout=self._timeout,
            keep_alive_interval=self.timeouts.rendezvous_interval,
            keep_alive_max_attempt=3,
        )

    def _end_round(self) -> None:
        """Forget the finished round."""
        if self._waiting is not None:
            self._waiting.close()
        self._waiting = self.round = None
        self._asked = 0

    def _meet(self) -> RendezvousInfo:
        """Run PyTorch's rendezvous once, and create or find the round's store.

        The host that got rank 0 serves the store and says where; the others wait 10 s for that. A host that paused
        between the two may have been left out meanwhile: its wait fails, and all meet once more.
        """
        self._timeout.first = not self._store.check([self._key("round/0")])
        with environment.own_bootstrap():
            met = self._inner.next_rendezvous()
        # met.store is used by this round only.
        if met.rank == 0:
            store = store_at(self._address)
            # Not PyTorch's five minutes: a host that was paused may have been left out of the round, so the host that
            # waits for it repeats the rendezvous, and then all others do.
            store.set_timeout(timedelta(seconds=_PART))
            number = self._store.add(self._key("rounds"), 1) - 1
            place = {"address": self._address, "port": store.port, "number": number}
            met.store.set("samestep/place", json.dumps(place))
        else:
            met.store.wait(["samestep/place"])
            place = json.loads(met.store.get("samestep/place"))
            store = store_client(place["address"], place["port"], answer_within=_PART)
        members = self._members(store, met.rank, met.world_size)
        self.round = HostRound(number=place["number"], members=members, first=met.rank == 0, store=store)
        if met.rank == 0:
            self.post(f"round/{self.round.number}", {"members": [asdict(member) for member in members]})
        self._waiting = WaitingHosts(self._inner)
        return RendezvousInfo(
            store, met.rank, met.world_size, RendezvousStoreInfo(place["address"], int(place["port"]))
        )

    def _members(self, store: TCPStore, rank: int, size: int) -> tuple[RoundMember, ...]:
        """Exchange the hosts' data through the round's store; return the hosts in the order of their ranks."""
        mine = RoundMember(node=self.node, name=self.name, address=self._address, agent=self.heartbeat.agent)
        store.set(f"samestep/member/{rank}", json.dumps(asdict(mine)))
        found = store.multi_get([f"samestep/member/{each}" for each in range(size)])
        return tuple(RoundMember(**json.loads(member)) for member in found)

    def peers(self) -> tuple[Peer, ...]:
        """Return the other hosts of the round."""
        members = self.round.members if self.round is not None else ()
        return tuple(
            Peer(node=each.node, name=each.name, agent=each.agent) for each in members if each.node != self.node
        )


NodeRendezvous = MultiNodeRendezvous | SingleNodeRendezvous


class _Timeout(RendezvousTimeout):
    """Rendezvous timeouts: hosts come one by one at a job's start, and together later."""

    def __init__(self, timeouts: LaunchTimeouts) -> None:
        super().__init__(join=timedelta(seconds=timeouts.start_timeout), close=timedelta(seconds=_CLOSE))
        self._timeouts = timeouts
        self.first = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=self._timeouts.join_timeout if self.first else self._timeouts.later_join_timeout)
