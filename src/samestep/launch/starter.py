"""What a starter is: how the agents of a job's hosts are brought up from one of them, or from none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samestep.launch.node_spec import Limits, NodeSpec


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What the user says about how to reach the hosts."""

    ssh: tuple[str, ...] = ("ssh",)  # the command, with its options
    remote_python: tuple[str, ...]  # Python on the hosts
    ray: str | None = None  # the address of a Ray cluster
    this: int | None = None  # which of the hosts is this machine
    silence: float = Limits.silence  # seconds without a heartbeat, after which a host is lost
    kept_back: tuple[str, ...] = ()  # variables that no other host is to get


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """A local process (ssh, srun or ray) whose streams are those of the agents on some hosts."""

    command: tuple[str, ...]
    parts: tuple[NodeSpec, ...]  # of several, each agent takes its own host's
    without: tuple[str, ...] = ()  # variables that this process doesn't get

    @property
    def hosts(self) -> str:
        return ", ".join(part.host for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A way to bring agents up."""

    bring: Callable[[Sequence[NodeSpec], LaunchOptions], list[AgentCommand]]
    # What becomes of variables that may be secrets, for a message.
    kept_back: str = "not sent to other hosts"
    # What a host's name stands for, in the eyes of this starter: an address or a name that resolves here.
    resolve: Callable[[str, LaunchOptions], str] = lambda host, options: host
