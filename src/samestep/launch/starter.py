"""Starter: a way to start the agents of a job's hosts, by ssh, srun or Ray."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchOptions

# Not by -m: child processes would import the module again as theirs, with a warning.
_MAIN = "import sys; from samestep.launch.remote_agent import main; sys.exit(main())"

# Variables such as PYTHONPATH take effect at start-up, so a first process sets them and execs a second one. It is one
# line, which a shell takes as one word when quoted.
_FIRST = (
    "import json,os,sys; os.environ.update(json.loads(open(0,'rb',0,closefd=False).readline())); "
    f"os.execv(sys.executable,[sys.executable,'-c','{_MAIN}'])"
)


def agent_command(python: Sequence[str]) -> list[str]:
    """Return the command that starts a remote agent, the same for every job."""
    return [*python, "-c", _FIRST]


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """A local process (ssh, srun or ray) connected to the agents of one or several hosts."""

    command: tuple[str, ...]
    specs: tuple[NodeSpec, ...]  # of several, each agent picks its own host's
    without: tuple[str, ...] = ()  # variables removed from this process's environment

    @property
    def hosts(self) -> str:
        return ", ".join(spec.host for spec in self.specs)


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A way to start agents."""

    agent_commands: Callable[[Sequence[NodeSpec], LaunchOptions], list[AgentCommand]]
    # What happens to variables that may be secrets, for a message.
    kept_back: str = "not sent to other hosts"
    # Resolves a host's name, as this starter understands it, to an address or a name that resolves here.
    resolve: Callable[[str, LaunchOptions], str] = lambda host, options: host
