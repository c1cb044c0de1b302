"""Which hosts take part in a round: as all come, as some come late, fall silent, leave, or are lied to."""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from small_jobs import wait_until
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from samestep.launch.job_secret import JobSecret
from samestep.launch.membership import Meeting, Membership, RoundMember
from samestep.launch.network import LOOPBACK, store_at
from samestep.launch.options import LaunchTimeouts
from samestep.launch.signed_store import ForeignValueError, SignedStore

pytestmark = pytest.mark.quick

KEY = "samestep/job/meeting"
SECRET = JobSecret.made()


@pytest.fixture
def store() -> TCPStore:
    served = store_at(LOOPBACK)
    served.set_timeout(timedelta(seconds=10))
    return served


def host(node: int, agent: str = "") -> RoundMember:
    return RoundMember(node=node, name=f"host-{node}", address=LOOPBACK, agent=agent or f"agent-{node}")


class Host:
    """A host's membership, and the meeting that a thread of its own takes part in."""

    def __init__(
        self, store: TCPStore, node: int, *, nodes: tuple[int, int] = (2, 2), agent: str = "", **timeouts: float
    ) -> None:
        self.silent: Collection[str] = ()
        self.membership = Membership(
            SignedStore(store, SECRET, scope="x", where="here"),
            host(node, agent),
            key=KEY,
            fewest=nodes[0],
            most=nodes[1],
            timeouts=LaunchTimeouts(**{"start_timeout": 20.0, "later_join_timeout": 0.3, **timeouts}),
            silent=self._silent,
        )
        self.met: Meeting | Exception | None = None

    def _silent(self, hosts: Sequence[RoundMember]) -> Collection[str]:
        return {each.agent for each in hosts} & set(self.silent)

    def meet(self) -> threading.Thread:
        def meet() -> None:
            try:
                self.met = self.membership.meet()
            except Exception as error:
                self.met = error

        self.met = None
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        return thread

    @property
    def nodes(self) -> list[int]:
        assert isinstance(self.met, Meeting), self.met
        return [member.node for member in self.met.members]


def meet(*hosts: Host) -> None:
    threads = [each.meet() for each in hosts]
    for thread in threads:
        thread.join(15)


def test_hosts_are_ordered_by_node_rank_and_meet_again_and_again(store: TCPStore) -> None:
    hosts = [Host(store, node, nodes=(3, 3)) for node in (2, 0, 1)]
    for turn in range(3):
        meet(*hosts)
        assert [each.nodes for each in hosts] == [[0, 1, 2]] * 3
        first, other = hosts[1].membership, hosts[0].membership
        place = first.announce(LOOPBACK, 1234)
        assert (place.number, place.port) == (turn, 1234)
        assert other.place(1.0) == place
        assert [each.membership.number_waiting() for each in hosts] == [0, 0, 0]


def test_the_last_call_ends_without_the_others_who_then_wait(store: TCPStore) -> None:
    one, other = (Host(store, node, nodes=(1, 2), join_timeout=0.3) for node in (0, 1))
    meet(one)
    assert one.nodes == [0]
    waits = other.meet()
    wait_until(lambda: one.membership.number_waiting() == 1, 10.0)
    assert waits.is_alive()
    meet(one)
    waits.join(10)
    assert one.nodes == other.nodes == [0, 1]


def test_a_silent_host_is_not_waited_for_and_comes_back(store: TCPStore) -> None:
    one, other = (Host(store, node, nodes=(1, 2), join_timeout=0.3) for node in (0, 1))
    meet(one, other)
    one.silent = ["agent-1"]
    meet(one)
    assert one.nodes == [0]
    one.silent = ()
    with pytest.raises(RendezvousConnectionError):
        other.membership.place(1.0)  # it is out of the round, and hears of that
    assert other.membership.number_waiting() > 0
    waits = other.meet()
    wait_until(lambda: one.membership.number_waiting() == 1, 10.0)
    meet(one)
    waits.join(10)
    assert one.nodes == other.nodes == [0, 1]


def test_an_agent_that_was_started_again_takes_its_former_ones_place(store: TCPStore) -> None:
    one, former = (Host(store, node) for node in (0, 1))
    meet(one, former)
    again = Host(store, 1, agent="again")
    waits = again.meet()
    wait_until(lambda: one.membership.number_waiting() == 1, 10.0)
    meet(one)
    waits.join(10)
    assert isinstance(one.met, Meeting)
    assert [member.agent for member in one.met.members] == ["agent-0", "again"]


def test_a_host_that_leaves_is_not_waited_for(store: TCPStore) -> None:
    one, other = (Host(store, node, nodes=(1, 2), join_timeout=0.3) for node in (0, 1))
    meet(one, other)
    other.membership.leave()
    meet(one)
    assert one.nodes == [0]


def test_too_few_hosts_are_waited_for_as_long_as_the_limit_says(store: TCPStore) -> None:
    one = Host(store, 0, start_timeout=0.5)
    meet(one)
    assert isinstance(one.met, RendezvousTimeoutError)
    other = Host(store, 1, start_timeout=0.5)
    meet(other)
    assert isinstance(other.met, RendezvousTimeoutError)  # the first one takes no part any more


def test_nobody_meets_in_a_job_that_is_over(store: TCPStore) -> None:
    one, other = (Host(store, node) for node in (0, 1))
    waits = one.meet()
    other.membership.close()
    waits.join(10)
    assert isinstance(one.met, RendezvousClosedError)
    meet(other)
    assert isinstance(other.met, RendezvousClosedError)
    assert one.membership.closed


def _put_back(store: TCPStore, host: Host, old: str) -> None:
    store.set(KEY, old)


def _removed(store: TCPStore, host: Host, old: str) -> None:
    store.delete_key(KEY)


def _unsigned(store: TCPStore, host: Host, old: str) -> None:
    SignedStore(store, None, scope="x", where="here").write(KEY, Meeting(version=99))


def _of_another_form(store: TCPStore, host: Host, old: str) -> None:
    SignedStore(store, SECRET, scope="x", where="here").write(KEY, {"version": -1})


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (_put_back, "it is an old one that was put back"),
        (_removed, "it was removed"),
        (_unsigned, "it is not signed, and this host has a secret"),
        (_of_another_form, "its form is another one"),
    ],
)
def test_no_host_believes_a_meeting_that_none_of_them_wrote(
    store: TCPStore, lie: Callable[[TCPStore, Host, str], None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (Host(store, node) for node in (0, 1))
    old = store.get(KEY).decode()
    meet(one, other)
    lie(store, one, old)
    assert one.membership.number_waiting() == 0  # the round goes on
    assert says in capsys.readouterr().err
    meet(one)
    assert isinstance(one.met, ForeignValueError)
    assert str(one.met).startswith(f'a value of key "{KEY}" in the job\'s store at here was not written by a host of')
    assert says in str(one.met)


def test_a_meeting_changes_as_its_states_say() -> None:
    joined = Meeting().joined_by(host(1), fewest=1, most=2, last_call_over=False)
    assert not joined.complete
    assert joined.joined_by(host(1), fewest=1, most=2, last_call_over=False) == joined
    alone = joined.joined_by(host(1), fewest=1, most=2, last_call_over=True)
    assert alone.complete
    waiting = alone.joined_by(host(0), fewest=1, most=2, last_call_over=True)
    assert [each.node for each in waiting.waiting] == [0]
    over = waiting.without({"agent-1"})
    assert (over.turn, over.complete, over.members, over.waiting) == (1, False, (), waiting.waiting)
    both = over.joined_by(host(1), fewest=2, most=2, last_call_over=False).joined_by(
        host(0), fewest=2, most=2, last_call_over=False
    )
    assert [each.node for each in both.members] == [0, 1]
    assert both.complete
    assert both.waiting == ()
    left = both.without({"agent-0"})
    assert left.members == both.members  # so that all count the same ranks
    assert not left.has("agent-0")
    assert replace(left, left=()) == both
