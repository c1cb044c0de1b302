"""Beacon: rank 0 says where its store is, on the first free one of the ports that follow from the job's id.

For ranks whose launcher tells each who it is, and nobody where to meet. What answers on a port is taken for rank 0
only where it names the same job, so that jobs on one host, and servers of other programs, are never mixed up.
"""

import hashlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from samestep import __version__
from samestep.errors import UserError

# Below the ports that systems give out by themselves, and above those that services are known by.
_FIRST, _LAST = 20_000, 32_000
_HOW_MANY = 16
_PATIENCE = 1.0  # seconds that a port may take to answer
_LONGEST = 1024  # bytes of an answer


def ports_of(job: str) -> list[int]:
    """The ports to try, in order: the same for every rank of a job, and most likely others for another job."""
    return random.Random(hashlib.sha256(job.encode()).digest()).sample(range(_FIRST, _LAST), _HOW_MANY)


@contextmanager
def lit(address: str, job: str, world_size: int, port: int) -> Iterator[None]:
    """Tell whoever asks at this address on which port the job's store is. Raises UserError where no port is free."""
    with _listen(address, ports_of(job)) as listening:
        told = {**_identity(job, world_size), "host": socket.gethostname(), "port": port}
        answer = json.dumps(told).encode() + b"\n"
        thread = threading.Thread(target=_answer, args=(listening, answer), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def heard(addresses: Sequence[str], job: str, world_size: int, timeout: float) -> tuple[str, int]:
    """The address and the port of the store of this job's rank 0, which may have yet to light its beacon.

    Raises UserError where rank 0 runs another version or counts other ranks, TimeoutError where it isn't heard.
    """
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        for address in addresses:
            for port in ports_of(job):
                answer = _ask(address, port)
                if answer is not None and answer[1].get("job") == _identity(job, world_size)["job"]:
                    return answer[0], _checked(answer[1], job, world_size)
        time.sleep(0.05)
    raise TimeoutError(
        f"rank 0 was not heard on {', '.join(addresses)} within {timeout:.0f} s; where it runs elsewhere, "
        "MASTER_ADDR and MASTER_PORT would say it to all ranks"
    )


def _identity(job: str, world_size: int) -> dict[str, Any]:
    return {
        "job": hashlib.sha256(job.encode()).hexdigest()[:32],
        "world_size": world_size,
        "samestep": __version__,
        "torch": torch.__version__,
    }


def _checked(answer: dict[str, Any], job: str, world_size: int) -> int:
    for name, ours in _identity(job, world_size).items():
        if answer.get(name) != ours:
            raise UserError(
                f"{name.replace('_', ' ')} is {answer.get(name)} on rank 0's host {answer.get('host')}, and {ours} "
                f"on this rank's host {socket.gethostname()}; all ranks of a job must have the same"
            )
    return int(answer["port"])


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=2048)
    raise UserError(
        f"none of the ports {', '.join(map(str, sorted(ports)))} is free at {address}, where the ranks of this job "
        "would meet; MASTER_ADDR and MASTER_PORT would say another place"
    )


def _answer(listening: socket.socket, answer: bytes) -> None:
    while True:
        try:
            asking, _ = listening.accept()
        except OSError:
            return  # shut down
        with asking, suppress(OSError):
            asking.settimeout(_PATIENCE)
            asking.sendall(answer)


def _ask(address: str, port: int) -> tuple[str, dict[str, Any]] | None:
    """The address that was reached, and what its port answers; None where that is nothing that we understand."""
    until = time.monotonic() + _PATIENCE
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as asked:
            if asked.getsockname() == asked.getpeername():
                return None  # the system has connected the port with itself
            said = b""
            while not said.endswith(b"\n") and len(said) < _LONGEST and time.monotonic() < until:
                more = asked.recv(_LONGEST)
                if not more:
                    break
                said += more
            answer = json.loads(said)
            return (asked.getpeername()[0], answer) if isinstance(answer, dict) else None
    except (OSError, ValueError):
        return None
