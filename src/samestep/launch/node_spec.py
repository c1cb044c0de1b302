"""NodeSpec: one host's part of a job. It contains all that the host's agent needs, and is sent to it as JSON.

Limits are the timeouts after which hosts take each other for dead. A Starter starts the agents of a job's hosts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from samestep.errors import UserError
from samestep.launch.affinity import BindChoice
from samestep.ranks import DeviceChoice
from samestep.run_folder import RunPlace

_SIGNS = 4  # missing heartbeats before a host counts as silent


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts and intervals in seconds."""

    silence: float = 8.0  # without heartbeats of a host, or answers of the store, until it counts as lost
    beat: float = 0.5  # between two heartbeats
    keep_alive: int = 1  # between heartbeats of PyTorch's rendezvous, which tolerates two missing
    first_call: float = 30.0  # wait for more hosts than the minimum at the job's start
    last_call: float = 2.0  # the same at a later round
    meet: float = 600.0  # wait for the minimum number of hosts
    # Seconds for which a disconnected host tries to reach the others again; with these limits it ends within 20 s.
    come_back: float = 8.0

    def check(self) -> None:
        """Raise UserError for a timeout so short that live hosts would count as lost."""
        least = _SIGNS * self.beat
        if self.silence < least:
            raise UserError(
                f"--heartbeat-timeout is {self.silence:g} s, and hosts send a heartbeat every {self.beat:g} s; use "
                f"{least:g} s or more"
            )


Output = Literal["terminal", "files"]


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One host's part of a job."""

    job: str  # the job's id, the same on all hosts
    host: str  # its name in messages
    node_rank: int = 0  # its index among the hosts
    hosts: tuple[str, ...] = ()  # names of all hosts by node rank, if known
    fewest: int = 1  # minimum number of hosts
    most: int = 1  # maximum number of hosts
    num_procs: int  # ranks of this host
    chosen: tuple[int, ...] | None = None  # indices of the accelerators that the ranks see; None: the first ones
    alike: bool = True  # whether every host has this many ranks
    address: str | None = None  # of the job's store; None: a single-host job
    port: int = 0
    serves: bool = False  # whether this host's agent serves the store
    command: tuple[str, ...]  # a script or a program with its arguments, as the user gave them
    device: DeviceChoice = "auto"  # cpu: slots are places on cores, and ranks see no accelerators
    engine: str = "torch"  # selects the variables that scripts expect
    bind: BindChoice = "auto"  # how ranks are bound to cores
    threads: int | None = None  # a rank
    logs: str | None = None  # the folder of the ranks' files; None: one in the run's folder
    run: RunPlace | None = None  # of a samestep job: where its run's folder is
    output: Output = "terminal"
    max_restarts: int = 0
    start_timeout: float = 300.0  # seconds to wait for other hosts
    grace_period: float = 30.0  # seconds for ranks to end after SIGTERM
    heartbeat_timeout: float = Limits.silence  # seconds without a heartbeat, after which a host is lost
    rejoin_timeout: float = Limits.come_back  # seconds for which a disconnected host may come back
    join_timeout: float = Limits.first_call  # seconds to wait for more hosts than the minimum, at the start
    controlled: bool = False  # whether a controller reports the job's outcome to the user

    @property
    def elastic(self) -> bool:
        return self.fewest != self.most

    @property
    def limits(self) -> Limits:
        """Timeouts after which this host takes others for lost."""
        return Limits(
            meet=self.start_timeout,
            silence=self.heartbeat_timeout,
            come_back=self.rejoin_timeout,
            first_call=self.join_timeout,
        )

    @property
    def size(self) -> str:
        """Number of hosts in the form of the command line."""
        return f"{self.fewest}:{self.most}" if self.elastic else str(self.most)

    def name_of(self, node_rank: int) -> str:
        """Return another host's name for messages."""
        return self.hosts[node_rank] if node_rank < len(self.hosts) else f"node rank {node_rank}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "NodeSpec":
        """JSON has lists where this has tuples."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        run = values.get("run")
        return cls(**{**values, **lists, "run": RunPlace(**run) if run is not None else None})


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The user's options for reaching the hosts."""

    ssh: tuple[str, ...] = ("ssh",)  # the command, with its options
    remote_python: tuple[str, ...]  # Python on the hosts
    ray: str | None = None  # the address of a Ray cluster
    this: int | None = None  # index of this machine among the hosts
    silence: float = Limits.silence  # seconds without a heartbeat, after which a host is lost
    kept_back: tuple[str, ...] = ()  # variables that no other host receives


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """A local process (ssh, srun or ray) connected to the agents of one or several hosts."""

    command: tuple[str, ...]
    parts: tuple[NodeSpec, ...]  # of several, each agent picks its own host's
    without: tuple[str, ...] = ()  # variables removed from this process's environment

    @property
    def hosts(self) -> str:
        return ", ".join(part.host for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A way to start agents."""

    bring: Callable[[Sequence[NodeSpec], LaunchOptions], list[AgentCommand]]
    # What happens to variables that may be secrets, for a message.
    kept_back: str = "not sent to other hosts"
    # Resolves a host's name, as this starter understands it, to an address or a name that resolves here.
    resolve: Callable[[str, LaunchOptions], str] = lambda host, options: host
