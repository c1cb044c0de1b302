"""Rendezvous of ranks whose launcher doesn't give an address: srun and mpirun only number the ranks.

Rank 0 says where its store is on the first free one of the ports that follow from the job's id.

Ports follow from a hash of the job's id, so that every rank knows the same 16 candidates without a message. Rank 0
takes the first free one and answers there with the port of its store and what identifies the job; the others try the
candidates in turn. A stranger on one of them doesn't answer like this, and is passed over.
"""

import hashlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from samestep import __version__, environment
from samestep.errors import UserError
from samestep.launch.environments import open_mpi, slurm
from samestep.launch.environments.base import TELL_US, Meeting
from samestep.launch.network import LOOPBACK, address_towards, is_loopback, is_ours, store_at, why_not
from samestep.ranks import Ranks

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
    """Answer, at this address, on which port the job's store is. Raises UserError where no port is free."""
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
    """What tells this job's rank 0 from another's; the id itself is hashed, since anyone may connect."""
    return {
        "job": hashlib.sha256(job.encode()).hexdigest()[:32],
        "world_size": world_size,
        "samestep": __version__,
        "torch": torch.__version__,
    }


def _checked(answer: dict[str, Any], job: str, world_size: int) -> int:
    """The store's port. Raises UserError where the answer is of another job, size or version."""
    for name, ours in _identity(job, world_size).items():
        if answer.get(name) != ours:
            raise UserError(
                f"{name.replace('_', ' ')} is {answer.get(name)} on rank 0's host {answer.get('host')}, and {ours} "
                f"on this rank's host {socket.gethostname()}; all ranks of a job must have the same"
            )
    return int(answer["port"])


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    """Rank 0's socket on the first free port. Raises UserError where none is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=2048)
    raise UserError(
        f"none of the ports {', '.join(map(str, sorted(ports)))} is free at {address}, where the ranks of this job "
        "would meet; MASTER_ADDR and MASTER_PORT would say another place"
    )


def _answer(listening: socket.socket, answer: bytes) -> None:
    """A thread of rank 0: one short answer for each rank that connects."""
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


_EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class Met:
    """Where ranks have met."""

    store: dist.Store
    address: str  # of rank 0's host
    port: int | None = None  # of the store, where the ranks' variables don't say it


def meeting(ranks: Ranks, environ: Mapping[str, str]) -> Meeting:
    """Where the ranks of a launcher meet. Raises UserError where its variables don't say enough."""
    found = _LAUNCHERS[ranks.launcher](environ)
    return Meeting(job=found.job, addresses=(LOOPBACK,)) if ranks.one_host else found


def tells_no_address(ranks: Ranks) -> bool:
    """Whether the launcher leaves it to the ranks where they meet."""
    return ranks.launcher in _LAUNCHERS


def meet(ranks: Ranks, *, timeout: float = 300.0) -> Met:
    """Find rank 0's store, or serve it. Every rank must come.

    Raises UserError where the launcher's variables don't say enough, TimeoutError where a rank doesn't come in time.
    """
    address, port = environment.given_address(), environment.main_port()
    if address is not None and port is not None:
        store = _given_store(address, port, ranks) if ranks.rank == 0 else _store_of_rank_0(address, port, timeout)
        return Met(store=store, address=address, port=port)
    found = meeting(ranks, environment.snapshot())
    if address is not None:
        found = Meeting(job=found.job, addresses=(address,), other=found.other)
    if not any(_resolved(each) for each in found.addresses):
        named = ", ".join(found.addresses) or "unnamed"
        raise UserError(f"rank 0's host is {named} to the launcher, and no address is known for it; {TELL_US}")
    if ranks.rank == 0:
        address = _address_of_rank_0(found)
        store = store_at(address)
        with lit(address, found.job, ranks.world_size, store.port):
            _wait_for_all(store, ranks.world_size, timeout)
        port = store.port
    else:
        address, port = heard(found.addresses, found.job, ranks.world_size, timeout)
        store = _store_of_rank_0(address, port, timeout)
        store.set(_arrived(ranks.rank), "")
    return Met(store=store, address=address, port=port)


def _given_store(address: str, port: int, ranks: Ranks) -> dist.TCPStore:
    """Rank 0's store where the user wants it."""
    found = _resolved(address)
    if found is None or not is_ours(found):
        raise UserError(f"MASTER_ADDR is {address}, which is no address of rank 0's host {socket.gethostname()}")
    if is_loopback(found) and not ranks.one_host:
        found = _EVERYWHERE  # systems give a host's own name a loopback address, for itself
    try:
        return store_at(found, port)
    except OSError as error:
        why = why_not(port, error) or f"can't be used: {error.strerror}"
        raise UserError(f"MASTER_PORT is {port}, which on rank 0's host {why}; use a free one") from None


def _store_of_rank_0(address: str, port: int, timeout: float) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def _wait_for_all(store: dist.Store, world_size: int, timeout: float) -> None:
    """Until every rank has found the store; before that the beacon must not go out."""
    others = range(1, world_size)
    try:
        store.wait([_arrived(rank) for rank in others], timedelta(seconds=timeout))
    except dist.DistStoreError:
        missing = [rank for rank in others if not store.check([_arrived(rank)])]
        raise TimeoutError(
            f"ranks {', '.join(map(str, missing))} of {world_size} did not come within {timeout:.0f} s"
        ) from None


def _address_of_rank_0(found: Meeting) -> str:
    """The address of this host, which is rank 0's, by which the others reach it."""
    resolved = [_resolved(address) for address in found.addresses]
    ours = [address for address in resolved if address is not None and is_ours(address)]
    if not ours:
        raise UserError(
            f"rank 0 runs on {socket.gethostname()}, and the launcher names {', '.join(found.addresses)}; {TELL_US}"
        )
    far = [address for address in ours if not is_loopback(address)]
    if far or found.other is None:
        return (far or ours)[0]
    return address_towards(found.other)  # systems give a host's own name a loopback address, for itself


def _resolved(address: str) -> str | None:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _pmi(environ: Mapping[str, str]) -> Meeting:
    raise UserError(f"mpirun's variables don't name the job or rank 0's host; {TELL_US}")


_LAUNCHERS: Mapping[str, Callable[[Mapping[str, str]], Meeting]] = {
    "slurm": slurm.meeting,
    "open-mpi": open_mpi.meeting,
    "pmi": _pmi,
}
