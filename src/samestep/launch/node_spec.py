"""NodeSpec: what one host does in a job. Its agent needs to know no more, and it travels to that host as JSON.

Limits are the times after which hosts of a job take each other for dead. A Starter brings the agents of a job's hosts
up from one of them, or from none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from samestep.errors import UserError
from samestep.launch.affinity import BindChoice
from samestep.ranks import DeviceChoice
from samestep.run_folder import RunPlace

_SIGNS = 4  # heartbeats that must be missing before a host is silent


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times in seconds."""

    silence: float = 8.0  # of a host, or of the store where hosts meet, until it counts as lost
    beat: float = 0.5  # between two heartbeats
    keep_alive: int = 1  # between two heartbeats of PyTorch's rendezvous; three missing: not there
    first_call: float = 30.0  # that a job which has the fewest hosts it needs waits for more, when it starts
    last_call: float = 2.0  # the same, when it starts again
    meet: float = 600.0  # that hosts wait until there are enough
    # That a host which is cut off tries to reach the others again; by these limits it ends within 20 s.
    come_back: float = 8.0

    def check(self) -> None:
        """Raise UserError for a limit under which hosts would be lost that are there."""
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
    host: str  # this one, as messages call it
    node_rank: int = 0  # which of the hosts it is
    hosts: tuple[str, ...] = ()  # all, by node rank, as far as they are known
    fewest: int = 1  # hosts that the job needs
    most: int = 1  # hosts that it takes
    num_procs: int  # ranks of this host
    chosen: tuple[int, ...] | None = None  # of its accelerators, those that the ranks see; None: the first ones
    alike: bool = True  # whether every host has so many
    address: str | None = None  # of the store where the hosts meet; None: this one is alone
    port: int = 0
    serves: bool = False  # whether this host's agent holds the store
    command: tuple[str, ...]  # a script or a program with its arguments, as the user gave them
    device: DeviceChoice = "auto"  # cpu: slots are places on cores, and ranks see no accelerator
    engine: str = "torch"  # which variables the ranks expect
    bind: BindChoice = "auto"  # to which cores the ranks are bound
    threads: int | None = None  # a rank
    logs: str | None = None  # the folder of the ranks' files; None: one in the run's folder
    run: RunPlace | None = None  # where the run's folder is, of a job of samestep's
    output: Output = "terminal"
    max_restarts: int = 0
    start_timeout: float = 300.0  # seconds that hosts wait for each other
    grace_period: float = 30.0  # seconds that the ranks have to end when they are told to
    heartbeat_timeout: float = Limits.silence  # seconds without a heartbeat, after which a host is lost
    rejoin_timeout: float = Limits.come_back  # seconds in which a host that is cut off may come back
    join_timeout: float = Limits.first_call  # seconds that a job waits for more hosts than it needs, when it starts
    controlled: bool = False  # whether a controller tells the user how the job ended

    @property
    def elastic(self) -> bool:
        return self.fewest != self.most

    @property
    def limits(self) -> Limits:
        """When this host takes others for lost."""
        return Limits(
            meet=self.start_timeout,
            silence=self.heartbeat_timeout,
            come_back=self.rejoin_timeout,
            first_call=self.join_timeout,
        )

    @property
    def size(self) -> str:
        """The number of hosts, as the command line says it."""
        return f"{self.fewest}:{self.most}" if self.elastic else str(self.most)

    def name_of(self, node_rank: int) -> str:
        """How messages call another host."""
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
