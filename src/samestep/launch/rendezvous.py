"""The elastic agent's rendezvous: that of a job's hosts, PyTorch's own with short times, or of one host by itself.

PyTorch's c10d rendezvous keeps one store for all rounds, so that ranks of a later round can read what ranks of an
earlier one left there; here every round has a store of its own.
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
from samestep.launch.node_heartbeat import Lost, NodeHeartbeat, Peer, State
from samestep.launch.node_spec import Limits

_APART = 0.5  # seconds; PyTorch's rendezvous itself looks once a second


class Waiting:
    """Asks for the time of a round."""

    def __init__(self, rendezvous: RendezvousHandler) -> None:
        self.number = 0
        self._rendezvous = rendezvous
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; what is being asked is waited for, since the rendezvous serves one thread at a time."""
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        """A thread: how many hosts wait to join, asked twice a second."""
        while not self._over.wait(_APART):
            with suppress(RendezvousError, DistError):  # whether the store is there is found out elsewhere
                self.number = self._rendezvous.num_nodes_waiting()


BACKEND = "samestep-hosts"

# What PyTorch's stores and its rendezvous raise where the other side is gone.
BROKEN = (DistError, RendezvousConnectionError)

# seconds between two tries to reach a store
_PART = 10.0  # seconds that hosts which have met wait for a word of each other
_CLOSE = 5.0  # seconds that closing a job may take


@dataclass(frozen=True, kw_only=True)
class Member:
    """A host of a round."""

    node: int
    name: str
    address: str
    agent: str


@dataclass(frozen=True, kw_only=True)
class HostRound:
    """A round's hosts, in the order of their ranks."""

    number: int  # from 0
    members: tuple[Member, ...]
    first: bool  # whether this host is the first of them
    store: Store


class _NoHeartbeat:
    """That of a host which is alone: nobody hears it, and it hears nobody."""

    said: Mapping[int, Mapping[str, Any]] = {}
    all_done = True

    def enter(self, number: int, peers: Sequence[Peer], tells: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def leave(self, state: State) -> None:
        pass

    def done(self) -> None:
        pass


class SingleNodeRendezvous(RendezvousHandler):
    """One agent, which is complete by itself. The ranks meet in its store, which no other host reaches."""

    node = 0

    def __init__(self, run_id: str, name: str = "") -> None:
        """`name`: of this host, where messages are to say it."""
        self.name = name
        self.heartbeat = _NoHeartbeat()
        self.round: HostRound | None = None
        self._run_id = run_id
        self._posts: dict[str, dict[str, Any]] = {}
        self._asked = 0
        self._closed = False

    # What the elastic agent asks for.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round of this host alone, with a store of its own."""
        number = self.round.number + 1 if self.round is not None else 0
        store = store_at(LOOPBACK)
        member = Member(node=self.node, name=self.name, address=LOOPBACK, agent=self._run_id)
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

    # What samestep's agent asks for besides, as of MultiNodeRendezvous.

    def ask_for_round(self) -> None:
        self._asked = 1

    def leave(self) -> None:
        self.shutdown()

    def lost(self) -> Lost | None:
        return None

    def peers(self) -> tuple[Peer, ...]:
        return ()

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        self._posts[key] = dict(value)

    def posted(self, key: str) -> dict[str, Any] | None:
        return self._posts.get(key)


class MultiNodeRendezvous(RendezvousHandler):
    """One host's agent among several, or the only one of a job whose store another process serves."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Its configuration: node_rank, name and limits. Raises HostLostError where no store is at the endpoint."""
        self._parameters = parameters
        host, _, port = parameters.endpoint.rpartition(":")
        self._store_address, self._store_port = host.strip("[]"), int(port)
        self.limits: Limits = parameters.get("limits") or Limits()
        self.node: int = parameters.get("node_rank") or 0
        self._address: str = parameters.local_addr or address_towards(self._store_address)
        self.name: str = parameters.get("name") or self._address
        self._timeout = _Timeout(self.limits)
        self._store, self.heartbeat = self._reached()
        self._inner = self._handler(self._store)
        self._waiting: Waiting | None = None
        self._asked = 0
        self.round: HostRound | None = None

    # What the elastic agent asks for.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others, as often as hosts are lost while they meet.

        Raises HostLostError, and RendezvousClosedError where the job is over.
        """
        self._end_round()
        until = time.monotonic() + self.limits.meet
        while time.monotonic() < until:
            try:
                return self._meet()
            except RendezvousTimeoutError:
                break
            except BROKEN:
                if not self._answers():
                    self.come_back()
        raise HostLostError(
            f"{self.name}: fewer hosts than the {self._parameters.min_nodes} that the job needs have met in "
            f"{self.limits.meet:.0f} s"
        )

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As seen a moment ago: this doesn't wait for a store that does not answer."""
        return max(self._waiting.number if self._waiting is not None else 0, self._asked)

    def ask_for_round(self) -> None:
        """Let the elastic agent begin another round, as if a host waited for it."""
        self._asked = 1

    def shutdown(self) -> bool:
        """Close the job to all hosts; without effect where its store is gone."""
        self._end_round()
        self.heartbeat.close()
        with suppress(*BROKEN):
            return self._inner.shutdown()
        return False

    # What samestep's agent asks for besides.

    def leave(self) -> None:
        """Take part no more; the others go on where they may."""
        self._end_round()
        self.heartbeat.leave("failed")
        self.heartbeat.close()

    def lost(self) -> Lost | None:
        """Why the present round is over for this host; None where it is not."""
        return self.heartbeat.lost()

    def come_back(self) -> None:
        """Reach the store again after it was lost. Raises HostLostError where that takes too long."""
        at = self._store_address, self._store_port
        self.heartbeat.close()
        until = time.monotonic() + self.limits.come_back
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
        """Whether the connection to the job's store still stands."""
        try:
            self._store.check([self._key("rounds")])
        except DistError:
            return False
        return True

    def post(self, key: str, value: Mapping[str, Any]) -> None:
        """Tell all hosts of the job, those too that come later."""
        with suppress(*BROKEN):
            self._store.set(self._key(key), json.dumps(value))

    def posted(self, key: str) -> dict[str, Any] | None:
        """What a host has told; None where none did."""
        with suppress(*BROKEN):
            if self._store.check([self._key(key)]):
                return json.loads(self._store.get(self._key(key)))
        return None

    def _key(self, key: str) -> str:
        return f"samestep/{self._parameters.run_id}/{key}"

    def _reached(self, identity: bytes | None = None) -> tuple[TCPStore, NodeHeartbeat]:
        """The job's store and this host's heartbeat. Raises HostLostError where the store is gone."""
        at = self._store_address, self._store_port
        job = self._parameters.run_id
        try:
            store = store_client(*at, answer_within=self.limits.silence)
            return store, NodeHeartbeat(*at, job=job, node=self.node, limits=self.limits, identity=identity)
        except RuntimeError as error:
            raise HostLostError(f"{self.name}: no store of the job answers at {at[0]}:{at[1]}") from error

    def _handler(self, store: TCPStore) -> RendezvousHandler:
        """PyTorch's c10d rendezvous, with this host's place in its name, by which ranks are numbered."""
        parameters = self._parameters
        if parameters.max_nodes == 1:
            return SingleNodeRendezvous(parameters.run_id)
        return DynamicRendezvousHandler.from_backend(
            parameters.run_id,
            store,
            C10dRendezvousBackend(store, parameters.run_id),
            parameters.min_nodes,
            parameters.max_nodes,
            # PyTorch gives ranks in the order of these names.
            local_addr=f"{self.node:06d} {self.name}",
            timeout=self._timeout,
            keep_alive_interval=self.limits.keep_alive,
            keep_alive_max_attempt=3,
        )

    def _end_round(self) -> None:
        """Forget the round that is over."""
        if self._waiting is not None:
            self._waiting.close()
        self._waiting = self.round = None
        self._asked = 0

    def _meet(self) -> RendezvousInfo:
        """One meeting: PyTorch's rendezvous, then a store for the round.

        The host that got rank 0 serves the store and says where; the others wait 10 s for that. A host that paused
        between the two may have been left out meanwhile: its wait fails, and all meet once more.
        """
        self._timeout.first = not self._store.check([self._key("round/0")])
        with environment.own_bootstrap():
            met = self._inner.next_rendezvous()
        # Everything under met.store is this round's alone.
        if met.rank == 0:
            store = store_at(self._address)
            # PyTorch's own limit is five minutes, and a host that paused while all met may have been left out of the
            # round since: a host that waits for it meets once more, as all others of the round then do.
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
        self._waiting = Waiting(self._inner)
        return RendezvousInfo(
            store, met.rank, met.world_size, RendezvousStoreInfo(place["address"], int(place["port"]))
        )

    def _members(self, store: TCPStore, rank: int, size: int) -> tuple[Member, ...]:
        """The round's hosts in the order of their ranks; each tells itself through the round's store."""
        mine = Member(node=self.node, name=self.name, address=self._address, agent=self.heartbeat.agent)
        store.set(f"samestep/member/{rank}", json.dumps(asdict(mine)))
        found = store.multi_get([f"samestep/member/{each}" for each in range(size)])
        return tuple(Member(**json.loads(member)) for member in found)

    def peers(self) -> tuple[Peer, ...]:
        """The other hosts of the round."""
        members = self.round.members if self.round is not None else ()
        return tuple(
            Peer(node=each.node, name=each.name, agent=each.agent) for each in members if each.node != self.node
        )


NodeRendezvous = MultiNodeRendezvous | SingleNodeRendezvous


class _Timeout(RendezvousTimeout):
    """Hosts come one by one when a job is started, and all at once when it goes on."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(join=timedelta(seconds=limits.meet), close=timedelta(seconds=_CLOSE))
        self._limits = limits
        self.first = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=self._limits.first_call if self.first else self._limits.last_call)
