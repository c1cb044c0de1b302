"""Hosts that agree before a job begins, through connections that break."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from launching import hosts_store
from small_jobs import wait_until

from samestep.errors import StartError, UserError
from samestep.launch.handshake import Handshake
from samestep.launch.job_secret import JobSecret
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchTimeouts

pytestmark = pytest.mark.quick

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: to close is to reset
POLLS = 40  # parts of messages, more than it takes to come: a host that has exchanged so many waits for the others


class Relay:
    """A way to a port of this machine that can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.passed = 0  # parts of messages since the last cut
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def cut(self) -> None:
        """Reset every connection that there is."""
        with self._lock:
            ends, self._ends, self.passed = self._ends, [], 0
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RD)  # it wakes the thread that reads
            end.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(5.0)

    def _begin(self, work: Callable[..., None], *rest: socket.socket) -> None:
        thread = threading.Thread(target=work, args=rest, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                with self._lock:
                    self._ends += [here, there]
                self._begin(self._pass_on, here, there)
                self._begin(self._pass_on, there, here)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while content := one.recv(65536):
                other.sendall(content)
                with self._lock:
                    self.passed += 1
            other.shutdown(socket.SHUT_WR)


@pytest.fixture
def relay() -> Iterator[Relay]:
    store = hosts_store()
    relay = Relay(store.port)
    yield relay
    relay.close()


def spec(node_rank: int, port: int) -> NodeSpec:
    return NodeSpec(
        job="one",
        host=f"host-{node_rank}",
        node_rank=node_rank,
        most=2,
        fewest=2,
        num_procs=1,
        command=("x",),
        address="127.0.0.1",
        port=port,
        timeouts=LaunchTimeouts(start_timeout=20.0, rejoin_timeout=2.0),
    )


class Agreeing:
    """A host that agrees with the others, in a thread of its own."""

    def __init__(self, node_rank: int, port: int, secret: JobSecret | None = None) -> None:
        self._handshake = Handshake(spec(node_rank, port), secret)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._agree, daemon=True)
        self._thread.start()

    def _agree(self) -> None:
        try:
            self._handshake.agree()
        except Exception as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


@pytest.mark.parametrize("cuts", [1, 2])
def test_hosts_agree_though_the_connection_to_the_store_is_reset(relay: Relay, cuts: int) -> None:
    one = Agreeing(0, relay.port)
    for _ in range(cuts):
        wait_until(lambda: relay.passed > POLLS, 15.0)
        assert one.waits
        relay.cut()
    other = Agreeing(1, relay.port)
    wait_until(lambda: not one.waits and not other.waits, 15.0)
    assert (one.error, other.error) == (None, None)


def test_a_store_whose_host_has_ended_it_is_not_waited_for(relay: Relay) -> None:
    one = Agreeing(0, relay.port)
    wait_until(lambda: relay.passed > POLLS, 15.0)
    relay.close()
    assert wait_until(lambda: not one.waits, 10.0) < 5
    assert isinstance(one.error, StartError)
    assert str(one.error).startswith(f"host-0 lost the job's store at 127.0.0.1:{relay.port}: ")


ONE, OTHER = JobSecret.made(), JobSecret.made()


@pytest.mark.parametrize(
    ("secrets", "says"),
    [
        ((ONE, OTHER), ("is not signed with the secret of this host", "is not signed with the secret of this host")),
        (
            (ONE, None),
            ("is not signed, and this host has a secret", "is signed with a secret, and this host has none"),
        ),
        (
            (None, ONE),
            ("is signed with a secret, and this host has none", "is not signed, and this host has a secret"),
        ),
    ],
    ids=["others", "one has none", "the other has none"],
)
def test_hosts_with_other_secrets_say_so_at_once_and_agree_once_they_have_the_same(
    secrets: tuple[JobSecret | None, JobSecret | None], says: tuple[str, str]
) -> None:
    store = hosts_store(secrets[0])
    one = Agreeing(0, store.port, secrets[0])
    wait_until(lambda: store.check(["samestep/node/0"]), 10.0)
    with pytest.raises(UserError) as error:
        Handshake(spec(1, store.port), secrets[1])
    wait_until(lambda: not one.waits, 10.0)
    assert isinstance(one.error, UserError)
    for host, text, reason in (("host-0", str(one.error), says[0]), ("host-1", str(error.value), says[1])):
        assert text.startswith(f'{host}: a value of key "samestep/')
        assert (
            f"in the job's store at 127.0.0.1:{store.port} was not written by a host of this job: it {reason};"
            in text
        )
        assert text.endswith("give all of them the same secret, by --secret-file or SAMESTEP_JOB_SECRET")
    again = hosts_store(secrets[0])
    hosts = [Agreeing(node, again.port, secrets[0]) for node in (0, 1)]
    wait_until(lambda: not any(host.waits for host in hosts), 10.0)
    assert [host.error for host in hosts] == [None, None]


def test_a_host_with_another_secret_does_not_disturb_a_job_that_has_begun() -> None:
    store = hosts_store(ONE)
    hosts = [Agreeing(node, store.port, ONE) for node in (0, 1)]
    wait_until(lambda: not any(host.waits for host in hosts), 10.0)
    before = {key: store.get(key) for key in store.list_keys() if key.startswith("samestep/")}
    with pytest.raises(UserError, match="is not signed with the secret of this host"):
        Handshake(spec(1, store.port), OTHER)
    assert {key: store.get(key) for key in before} == before
