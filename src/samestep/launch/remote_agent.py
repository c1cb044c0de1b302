"""The agent of a host that ssh, srun or Ray has started from another one.

All that the user said comes as two lines of JSON on standard input, so that nothing of it stands in a command line:
the variables, which the first moments of Python set, and what this host does, with the job's secret. The input stays
open. A line "signal 15" on it is that signal, "kill" ends the ranks at once, and its end means that who started this
is gone. What the ranks print goes to standard output and error as it is; what this process itself has to say are
lines of the output that begin with a mark.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import FileIO
from typing import Any

from samestep import environment
from samestep.launch.failure import JobOutcome
from samestep.launch.job_secret import JobSecret
from samestep.launch.node_spec import NodeSpec
from samestep.progress import phases
from samestep.version import VERSION

MARK = b"\x1esamestep "
_LEAVE = 5.0  # seconds beyond the ranks' grace period, for an agent whose controller is gone


def request(
    specs: Sequence[NodeSpec], folder: str, variables: Mapping[str, str], secret: JobSecret | None = None
) -> bytes:
    """Build the request for a remote agent, which picks its own host's part."""
    orders = {
        "version": VERSION,
        "specs": [spec.to_json() for spec in specs],
        "folder": folder,
        "secret": secret.sent() if secret is not None else None,
    }
    lines = dict(variables), orders
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def main() -> int:
    """Run this host's agent."""
    environment.take_job_secret()  # that of a login here, which is another one, and ranks would have it
    orders = FileIO(0, closefd=False)  # unbuffered, so that later lines stay in the pipe for `_obey`
    request_ = json.loads(orders.readline())
    specs = {values["host"]: values for values in request_["specs"]}
    host = next(iter(specs)) if len(specs) == 1 else environment.slurm_node()
    _say(host, started=True)
    # All hosts write to the terminal of one, where one of them tells of the job.
    with phases.running("launch") if specs[host].get("node_rank") == 0 else nullcontext():
        outcome = _take_part(host, specs[host], request_, orders)
    _say(host, outcome=outcome.to_json())
    return outcome.exit_code


def _take_part(host: str, values: Mapping[str, Any], request: Mapping[str, Any], orders: FileIO) -> JobOutcome:
    """Run this host's part of a job. Other versions are refused before the request is parsed."""
    theirs = request.get("version", "an older one")
    if theirs != VERSION:  # its format may differ
        return JobOutcome(
            exit_code=2,
            message=f"the hosts of this job differ in their samestep version: the starting machine has "
            f'"{theirs}", {host} has "{VERSION}"; install the same on both',
        )
    try:
        spec = NodeSpec.from_json(values)
        secret = JobSecret.of_request(request["secret"]) if request["secret"] is not None else None
    except (KeyError, TypeError):
        return JobOutcome(
            exit_code=2,
            message=f"the hosts of this job differ in their samestep sources: {host} and the starting machine have "
            f"other files of version {VERSION}; install the same on both",
        )
    try:
        os.chdir(request["folder"])
    except OSError as error:
        message = f"{host}: the folder {request['folder']}: {error.strerror}; use --chdir FOLDER"
        return JobOutcome(exit_code=2, message=message)
    threading.Thread(target=_obey, args=(orders, spec.ranks.grace_period), daemon=True).start()

    with environment.quiet_import():
        from samestep.launch import agent  # this takes seconds, in which an order may come

    return agent.run(spec, secret)


def _say(host: str, **message: Any) -> None:
    """Send a message to the controller: a marked line of JSON."""
    try:
        sys.stdout.buffer.write(MARK + json.dumps({"host": host, **message}).encode() + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return


def _obey(orders: FileIO, grace_period: float) -> None:
    """Thread: carries out the orders on standard input."""
    for line in orders:
        word, _, number = line.decode().strip().partition(" ")
        if word == "signal":
            os.kill(os.getpid(), int(number))
        elif word == "kill":
            _kill()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_period + _LEAVE)
    _kill()
    os._exit(1)


def _kill() -> None:
    from samestep.launch.agent import end_children

    end_children()
