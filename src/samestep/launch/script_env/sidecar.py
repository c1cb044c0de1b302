"""Sidecar: a helper process beside a rank, which ends when the rank has ended, whatever the rank has become.

Others, on any host, learn from a connection to it whether the rank is still there.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from samestep.errors import StartError, UserError


def start_beside(module: str, *arguments: str) -> int:
    """Start a module that prints the port on which it serves, and then reads its standard input to the end.

    Returns the port. Raises UserError where none is printed.
    """
    helper = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    # The helper reads until no process holds this end any more. It is open in the script too, and in nothing that
    # Python's subprocess starts from there.
    os.set_inheritable(helper.stdin.fileno(), True)
    line = helper.stdout.readline()
    if not line.strip().isdecimal():
        raise UserError(f"{module} {arguments[0]} did not start; its reason stands above")
    return int(line)


_CONNECT = 30.0  # seconds for the connection

# A host that is gone without a word is noticed after half a minute; the system's own times make it two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def announce(address: str) -> int:
    """Let others see that this rank is there; the port to connect to."""
    return start_beside("samestep.launch.script_env.sidecar", address)


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
    kept = []  # a connection without a reference is closed
    while True:
        kept.append(server.accept()[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
