"""Start by SSH: OpenSSH as it is configured, one connection a host, with one fixed command at its other end."""

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence

from samestep.launch.node_spec import AgentCommand, LaunchOptions, NodeSpec, Starter
from samestep.launch.remote_agent import agent_command

_ALIVE = 2  # seconds between two questions whether a host is there


def _options(silence: float) -> tuple[str, ...]:
    """Nothing is asked at the terminal, and a host is given up when the others take it for lost.

    OpenSSH takes an option's first value: the user's own, in --ssh, come before these.
    """
    alive = f"ServerAliveCountMax={math.ceil(silence / _ALIVE)}"
    return (
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        f"ServerAliveInterval={_ALIVE}",
        "-o",
        alive,
    )


def _bring(parts: Sequence[NodeSpec], options: LaunchOptions) -> list[AgentCommand]:
    """The command for each host: ssh with one fixed line, or the agent itself for this host."""
    # The shell at the other end reads this one line, and nothing of the user's but the path of Python is in it.
    line = shlex.join(agent_command(options.remote_python))
    return [
        AgentCommand(
            command=tuple(agent_command([sys.executable]))
            if part.node_rank == options.this
            else (*options.ssh, *_options(options.silence), "--", part.host, line),
            parts=(part,),
        )
        for part in parts
    ]


def _resolve(host: str, options: LaunchOptions) -> str:
    """The name behind a host's, which may be one of OpenSSH's configuration alone."""
    try:
        done = subprocess.run(
            [*options.ssh, "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return host  # its own message comes when it is to connect
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return next((value for key, _, value in lines if key == "hostname"), host)


STARTER = Starter(bring=_bring, resolve=_resolve)
