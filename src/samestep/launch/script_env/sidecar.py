"""Sidecar: a helper process of a rank, which ends when the rank ends, however that happens.

A sidecar may accept connections, which break when the rank ends. So a command on another host can be ended together
with that rank: for scripts that wait for work and never end by themselves, such as parameter servers.

Run as a program, `ADDRESS` is the sidecar that accepts them for the parent process; `ADDRESS PORT COMMAND ...` runs a
command until the rank whose sidecar listens there has ended.
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


def start_module(module: str, *arguments: str) -> int:
    """Start a module as this rank's sidecar: it prints its port, and runs until its standard input ends.

    Returns the port. Raises UserError if none is printed.
    """
    helper = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    # The sidecar reads until the last copy of this pipe end is closed. The script inherits it across exec, but
    # Python's subprocess doesn't pass it on.
    os.set_inheritable(helper.stdin.fileno(), True)
    line = helper.stdout.readline()
    if not line.strip().isdecimal():
        raise UserError(f"{module} {arguments[0]} did not start; its reason stands above")
    return int(line)


_CONNECT = 30.0  # seconds to connect

# Detect a lost host within half a minute; the system's default is two hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def start(address: str) -> int:
    """Start this rank's sidecar, which accepts connections until the rank ends; return its port."""
    return start_module(_MODULE, address)


def connect(address: str, port: int) -> socket.socket:
    """Connect to a rank's sidecar. Raises StartError if none answers."""
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
        if hasattr(socket, name):  # not available on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def wait_for_end(connection: socket.socket) -> None:
    """Wait until the rank at the other end has ended, or its host is lost."""
    with connection, suppress(OSError):  # a keep-alive timeout of a silent host, say
        connection.recv(1)  # nothing is ever sent


def serve(address: str) -> None:
    """Print a port, and keep all connections to it open until standard input ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=1024) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()


def _accept(server: socket.socket) -> None:
    """Thread: accepts connections, and keeps them open."""
    kept = []  # an unreferenced connection would be closed
    while True:
        kept.append(server.accept()[0])


_PATIENCE = 5.0  # seconds between SIGTERM and SIGKILL to the command


def until_rank_ends(address: str, port: int, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` until a rank has ended."""
    return [sys.executable, "-m", _MODULE, address, str(port), *command]


def run_until(address: str, port: int, command: Sequence[str]) -> int:
    """Run a command until it or the rank ends; return its exit code, 0 if the rank ended first.

    Raises StartError, and runs nothing, if the rank can't be reached.
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
    """Be a rank's sidecar, or run a command until another rank ends; the exit code."""
    if port is None:
        serve(address)
        return 0
    try:
        return run_until(address, int(port), command)
    except StartError as error:
        print(f"samestep: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
