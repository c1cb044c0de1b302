"""Rendezvous of elastic agents: of several hosts through the job's store (`membership`), or of a single host.

Every round has its own store, which its first host serves: later ranks can't read what earlier ones left.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from samestep.errors import HostLostError
from samestep.launch.job_secret import JobSecret
from samestep.launch.membership import Meeting, Membership, RoundMember
from samestep.launch.network import LOOPBACK, address_towards, reach, store_at, store_client
from samestep.launch.node_heartbeat import HostStatus, NodeHeartbeat, Peer, RoundEndReason, State
from samestep.launch.options import LaunchTimeouts
from samestep.launch.signed_store import ForeignValueError, Form, SignedStore, where_hosts_meet

_APART = 0.5  # seconds between polls


class WaitingHosts:
    """Polls, during a round, for hosts that wait to join."""

    def __init__(self, membership: Membership) -> None:
        self.number = 0
        self._membership = membership
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling, and wait for the current poll, since the membership isn't thread-safe."""
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        """Thread: polls the number of waiting hosts twice a second."""
        while not self._over.wait(_APART):
            with suppress(RendezvousError, DistError):  # a lost store is detected elsewhere
                self.number = self._membership.number_waiting()


BACKEND = "samestep-hosts"

# Raised by PyTorch's stores and rendezvous if the other side is gone.
BROKEN = (DistError, RendezvousConnectionError)

_PART = 10.0  # seconds that hosts of a new round wait for each other


@dataclass(frozen=True, kw_only=True)
class HostRound:
    """A round's hosts in the order of their ranks, and its store."""

    number: int  # from 0
    members: tuple[RoundMember, ...]
    first: bool  # whether this host is the first one
    store: SignedStore

    @property
    def key(self) -> str:
        """The key of this round's post for later rounds."""
        return round_key(self.number)


@dataclass(frozen=True, kw_only=True)
class RoundPost:
    """The post by which later rounds know who took part in a round."""

    members: tuple[RoundMember, ...]


def round_key(number: int) -> str:
    """The key of that post."""
    return f"round/{number}"


class _NoHeartbeat:
    """Stand-in for the heartbeat in a single-host job."""

    said: Mapping[int, HostStatus] = {}
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
        self._posts: dict[str, Any] = {}
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
        # No other agent reads what this one writes, and other users of this host reach the store.
        signed = SignedStore(store, JobSecret.made(), scope=str(number), where=f"{LOOPBACK}:{store.port}")
        self.round = HostRound(number=number, members=(member,), first=True, store=signed)
        self._asked = 0
        self.post(round_key(number), RoundPost(members=(member,)))
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

    def post(self, key: str, value: object) -> None:
        self._posts[key] = value

    def posted(self, key: str, form: type[Form]) -> Form | None:
        return self._posts.get(key)


class MultiNodeRendezvous(RendezvousHandler):
    """Rendezvous of one host's agent with others, or of the only host of a job whose store another process serves."""

    def __init__(self, parameters: RendezvousParameters, secret: JobSecret | None = None) -> None:
        """Connect to the store. `parameters` has node_rank, name, timeouts. Raises HostLostError if none answers."""
        self._parameters = parameters
        self._secret = secret
        host, _, port = parameters.endpoint.rpartition(":")
        self._store_address, self._store_port = host.strip("[]"), int(port)
        self.timeouts: LaunchTimeouts = parameters.get("timeouts") or LaunchTimeouts()
        self.node: int = parameters.get("node_rank") or 0
        self._address: str = parameters.local_addr or address_towards(self._store_address)
        self.name: str = parameters.get("name") or self._address
        self._store, self.heartbeat = self._reached()
        self._membership = self._member()
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
        return self._membership.closed

    def set_closed(self) -> None:
        self._membership.close()

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
        with suppress(*BROKEN, ForeignValueError):
            self._membership.close()
            return True
        return False

    # Further methods for samestep's agent.

    def leave(self) -> None:
        """Leave the job; the other hosts go on if they can."""
        self._end_round()
        self.heartbeat.leave("failed")
        self.heartbeat.close()
        with suppress(*BROKEN, ForeignValueError):
            self._membership.leave()

    def lost(self) -> RoundEndReason | None:
        """Return why the current round is over for this host; None if it isn't."""
        return self.heartbeat.lost()

    def reconnect(self) -> None:
        """Reconnect to the store after it was lost. Raises HostLostError after the timeout."""
        at = self._store_address, self._store_port
        self.heartbeat.close()
        until = time.monotonic() + self.timeouts.rejoin_timeout
        while True:
            answer = reach(*at, within=min(1.0, max(0.1, until - time.monotonic())))
            if answer == "answers":
                try:
                    self._store, self.heartbeat = self._reached(self.heartbeat.identity)
                    break
                except ForeignValueError:
                    raise
                except HostLostError:
                    pass
            if answer == "refuses" or time.monotonic() > until:
                what = "has ended" if answer == "refuses" else "could not be reached again"
                raise HostLostError(
                    f"{self.name}: the job's store at {at[0]}:{at[1]} {what}, so its part of the job ends; started "
                    "again with --resume, the training goes on from its last checkpoint"
                )
            time.sleep(min(_APART, max(0.0, until - time.monotonic())))
        self._membership = self._member()

    def _answers(self) -> bool:
        """Whether the connection to the job's store works."""
        try:
            self._store.raw.check([self._key("meeting")])
        except DistError:
            return False
        return True

    def post(self, key: str, value: object) -> None:
        """Post a value for all hosts of the job, including later ones."""
        with suppress(*BROKEN):
            self._store.write(self._key(key), value)

    def posted(self, key: str, form: type[Form]) -> Form | None:
        """Return a posted value; None if there is none that a host of the job wrote."""
        with suppress(*BROKEN):
            return self._store.read_own(self._key(key), form)
        return None

    def _key(self, key: str) -> str:
        return f"samestep/{self._parameters.run_id}/{key}"

    def _reached(self, identity: str | None = None) -> tuple[SignedStore, NodeHeartbeat]:
        """Connect to the job's store, and start this host's heartbeat. Raises HostLostError if the store is gone."""
        at = self._store_address, self._store_port
        where, job = f"{at[0]}:{at[1]}", self._parameters.run_id
        try:
            store = store_client(*at, answer_within=self.timeouts.heartbeat_timeout)
            heartbeat = NodeHeartbeat(
                *at, job=job, node=self.node, timeouts=self.timeouts, secret=self._secret, identity=identity
            )
            return where_hosts_meet(store, self._secret, where), heartbeat
        except RuntimeError as error:
            raise HostLostError(f"{self.name}: no store of the job answers at {where}") from error

    def _member(self) -> Membership:
        """Take part in the job's meetings, as this host's agent."""
        parameters = self._parameters
        return Membership(
            self._store,
            RoundMember(node=self.node, name=self.name, address=self._address, agent=self.heartbeat.agent),
            key=self._key("meeting"),
            fewest=parameters.min_nodes,
            most=parameters.max_nodes,
            timeouts=self.timeouts,
            silent=lambda hosts: self.heartbeat.silent(_peers(hosts)),
        )

    def _end_round(self) -> None:
        """Forget the finished round."""
        if self._waiting is not None:
            self._waiting.close()
        self._waiting = self.round = None
        self._asked = 0

    def _meet(self) -> RendezvousInfo:
        """Meet the other hosts once, and create or find the round's store.

        The first host serves the store and tells where it is; the others wait 10 s for that, and all of them for each
        other in that store. A host that paused in between may have been left out: then all meet once more.
        """
        meeting = self._membership.meet()
        rank = [member.agent for member in meeting.members].index(self.heartbeat.agent)
        if rank == 0:
            store = store_at(self._address)
            # Not PyTorch's five minutes: see above.
            store.set_timeout(timedelta(seconds=_PART))
            place = self._membership.announce(self._address, store.port)
        else:
            place = self._membership.place(_PART)
            store = store_client(place.address, place.port, answer_within=_PART)
        signed = SignedStore(store, self._secret, scope=place.scope, where=f"{place.address}:{place.port}")
        self._await_members(signed, meeting, rank)
        self.round = HostRound(number=place.number, members=meeting.members, first=rank == 0, store=signed)
        if rank == 0:
            self.post(self.round.key, RoundPost(members=meeting.members))
        self._waiting = WaitingHosts(self._membership)
        return RendezvousInfo(store, rank, len(meeting.members), RendezvousStoreInfo(place.address, int(place.port)))

    def _await_members(self, store: SignedStore, meeting: Meeting, rank: int) -> None:
        """Wait in the round's store until all members are there, 10 s at most."""
        store.write(_here(rank), self.heartbeat.agent)
        agents = store.wait_all([_here(other) for other in range(len(meeting.members))], str)
        if agents != [member.agent for member in meeting.members]:
            raise RendezvousConnectionError("the hosts of the round's store are others")

    def peers(self) -> tuple[Peer, ...]:
        """Return the other hosts of the round."""
        members = self.round.members if self.round is not None else ()
        return _peers([member for member in members if member.node != self.node])


def _here(rank: int) -> str:
    """The key in a round's store under which a host tells that it is there."""
    return f"samestep/here/{rank}"


def _peers(members: Sequence[RoundMember]) -> tuple[Peer, ...]:
    return tuple(Peer(node=member.node, name=member.name, agent=member.agent) for member in members)


NodeRendezvous = MultiNodeRendezvous | SingleNodeRendezvous
