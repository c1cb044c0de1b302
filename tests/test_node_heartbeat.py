"""Heartbeats of nodes: what a host sees of the others while its ranks run, and while they save for a change."""

import threading
from collections.abc import Iterator

import pytest
from launching import hosts_store
from small_jobs import wait_until

from samestep.launch.node_heartbeat import NodeHeartbeat, Peer
from samestep.launch.options import LaunchTimeouts
from samestep.launch.signed_store import SignedStore

SILENCE = 2.0


@pytest.fixture
def hosts() -> Iterator[tuple[NodeHeartbeat, NodeHeartbeat]]:
    """Two hosts whose ranks run."""
    store = hosts_store()
    timeouts = LaunchTimeouts(heartbeat_timeout=SILENCE)
    both = [NodeHeartbeat("127.0.0.1", store.port, job="one", node=node, timeouts=timeouts) for node in (0, 1)]
    for node, alive in enumerate(both):
        other = both[1 - node]
        alive.enter(0, [Peer(node=1 - node, name=f"host-{'ab'[1 - node]}", agent=other.agent)], dict)
    yield both[0], both[1]
    for alive in both:
        alive.close()


@pytest.mark.parametrize("saves", [False, True])
def test_a_host_that_falls_silent_is_lost_also_while_the_others_save(
    hosts: tuple[NodeHeartbeat, NodeHeartbeat], saves: bool
) -> None:
    one, other = hosts
    assert one.lost() is None
    if saves:
        one.leave("changes")
    other.close()
    assert wait_until(one.lost, 15.0) > SILENCE / 2
    lost = one.lost()
    assert lost is not None
    assert (lost.what, lost.host) == ("host", "host-b")


@pytest.mark.parametrize("saves", [False, True])
def test_a_host_whose_rank_failed_is_seen_also_while_the_others_save(
    hosts: tuple[NodeHeartbeat, NodeHeartbeat], saves: bool
) -> None:
    one, other = hosts
    if saves:
        one.leave("changes")
    other.leave("failed")
    wait_until(one.lost, 10.0)
    lost = one.lost()
    assert lost is not None
    assert (lost.what, lost.state) == ("round", "failed")


def test_the_state_in_which_a_host_ends_is_told_also_where_it_ends_during_a_sign_of_life(
    hosts: tuple[NodeHeartbeat, NodeHeartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = hosts
    gives_a_sign, ends, told = threading.Event(), threading.Event(), other._beat

    def sign(store: SignedStore) -> None:
        told(store)
        gives_a_sign.set()
        ends.wait(10.0)

    monkeypatch.setattr(other, "_beat", sign)
    assert gives_a_sign.wait(10.0)
    other.done()
    other._over = True  # as close() does first
    ends.set()
    other.close()
    wait_until(lambda: one.all_done, 10.0)
