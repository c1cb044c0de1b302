"""Sockets of a job's ranks: bound to the address by which its own hosts reach them, not to every one of this host."""

import socket

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def loopback_interface() -> str | None:
    """The interface that no other host reaches; None where the system doesn't name it."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def address_towards(host: str) -> str:
    """The address of this host from which it reaches another; nothing is sent to find it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def store_at(address: str) -> dist.TCPStore:
    """A store that serves on a free port of one address; `.port` says which.

    PyTorch would listen on every address of the host. It gives its store no password, so whoever reaches the port
    reads and writes.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=2048)
    port = listening.getsockname()[1]
    # The store closes the socket when it ends.
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
