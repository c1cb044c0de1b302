"""Rendezvous of ranks whose launcher gives no address: srun and mpirun only number the ranks.

Rank 0 announces its store on the first free one of the ports that follow from the job's id.

Ports follow from a hash of the job's id, so that every rank knows the same 16 candidates without a message. Rank 0
takes the first free one and answers there with the port of its store and what identifies the job; the others try the
candidates in turn. Another program on one of them doesn't answer like this, and is passed over.
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

from samestep import environment
from samestep.errors import UserError
from samestep.launch.environments import open_mpi, slurm
from samestep.launch.environments.base import TELL_US, RendezvousInfo
from samestep.launch.network import LOOPBACK, address_towards, is_loopback, is_ours, store_at, why_not
from samestep.ranks import Ranks
from samestep.version import VERSION

# Below the ephemeral ports, and above well-known ones.
_FIRST, _LAST = 20_000, 32_000
_HOW_MANY = 16
_PATIENCE = 1.0  # seconds to wait for an answer
_LONGEST = 1024  # maximum bytes of an answer


def ports_of(job: str) -> list[int]:
    """Return the candidate ports in order: the same for all ranks of a job, most likely different for another job."""
    return random.Random(hashlib.sha256(job.encode()).digest()).sample(range(_FIRST, _LAST), _HOW_MANY)


@contextmanager
def announced(address: str, job: str, world_size: int, port: int) -> Iterator[None]:
    """Announce the port of the job's store at this address. Raises UserError if no candidate port is free."""
    with _listen(address, ports_of(job)) as listening:
        told = {**_identity(job, world_size), "host": socket.gethostname(), "port": port}
        answer = json.dumps(told).encode() + b"\n"
        thread = threading.Thread(target=_answer, args=(listening, answer), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # unblocks the thread
            thread.join()


def find_rank_0(addresses: Sequence[str], job: str, world_size: int, timeout: float) -> tuple[str, int]:
    """Find the address and port of rank 0's store; rank 0 may not announce it yet.

    Raises UserError if rank 0 runs another version or another world size, TimeoutError if it isn't found.
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
        f"rank 0 was not heard on {', '.join(addresses)} within {timeout:.0f} s; if it runs elsewhere, "
        "set MASTER_ADDR and MASTER_PORT for all ranks"
    )


def _identity(job: str, world_size: int) -> dict[str, Any]:
    """Identity of this job's rank 0. The job's id is hashed, since anyone may connect."""
    return {
        "job": hashlib.sha256(job.encode()).hexdigest()[:32],
        "world_size": world_size,
        "samestep": VERSION,
        "torch": torch.__version__,
    }


def _checked(answer: dict[str, Any], job: str, world_size: int) -> int:
    """Check an announcement, and return the store's port. Raises UserError for another job, size or version."""
    for name, ours in _identity(job, world_size).items():
        if answer.get(name) != ours:
            raise UserError(
                f"{name.replace('_', ' ')} is {answer.get(name)} on rank 0's host {answer.get('host')}, and {ours} "
                f"on this rank's host {socket.gethostname()}; all ranks of a job must have the same"
            )
    return int(answer["port"])


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first free port, on rank 0. Raises UserError if none is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family, backlog=2048)
    raise UserError(
        f"none of the ports {', '.join(map(str, sorted(ports)))} is free at {address}, where the ranks of this job "
        "would meet; set MASTER_ADDR and MASTER_PORT to another place"
    )


def _answer(listening: socket.socket, answer: bytes) -> None:
    """Thread of rank 0: sends the announcement to each rank that connects."""
    while True:
        try:
            asking, _ = listening.accept()
        except OSError:
            return  # shut down
        with asking, suppress(OSError):
            asking.settimeout(_PATIENCE)
            asking.sendall(answer)


def _ask(address: str, port: int) -> tuple[str, dict[str, Any]] | None:
    """Read the announcement from a port, and the address that was reached; None for any other answer."""
    until = time.monotonic() + _PATIENCE
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as connection:
            if connection.getsockname() == connection.getpeername():
                return None  # TCP self-connect
            received = b""
            while not received.endswith(b"\n") and len(received) < _LONGEST and time.monotonic() < until:
                more = connection.recv(_LONGEST)
                if not more:
                    break
                received += more
            answer = json.loads(received)
            return (connection.getpeername()[0], answer) if _has_port(answer) else None
    except (OSError, ValueError, RecursionError):
        return None


def _has_port(answer: Any) -> bool:
    """Whether an answer may be rank 0's: whoever listens on a port may send anything."""
    port = answer.get("port") if isinstance(answer, dict) else None
    return isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536


_EVERYWHERE = "0.0.0.0"


@dataclass(frozen=True, kw_only=True)
class JoinedStore:
    """The ranks' store and rank 0's address."""

    store: dist.Store
    address: str  # of rank 0's host
    port: int | None = None  # port of the store, if the ranks' variables lack it


def rendezvous_info(ranks: Ranks, environ: Mapping[str, str]) -> RendezvousInfo:
    """Return where a launcher's ranks meet. Raises UserError if its variables are insufficient."""
    info = _LAUNCHERS[ranks.launcher](environ)
    return RendezvousInfo(job=info.job, addresses=(LOOPBACK,)) if ranks.one_host else info


def tells_no_address(ranks: Ranks) -> bool:
    """Whether the launcher gives the ranks no address."""
    return ranks.launcher in _LAUNCHERS


def meet(ranks: Ranks, *, timeout: float = 300.0) -> JoinedStore:
    """Find rank 0's store, or serve it. Collective.

    Raises UserError if the launcher's variables are insufficient, TimeoutError if a rank doesn't come in time.
    """
    address, port = environment.given_address(), environment.main_port()
    if address is not None and port is not None:
        store = _given_store(address, port, ranks) if ranks.rank == 0 else _store_of_rank_0(address, port, timeout)
        return JoinedStore(store=store, address=address, port=port)
    info = rendezvous_info(ranks, environment.snapshot())
    if address is not None:
        info = RendezvousInfo(job=info.job, addresses=(address,), other=info.other)
    if not any(_resolved(address) for address in info.addresses):
        named = ", ".join(info.addresses) or "unnamed"
        raise UserError(f"rank 0's host is {named} to the launcher, and no address is known for it; {TELL_US}")
    if ranks.rank == 0:
        address = _address_of_rank_0(info)
        store = store_at(address)
        with announced(address, info.job, ranks.world_size, store.port):
            _wait_for_all(store, ranks.world_size, timeout)
        port = store.port
    else:
        address, port = find_rank_0(info.addresses, info.job, ranks.world_size, timeout)
        store = _store_of_rank_0(address, port, timeout)
        store.set(_arrived(ranks.rank), "")
    return JoinedStore(store=store, address=address, port=port)


def _given_store(address: str, port: int, ranks: Ranks) -> dist.TCPStore:
    """Serve rank 0's store at MASTER_ADDR and MASTER_PORT."""
    resolved = _resolved(address)
    if resolved is None or not is_ours(resolved):
        raise UserError(f"MASTER_ADDR is {address}, which is no address of rank 0's host {socket.gethostname()}")
    if is_loopback(resolved) and not ranks.one_host:
        resolved = _EVERYWHERE  # a host's own name may resolve to a loopback address on itself
    try:
        return store_at(resolved, port)
    except OSError as error:
        why = why_not(port, error) or f"can't be used: {error.strerror}"
        raise UserError(f"MASTER_PORT is {port}, which on rank 0's host {why}; use a free one") from None


def _store_of_rank_0(address: str, port: int, timeout: float) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def _wait_for_all(store: dist.Store, world_size: int, timeout: float) -> None:
    """Wait until every rank has found the store: until then rank 0 must announce it."""
    others = range(1, world_size)
    try:
        store.wait([_arrived(rank) for rank in others], timedelta(seconds=timeout))
    except dist.DistStoreError:
        missing = [rank for rank in others if not store.check([_arrived(rank)])]
        raise TimeoutError(
            f"ranks {', '.join(map(str, missing))} of {world_size} did not come within {timeout:.0f} s"
        ) from None


def _address_of_rank_0(info: RendezvousInfo) -> str:
    """Return the address of rank 0's host for the other hosts."""
    resolved = [_resolved(address) for address in info.addresses]
    ours = [address for address in resolved if address is not None and is_ours(address)]
    if not ours:
        raise UserError(
            f"rank 0 runs on {socket.gethostname()}, and the launcher names {', '.join(info.addresses)}; {TELL_US}"
        )
    far = [address for address in ours if not is_loopback(address)]
    if far or info.other is None:
        return (far or ours)[0]
    return address_towards(info.other)  # a host's own name may resolve to a loopback address on itself


def _resolved(address: str) -> str | None:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _pmi(environ: Mapping[str, str]) -> RendezvousInfo:
    raise UserError(f"mpirun's variables don't name the job or rank 0's host; {TELL_US}")


_LAUNCHERS: Mapping[str, Callable[[Mapping[str, str]], RendezvousInfo]] = {
    "slurm": slurm.rendezvous_info,
    "open-mpi": open_mpi.rendezvous_info,
    "pmi": _pmi,
}
