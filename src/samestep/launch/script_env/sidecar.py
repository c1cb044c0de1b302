"""Sidecar: a helper process beside a rank, which ends when the rank has ended, however the rank ended.

A sidecar may serve the rank's presence: others, on any host, learn from a connection to it whether the rank is still
there. So a command on another host can be ended when that rank has ended: for scripts that wait for work and never
end by themselves, such as parameter servers.

As a program, `ADDRESS` serves the presence of the process that started it; `ADDRESS PORT COMMAND ...` runs a command
until the rank whose presence is served there has ended.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from samestep.errors import StartError, UserError
from samestep.launch.fork_server import end_with_parent

_MODULE = "samestep.launch.script_env.sidecar"


def start_beside(module: str, *arguments: str) -> int:
    """Start a module beside this rank: it prints the port on which it serves, and reads standard input to the end.

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

# With these a lost host is noticed after half a minute; with the system's own times, after two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def announce(address: str) -> int:
    """Serve this rank's presence from a sidecar; the port to connect to."""
    return start_beside(_MODULE, address)


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
    """Return when the rank at the other side has ended, or its host is lost."""
    with connection, suppress(OSError):  # such as that of a host that is silent
        connection.recv(1)  # nothing is ever sent


def serve_presence(address: str) -> None:
    """Print a port, and hold every connection to it open until standard input ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()


def _accept(server: socket.socket) -> None:
    """Accept connections, and keep them open as long as this process lives."""
    kept = []  # a connection without a reference is closed
    while True:
        kept.append(server.accept()[0])


_PATIENCE = 5.0  # seconds between asking the command to end and ending it


def until_rank_ends(address: str, port: int, command: Sequence[str]) -> list[str]:
    """The command that runs another one until a rank has ended."""
    return [sys.executable, "-m", _MODULE, address, str(port), *command]


def run_until(address: str, port: int, command: Sequence[str]) -> int:
    """Run a command until it ends, or the other rank does; its exit code, 0 where it was the other.

    Raises StartError, and runs nothing, where the other rank is not reached.
    """
    connection = connect(address, port)
    process = subprocess.Popen(command, preexec_fn=end_with_parent)
    gone = threading.Event()

    def watch() -> None:
        wait_for_end(connection)
        gone.set()
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    if gone.is_set():
        return 0
    return code if code >= 0 else 128 - code


def main(address: str, port: str | None = None, *command: str) -> int:
    """Serve a rank's presence, or run a command until that rank ends; the exit code."""
    if port is None:
        serve_presence(address)
        return 0
    try:
        return run_until(address, int(port), command)
    except StartError as error:
        print(f"samestep: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
