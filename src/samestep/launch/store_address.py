"""Address of a job's store: what the user's name for it resolves to, and where the serving host listens."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from samestep.errors import UserError
from samestep.launch.logs import say
from samestep.launch.network import address_towards, is_address, is_loopback, store_at, why_not
from samestep.launch.node_spec import NodeSpec

if TYPE_CHECKING:
    import torch.distributed as dist

_APART = 0.5  # seconds between two lookups


def resolved(spec: NodeSpec, deadline: float) -> str:
    """Resolve the store's name on this host, with retries until the deadline. Raises UserError.

    Names of containers are registered when they start, which may be later than this.
    """
    printed = False
    while True:
        try:
            return str(socket.getaddrinfo(spec.address, spec.port, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            reason = error.strerror
        if time.monotonic() > deadline:
            raise UserError(
                f"{spec.host}: the name {spec.address} does not resolve ({reason}), nor has it for "
                f"{spec.timeouts.start_timeout:.0f} s; use a line in /etc/hosts, or an address instead of the name"
            )
        if not printed:
            printed = True
            say(f"{spec.host}: the name {spec.address} does not resolve yet ({reason}); waiting for it")
        time.sleep(_APART)


def to_serve_at(spec: NodeSpec, resolved: str) -> str:
    """Return the address at which other hosts reach the store served here. Raises UserError if unknown.

    Debian's installer makes a host's own name resolve to 127.0.1.1 on that host.
    """
    assert spec.address is not None
    if _is_meant(spec.address) or spec.most == 1 or not is_loopback(resolved):
        return resolved
    towards = _towards(spec.hosts[: spec.node_rank] + spec.hosts[spec.node_rank + 1 :])
    address = next((toward for toward in towards if not is_loopback(toward)), None)
    if address is not None:
        return address
    raise UserError(
        f"{spec.address} leads to {resolved} on {spec.host} itself, where no other host reaches it; use "
        "its address instead of the name, as --master-addr on all hosts"
    )


def to_meet_at(named: str, others: Iterable[str]) -> str:
    """Return the address at which the starting machine serves the store, given the user's name for it.

    `others`: the job's other hosts, as reached from here. Raises UserError if they can't reach the address, OSError
    if the name doesn't resolve.
    """
    resolved = str(socket.getaddrinfo(named, None, type=socket.SOCK_STREAM)[0][4][0])
    if _is_meant(named) or not is_loopback(resolved):
        return named
    towards = list(_towards(others))
    address = next((toward for toward in towards if not is_loopback(toward)), None)
    if address is not None:
        return address
    if towards:  # all hosts resolve to this machine
        return named
    raise UserError(
        f"--master-addr {named} leads to {resolved} on this machine, where no other host reaches it; use "
        "its address instead of the name"
    )


def _is_meant(named: str) -> bool:
    """Whether the user gave an address explicitly, even one that no other host reaches."""
    return is_address(named) or named == "localhost"


def _towards(hosts: Iterable[str]) -> Iterator[str]:
    """Yield this host's addresses on the routes to other hosts, where known."""
    for name in hosts:
        with suppress(OSError):
            yield address_towards(name)


def served(spec: NodeSpec, address: str) -> "dist.TCPStore":
    """Serve the job's store on this host. Raises UserError if that isn't possible."""
    try:
        return store_at(address, spec.port)
    except OSError as error:
        if (why := why_not(spec.port, error)) is not None:
            raise UserError(
                f"port {spec.port} on {spec.host} {why}; use another --master-port, the same on all hosts"
            ) from None
        raise UserError(
            f"{spec.host} has node rank 0 and can't serve the job's store at {spec.address}:{spec.port}: "
            f"{error.strerror}; --master-addr is to be an address of the host with --node-rank 0"
        ) from None
