"""Whether a rank is still there, for others of any host: a connection to a helper beside it that ends with it.

As a program, with an ADDRESS, it is that helper.
"""

import socket
import sys
import threading
from contextlib import suppress

from samestep.cluster.contracts.beside import start_beside
from samestep.errors import StartError

_CONNECT = 30.0  # seconds for the connection

# A host that is gone without a word is noticed after half a minute; the system's own times make it two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def announce(address: str) -> int:
    """Let others see that this rank is there; the port to connect to."""
    return start_beside("samestep.cluster.contracts.presence", address)


def connect(address: str, port: int) -> socket.socket:
    """A connection to the rank that has announced itself there. Raises StartError where there is none."""
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
        raise StartError(
            f"the first rank, whose end this host's rank waits for, is not reached at {address}:{port}: {reason}; "
            "has it ended already, or is a firewall in between?"
        ) from None
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not every system has them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def wait_for_end(connection: socket.socket) -> None:
    """Return when the rank at the other side has ended, or its host has."""
    with connection, suppress(OSError):  # such as that of a host that is silent
        connection.recv(1)  # nothing is ever sent


def main(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()


def _accept(server: socket.socket) -> None:
    kept = []  # a connection that nobody holds is closed
    while True:
        kept.append(server.accept()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
