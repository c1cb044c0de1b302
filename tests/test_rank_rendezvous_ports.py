"""How ranks find rank 0, whatever else listens on the ports."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from samestep.errors import UserError
from samestep.launch import rank_rendezvous
from samestep.launch.network import LOOPBACK

pytestmark = pytest.mark.quick


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A few free ports, the same for every job."""
    with_sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(3)]
    free = [each.getsockname()[1] for each in with_sockets]
    for each in with_sockets:
        each.close()
    monkeypatch.setattr(rank_rendezvous, "ports_of", lambda job: free)
    return free


WRONG_PORTS: list[dict[str, Any]] = [{}, {"port": "x"}, {"port": None}, {"port": True}, {"port": 1 << 70}]


@contextmanager
def foreign(port: int, says: bytes | None) -> Iterator[None]:
    """A server of another program, which says something to whoever connects; None: it accepts and keeps silent."""
    with socket.create_server((LOOPBACK, port)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    kept.append(connection)
                    if says is not None:
                        connection.sendall(says)
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in kept:
            each.close()


def test_rank_0_is_heard() -> None:
    with rank_rendezvous.announced(LOOPBACK, "a job", 2, 4711):
        assert rank_rendezvous.find_rank_0([LOOPBACK], "a job", 2, timeout=5) == (LOOPBACK, 4711)


def test_two_jobs_on_the_same_ports_do_not_mix(ports: list[int]) -> None:
    with rank_rendezvous.announced(LOOPBACK, "one", 2, 1111), rank_rendezvous.announced(LOOPBACK, "two", 2, 2222):
        assert rank_rendezvous.find_rank_0([LOOPBACK], "two", 2, timeout=5) == (LOOPBACK, 2222)
        assert rank_rendezvous.find_rank_0([LOOPBACK], "one", 2, timeout=5) == (LOOPBACK, 1111)


@pytest.mark.parametrize(
    "says",
    [
        *(None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b'{"job": 3}\n', b"x" * 9000, b"", b"[" * 1024),
        # What it takes for rank 0 is read from rank 0.
        *(json.dumps({**rank_rendezvous._identity("a job", 2), **port}).encode() + b"\n" for port in WRONG_PORTS),
    ],
)
def test_a_server_of_another_program_is_not_rank_0(
    ports: list[int], says: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_rendezvous, "_PATIENCE", 0.1)
    with foreign(ports[0], says), rank_rendezvous.announced(LOOPBACK, "a job", 2, 4711):
        assert rank_rendezvous.find_rank_0([LOOPBACK], "a job", 2, timeout=5) == (LOOPBACK, 4711)


def test_rank_0_may_come_last(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, int]] = []
    ask, in_vain = rank_rendezvous._ask, threading.Event()

    def asked(address: str, port: int) -> tuple[str, dict[str, Any]] | None:
        answer = ask(address, port)
        if answer is None and port == ports[-1]:
            in_vain.set()
        return answer

    monkeypatch.setattr(rank_rendezvous, "_ask", asked)
    asking = threading.Thread(
        target=lambda: heard.append(rank_rendezvous.find_rank_0([LOOPBACK], "a job", 2, timeout=20))
    )
    asking.start()
    assert in_vain.wait(20)
    assert heard == []
    with rank_rendezvous.announced(LOOPBACK, "a job", 2, 4711):
        asking.join(20)
    assert heard == [(LOOPBACK, 4711)]


def test_rank_0_that_is_not_there(ports: list[int]) -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 was not heard on 127\.0\.0\.1 within 0 s; if it runs elsewhere"):
        rank_rendezvous.find_rank_0([LOOPBACK], "a job", 2, timeout=0.2)


@pytest.mark.parametrize(("name", "theirs"), [("samestep", "0.0.9"), ("torch", "1.13"), ("world_size", 3)])
def test_ranks_that_differ_are_refused(ports: list[int], name: str, theirs: object) -> None:
    answer = {**rank_rendezvous._identity("a job", 2), "host": "worker-1", "port": 4711, name: theirs}
    with foreign(ports[0], json.dumps(answer).encode() + b"\n"), pytest.raises(UserError) as error:
        rank_rendezvous.find_rank_0([LOOPBACK], "a job", 2, timeout=5)
    said = str(error.value)
    assert said.startswith(f"{name.replace('_', ' ')} is {theirs} on rank 0's host worker-1, and ")
    assert said.endswith("all ranks of a job must have the same")


def test_no_port_is_free(ports: list[int]) -> None:
    taken = [socket.create_server((LOOPBACK, port)) for port in ports]
    try:
        with pytest.raises(UserError, match=f"none of the ports {', '.join(map(str, sorted(ports)))} is free"):
            rank_rendezvous.announced(LOOPBACK, "a job", 2, 4711).__enter__()
    finally:
        for each in taken:
            each.close()
