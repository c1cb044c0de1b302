"""SSH starter: OpenSSH as configured by the user; one connection for each host, with a fixed remote command."""

import math
import shlex
import subprocess
import sys
from collections.abc import Sequence

from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchOptions
from samestep.launch.starter import AgentCommand, Starter, agent_command

_ALIVE = 2  # seconds between keep-alive messages


def _options(heartbeat_timeout: float) -> tuple[str, ...]:
    """Options: no prompts at the terminal, and the same timeout for a silent host as the other hosts use.

    OpenSSH takes an option's first value: the user's own, in --ssh, come before these.
    """
    alive = f"ServerAliveCountMax={math.ceil(heartbeat_timeout / _ALIVE)}"
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


def _agent_commands(specs: Sequence[NodeSpec], options: LaunchOptions) -> list[AgentCommand]:
    """Build the command for each host: ssh with a fixed remote command, or the agent itself for this host."""
    # The remote shell sees only this line, which contains nothing of the user's except the path of Python.
    line = shlex.join(agent_command(options.remote_python))
    return [
        AgentCommand(
            command=tuple(agent_command([sys.executable]))
            if spec.node_rank == options.this
            else (*options.ssh, *_options(spec.timeouts.heartbeat_timeout), "--", spec.host, line),
            specs=(spec,),
        )
        for spec in specs
    ]


def _resolve(host: str, options: LaunchOptions) -> str:
    """Resolve a host's name, which may be an alias in OpenSSH's configuration."""
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
        return host  # ssh will report it on connecting
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return next((value for key, _, value in lines if key == "hostname"), host)


STARTER = Starter(agent_commands=_agent_commands, resolve=_resolve)
