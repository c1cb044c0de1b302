"""NodeSpec: one host's part of a job. It contains all that the host's agent needs, and is sent to it as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep.launch.options import LaunchTimeouts, RankOptions
from samestep.run_folder import RunPlace


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
    must_match: bool = True  # whether every host must have this many ranks
    address: str | None = None  # of the job's store; None: a single-host job
    port: int = 0
    serves: bool = False  # whether this host's agent serves the store
    command: tuple[str, ...]  # a script or a program with its arguments, as the user gave them
    run: RunPlace | None = None  # of a samestep job: where its run's folder is
    ranks: RankOptions = field(default_factory=RankOptions)
    timeouts: LaunchTimeouts = field(default_factory=LaunchTimeouts)  # after which this host takes others for lost
    controlled: bool = False  # whether a controller reports the job's outcome to the user

    @property
    def elastic(self) -> bool:
        return self.fewest != self.most

    @property
    def max_restarts(self) -> int:
        return self.ranks.restarts(elastic=self.elastic)

    @property
    def logs(self) -> str | None:
        """Folder of the ranks' logs; None: in the run's folder, which the first host chooses."""
        if self.ranks.logs is None and self.run is not None:
            return None
        return self.ranks.logs or str(Path("runs") / f"launch-{self.job}")

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
        run = RunPlace(**values["run"]) if values.get("run") is not None else None
        ranks, timeouts = RankOptions(**values["ranks"]), LaunchTimeouts(**values["timeouts"])
        return cls(**{**values, **lists, "run": run, "ranks": ranks, "timeouts": timeouts})
