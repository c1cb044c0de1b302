"""Stores of a job: bound to the address by which its own hosts reach them, not to every one of this host."""

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch.distributed as dist


def store_at(address: str, port: int = 0) -> "dist.TCPStore":
    """A store that serves on one address: on a port, or on a free one; `.port` says which. Raises OSError.

    PyTorch would listen on every address of the host. It gives its store no password, so whoever reaches the port
    reads and writes.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=2048)
    port = listening.getsockname()[1]
    # The store closes the socket when it ends.
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def store_client(address: str, port: int, *, answer_within: float) -> "dist.TCPStore":
    """A connection to a store. Once it has been silent for so many seconds, every call ends with an error.

    Raises RuntimeError where no store answers there.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=answer_within)
    )
    _end_when_silent(port, answer_within)
    return store


def reach(address: str, port: int, *, within: float) -> Literal["answers", "refuses", "silent"]:
    """Whether something listens on a port of a host, or the host says that nothing does, or it says nothing."""
    try:
        socket.create_connection((address, port), timeout=within).close()
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "silent"
    return "answers"


# Linux: what is not acknowledged is sent again at a steady pace first, so that a short break in the network costs
# no more than it lasts (man 7 tcp, tcp_thin_linear_timeouts).
_THIN_LINEAR_TIMEOUTS = 16


def _end_when_silent(port: int, seconds: float) -> None:
    """Let this process's connections to a port break when the other side is silent for so long.

    A store has no time limit for the answer to a request that it has sent: without this, a pulled cable would leave
    the caller waiting for as long as TCP sends again, a quarter of an hour.
    """
    options = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,  # where nothing is to be sent, ask
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None)): 1,
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None)): 1,
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None)): max(1, round(seconds)),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None)): round(seconds * 1000),
        (socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS if hasattr(socket, "TCP_USER_TIMEOUT") else None): 1,
    }
    for descriptor in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1] != port:
                continue
            for (level, option), value in options.items():
                if option is not None:
                    connection.setsockopt(level, option, value)


def _sockets() -> list[int]:
    """The descriptors of this process's sockets: PyTorch does not show those of its stores."""
    found = []
    for file in Path("/dev/fd").iterdir() if Path("/dev/fd").is_dir() else ():
        with suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(file.name)).st_mode):
                found.append(int(file.name))
    return found
