"""A command that is ended when another rank has ended: for scripts that wait for work and never end by themselves.

As a program: `ADDRESS PORT COMMAND ...`, with the presence of the other rank at that address and port.
"""

import subprocess
import sys
import threading
from collections.abc import Sequence

from samestep.errors import StartError
from samestep.launch.fork_server import end_with_parent
from samestep.launch.script_env import sidecar

_PATIENCE = 5.0  # seconds between asking the command to end and ending it


def wrapped(address: str, port: int, command: Sequence[str]) -> list[str]:
    """A command that runs another one for as long as a rank is there."""
    return [sys.executable, "-m", "samestep.launch.script_env.until_rank_ends", address, str(port), *command]


def run(address: str, port: int, command: Sequence[str]) -> int:
    """Run a command until it ends, or the other rank does; its exit code, 0 where it was the other.

    Raises StartError, and runs nothing, where the other rank is not reached.
    """
    connection = sidecar.connect(address, port)
    process = subprocess.Popen(command, preexec_fn=end_with_parent)
    gone = threading.Event()

    def watch() -> None:
        sidecar.wait_for_end(connection)
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


def main(address: str, port: str, *command: str) -> int:
    try:
        return run(address, int(port), command)
    except StartError as error:
        print(f"samestep: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
