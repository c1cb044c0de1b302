"""Rendezvous of a job's hosts: one that paused while they met, and was left out of the round, is met once more."""

import threading
from datetime import timedelta

import pytest
from launching import hosts_store
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

import samestep.launch.rendezvous
from samestep.launch.network import LOOPBACK
from samestep.launch.options import LaunchTimeouts
from samestep.launch.rendezvous import BACKEND, MultiNodeRendezvous

pytestmark = pytest.mark.timeout(120)

_WAITS = 1.0  # seconds that hosts which have met wait for a word of each other, in this test
_SILENCE = 3.0  # seconds that they wait for one in the store where they meet


@pytest.fixture
def store() -> TCPStore:
    served = hosts_store()
    served.set_timeout(timedelta(seconds=60))
    return served


def host(node: int, store: TCPStore) -> MultiNodeRendezvous:
    return MultiNodeRendezvous(
        RendezvousParameters(
            backend=BACKEND,
            endpoint=f"{LOOPBACK}:{store.port}",
            run_id="job",
            min_nodes=2,
            max_nodes=2,
            local_addr=LOOPBACK,
            node_rank=node,
            name="ab"[node],
            timeouts=LaunchTimeouts(heartbeat_timeout=_SILENCE),
        )
    )


def meets(host: MultiNodeRendezvous, found: dict[int, RendezvousInfo], *, pauses: bool) -> threading.Thread:
    def meet() -> None:
        if pauses:
            # As a process that stands still when all have come: it has met, says no word in the round, and is missed.
            host._membership.meet()
        found[host.node] = host.next_rendezvous()

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "paused", [pytest.param(0, id="the first host", marks=pytest.mark.slow), pytest.param(1, id="another host")]
)
def test_a_host_that_was_left_out_of_a_round_is_met_once_more(
    paused: int, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samestep.launch.rendezvous, "_PART", _WAITS)
    hosts = [host(node, store) for node in (0, 1)]
    found: dict[int, RendezvousInfo] = {}
    threads = [meets(each, found, pauses=each.node == paused) for each in hosts]
    for thread in threads:
        thread.join(60)
    met = [(each.node, each.round.members if each.round is not None else ()) for each in hosts]
    for each in hosts:
        each.shutdown()
    assert {node: (info.rank, info.world_size) for node, info in found.items()} == {0: (0, 2), 1: (1, 2)}
    assert [[member.name for member in members] for _, members in met] == [["a", "b"], ["a", "b"]]
