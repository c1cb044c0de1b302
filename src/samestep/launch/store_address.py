"""Where a job's store is: what the name that the user gave leads to, and where the host that serves it listens."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from samestep.errors import UserError
from samestep.launch.network import address_towards, is_address, is_loopback, store_at, why_not
from samestep.launch.node_spec import NodeSpec
from samestep.launch.rounds import say

if TYPE_CHECKING:
    import torch.distributed as dist

_APART = 0.5  # seconds between two questions for a name


def resolved(part: NodeSpec, deadline: float) -> str:
    """The address that the job's name for the place has on this host. Raises UserError where it gets none in time.

    Containers get their names as they start, and others may ask before that.
    """
    told = False
    while True:
        try:
            return str(socket.getaddrinfo(part.address, part.port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            reason = error.strerror
        if time.monotonic() > deadline:
            raise UserError(
                f"{part.host}: the name {part.address} does not resolve ({reason}), nor has it for "
                f"{part.start_timeout:.0f} s; use a line in /etc/hosts, or an address instead of the name"
            )
        if not told:
            told = True
            say(f"{part.host}: the name {part.address} does not resolve yet ({reason}); waiting for it")
        time.sleep(_APART)


def to_serve_at(part: NodeSpec, resolved: str) -> str:
    """Where the other hosts reach the store that this one serves. Raises UserError where that can't be known.

    Debian's installer has a host's own name lead to 127.0.1.1 on itself, and on no other host.
    """
    assert part.address is not None
    if _is_meant(part.address) or part.most == 1 or not is_loopback(resolved):
        return resolved
    towards = _towards(part.hosts[: part.node_rank] + part.hosts[part.node_rank + 1 :])
    address = next((each for each in towards if not is_loopback(each)), None)
    if address is not None:
        return address
    raise UserError(
        f"{part.address} leads to {resolved} on {part.host} itself, where no other host reaches it; use "
        "its address instead of the name, as --master-addr on all hosts"
    )


def to_meet_at(named: str, others: Iterable[str]) -> str:
    """Where the machine that starts a job serves its store, for which the user has named it.

    `others` are the job's other hosts, as they are reached from here. Raises UserError where they can't reach it
    there, OSError where the name leads nowhere.
    """
    resolved = str(socket.getaddrinfo(named, None, type=socket.SOCK_STREAM)[0][4][0])
    if _is_meant(named) or not is_loopback(resolved):
        return named
    towards = list(_towards(others))
    address = next((each for each in towards if not is_loopback(each)), None)
    if address is not None:
        return address
    if towards:  # all hosts are this machine
        return named
    raise UserError(
        f"--master-addr {named} leads to {resolved} on this machine, where no other host reaches it; use "
        "its address instead of the name"
    )


def _is_meant(named: str) -> bool:
    """Whether the user has said an address, be it one that no other host reaches."""
    return is_address(named) or named == "localhost"


def _towards(hosts: Iterable[str]) -> Iterator[str]:
    """The addresses of this host from which it reaches others, as far as they can be found."""
    for name in hosts:
        with suppress(OSError):
            yield address_towards(name)


def served(part: NodeSpec, address: str) -> "dist.TCPStore":
    """The job's store, on this host. Raises UserError where it can't be there."""
    try:
        return store_at(address, part.port)
    except OSError as error:
        if (why := why_not(part.port, error)) is not None:
            raise UserError(
                f"port {part.port} on {part.host} {why}; use another --master-port, the same on all hosts"
            ) from None
        raise UserError(
            f"{part.host} has node rank 0 and can't serve the job's store at {part.address}:{part.port}: "
            f"{error.strerror}; --master-addr is to be an address of the host with --node-rank 0"
        ) from None
