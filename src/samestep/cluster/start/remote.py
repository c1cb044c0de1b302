"""The far end of a start from elsewhere: `python -m samestep.cluster.start.remote`, brought up by ssh, srun or Ray.

Everything that the user said comes as a line of JSON on standard input, so that nothing of it stands in a command
line. The input stays open. A line "signal 15" on it is that signal, "kill" ends the ranks at once, and its end means
that who started this is gone. What the ranks print goes to standard output and error as it is; what this process
itself has to say are lines of the output that begin with a mark.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from samestep import environment
from samestep.cluster.start.outcome import Outcome
from samestep.cluster.start.part import Part

MODULE = "samestep.cluster.start.remote"
MARK = b"\x1esamestep "
_INPUT = 0
_LEAVE = 5.0  # seconds beyond the ranks' notice, for an agent whose starter is gone


def main(arguments: Sequence[str]) -> int:
    """Be the agent of this host; without `arguments`, become the process that is."""
    if arguments[:1] == ["--part"]:
        return _agent(int(arguments[1]))
    line = _first_line()
    if not line:
        return 1
    request = json.loads(line)
    parts = {values["host"]: values for values in request["parts"]}
    values = next(iter(parts.values())) if len(parts) == 1 else parts[environment.slurm_node()]
    try:
        os.chdir(request["folder"])
    except OSError as error:
        message = f"{values['host']}: the folder {request['folder']}: {error.strerror}; --chdir FOLDER says another"
        _say({"started": True, "node_rank": values["node_rank"]})
        _say({"outcome": Outcome(exit_code=2, message=message).to_json(), "node_rank": values["node_rank"]})
        return 2
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(values).encode())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        # A new process: the variables of Python and of the system's loader are read while one starts.
        os.execve(
            sys.executable,
            [sys.executable, "-m", MODULE, "--part", str(file.fileno())],
            {**environment.snapshot(), **request["variables"]},
        )
    return None


def _first_line() -> bytes:
    """The first line of the input, and not a byte more of it; nothing where it ends before."""
    line = bytearray()
    while byte := os.read(_INPUT, 1):
        if byte == b"\n":
            return bytes(line)
        line += byte
    return b""


def _agent(descriptor: int) -> int:
    with open(descriptor, encoding="utf-8") as file:
        part = Part.from_json(json.load(file))
    _say({"started": True, "node_rank": part.node_rank})
    threading.Thread(target=_obey, args=(part.notice,), daemon=True).start()

    from samestep.cluster.start import agent  # it takes seconds, in which a signal may come

    outcome = agent.run(part)
    _say({"outcome": outcome.to_json(), "node_rank": part.node_rank})
    return outcome.exit_code


def _say(message: Mapping[str, Any]) -> None:
    try:
        sys.stdout.buffer.write(MARK + json.dumps(message).encode() + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return


def _obey(notice: float) -> None:
    """Do what comes on standard input, in a thread of its own."""
    with open(_INPUT, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            word, _, number = line.decode().strip().partition(" ")
            if word == "signal":
                os.kill(os.getpid(), int(number))
            elif word == "kill":
                _kill()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(notice + _LEAVE)
    _kill()
    os._exit(1)


def _kill() -> None:
    from samestep.cluster.start.agent import end_children

    end_children()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
