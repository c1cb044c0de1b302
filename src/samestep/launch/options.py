"""The user's options of a launch. Each is declared here once: a field with its default and its help.

`cli/launch_options.py` makes the command line's options from these fields, and puts what the user gave into the
objects below. They reach the place that uses them whole:

- `HostOptions`: to `environments` and `filters`, which find and select the hosts.
- `RankOptions`, `LaunchTimeouts`: to every host, in its `NodeSpec`.
- `LaunchOptions`: to the starter of the agents.
- `LaunchRequest`: all of them, with the options that only the launcher reads.

It imports no more than `samestep launch --help` needs.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from samestep.durations import duration_text
from samestep.errors import UserError
from samestep.launch.affinity import BindChoice
from samestep.limits import MOST_RANKS, read_whole
from samestep.ranks import DeviceChoice

if TYPE_CHECKING:
    from samestep.run_folder import RunPlace

# How an option is written on the command line. A "text" is not empty; "words" are those of a command, split as a
# shell does; "nodes" are MIN:MAX; a "flag" has no value.
Kind = Literal[
    "text", "path", "words", "nodes", "hosts", "node-rank", "ranks", "restarts", "threads", "port", "seconds", "flag"
]

Output = Literal["terminal", "files"]


@dataclass(frozen=True)
class Help:
    """What the command line says of a field that is an option, and how it reads it. It stands in `Annotated`."""

    text: str
    metavar: str | None = None
    kind: Kind = "text"
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of the command line, as its field declares it."""

    name: str  # of the field
    default: Any  # None: not given
    help: Help

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def options_of(owner: type[Any]) -> list[Option]:
    """Return the options that a class below declares, in their order."""
    options: list[Option] = []
    for field_ in fields(owner):
        declared = next(
            (extra for extra in getattr(field_.type, "__metadata__", ()) if isinstance(extra, Help)), None
        )
        if declared is None:
            continue
        default: Any = None if field_.default is MISSING else field_.default
        if declared.kind == "seconds":
            declared = replace(declared, text=f"{declared.text} (default: {duration_text(default)})")
        if declared.kind == "words" and default is not None:
            default = shlex.join(default)
        options.append(Option(name=field_.name, default=default, help=declared))
    return options


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Which hosts. None: not given."""

    hostfile: Annotated[Path | None, Help("hosts, one a line: worker-1 slots=4", "FILE", "path")] = None
    ray: Annotated[str | None, Help("the hosts of a Ray cluster, such as auto or 10.0.0.5:6379", "ADDRESS")] = None
    place: Annotated[str | None, Help("take the hosts of this place, such as slurm", "NAME")] = None
    include: Annotated[
        str | None, Help('these hosts and slots alone: "worker-2:0,1@worker-3", "localhost:0,1"', "HOSTS")
    ] = None
    exclude: Annotated[str | None, Help('all but these hosts and slots: "worker-2:0@worker-3:0,1"', "HOSTS")] = None
    num_nodes: Annotated[int | None, Help("the first N of the hosts", "N", "hosts")] = None
    num_procs: Annotated[int | None, Help("N ranks on each host", "N", "ranks")] = None


# Restarts of an elastic job where the user names no number: with 0, the loss of one host would end it.
ELASTIC_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How each host starts its ranks and looks after them, the same on all hosts."""

    # cpu: slots are places on cores, and ranks see no accelerators.
    device: Annotated[
        DeviceChoice,
        Help("cpu: slots are cores, and ranks see no accelerator", choices=get_args(DeviceChoice)),
    ] = "auto"
    engine: Annotated[str, Help("whose scripts: torch, deepspeed, accelerate, horovod, keras, lightning")] = "torch"
    bind: Annotated[BindChoice, Help("ranks to cores: auto, none, cores or numa", "WAY")] = "auto"
    threads: Annotated[int | None, Help("threads a rank (default: the cores shared out)", "N", "threads")] = None
    logs: Annotated[
        str | None,
        Help(
            "what each rank prints (default: runs/launch-<job id>; of a training, logs/ in the run's folder)",
            "FOLDER",
        ),
    ] = None
    output: Annotated[Output, Help("where else it goes: the terminal, or none", choices=get_args(Output))] = (
        "terminal"
    )
    # None: 0, or ELASTIC_RESTARTS for an elastic job.
    max_restarts: Annotated[
        int | None,
        Help(
            f"restarts of the ranks (default: 0; with --nodes MIN:MAX, MAX more than MIN, {ELASTIC_RESTARTS})",
            "N",
            "restarts",
        ),
    ] = None
    # Seconds from SIGTERM.
    grace_period: Annotated[float, Help("ranks have so long to end", "TIME", "seconds")] = 30.0

    def restarts(self, *, elastic: bool) -> int:
        """Return the number of restarts: as requested, else by whether the job may lose hosts."""
        if self.max_restarts is not None:
            return self.max_restarts
        return ELASTIC_RESTARTS if elastic else 0


_LEAST_HEARTBEATS = 4  # missing ones before a host counts as silent


@dataclass(frozen=True, kw_only=True)
class LaunchTimeouts:
    """Timeouts and intervals in seconds. Those that are no options are the same for every job."""

    start_timeout: Annotated[float, Help("hosts wait so long", "TIME", "seconds")] = 300.0
    # The same for answers of the job's store.
    heartbeat_timeout: Annotated[
        float, Help("without a heartbeat for so long, a host is lost", "TIME", "seconds")
    ] = 8.0
    # With these defaults a host that is cut off ends within 20 s.
    rejoin_timeout: Annotated[
        float, Help("a host that is cut off tries to come back for so long", "TIME", "seconds")
    ] = 8.0
    join_timeout: Annotated[
        float, Help("with --nodes: wait so long for more than MIN hosts at the start", "TIME", "seconds")
    ] = 30.0
    later_join_timeout: float = 2.0  # the same at a later round
    heartbeat_interval: float = 0.5
    meeting_silence: float = 2.0  # without a heartbeat for so long, a host that meets others is left out

    def check(self) -> None:
        """Raise UserError for a timeout so short that live hosts would count as lost."""
        least = _LEAST_HEARTBEATS * self.heartbeat_interval
        if self.heartbeat_timeout < least:
            raise UserError(
                f"--heartbeat-timeout is {self.heartbeat_timeout:g} s, and hosts send a heartbeat every "
                f"{self.heartbeat_interval:g} s; use {least:g} s or more"
            )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the agents on the hosts are reached; what is no option the launcher adds."""

    ssh: Annotated[
        tuple[str, ...], Help('OpenSSH, with options of your own: "ssh -F config"', "COMMAND", "words")
    ] = ("ssh",)
    remote_python: Annotated[
        tuple[str, ...], Help("Python on the hosts (default: the path of this one)", "COMMAND", "words")
    ] = field(default_factory=lambda: (sys.executable,))
    ray: str | None = None  # the address of a Ray cluster
    this: int | None = None  # index of this machine among the hosts
    kept_back: tuple[str, ...] = ()  # variables that no other host receives


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """All that the user asks of a launch, and the job whose ranks it starts."""

    command: tuple[str, ...]  # a script or a program with its arguments
    nodes: Annotated[
        tuple[int, int] | None,
        Help("a job that goes on with MIN hosts and takes up to MAX", "MIN:MAX", "nodes"),
    ] = None
    no_ssh: Annotated[bool, Help("this is started on every host, as in containers", kind="flag")] = False
    node_rank: Annotated[int | None, Help("which of the hosts this is, from 0", "N", "node-rank")] = None
    # Address and port of the job's store.
    master_addr: Annotated[
        str | None, Help("where the hosts meet: with --no-ssh, the host with node rank 0", "ADDRESS")
    ] = None
    master_port: Annotated[
        int | None, Help("its port (default: a free one; with --no-ssh 29500)", "PORT", "port")
    ] = None
    secret_file: Annotated[
        Path | None,
        Help("with --no-ssh: a secret, the same on all hosts, that signs what they tell each other", "FILE", "path"),
    ] = None
    job_id: Annotated[str | None, Help("the same on all hosts (default: the place's, or made)", "ID")] = None
    chdir: Annotated[str, Help("the folder in which ranks work, on every host (default: this one)", "FOLDER")] = (
        field(default_factory=lambda: str(Path.cwd()))
    )
    hosts: HostOptions = field(default_factory=HostOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    timeouts: LaunchTimeouts = field(default_factory=LaunchTimeouts)
    reach: LaunchOptions = field(default_factory=LaunchOptions)
    run: "RunPlace | None" = None  # of a samestep job: where its run's folder is


def values_for(owner: type[Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a class's options, by the names of its fields. Those not given keep the field's default.

    `texts` has them as the command line's parser leaves them. Raises UserError.
    """
    values: dict[str, Any] = {}
    for option in options_of(owner):
        if (value := texts.get(option.name)) is not None:
            read = _READ.get(option.help.kind)
            values[option.name] = read(option.flag, value) if read is not None else value
    return values


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}".replace("No closing quotation", "a quote has no end")) from None
    if not words:
        raise UserError(f"{flag} is empty; a command is wanted")
    return words


def _nodes(flag: str, text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    fewest, most = read_whole(first), read_whole(last or first)
    if fewest is not None and most is not None and 1 <= fewest <= most <= MOST_RANKS:
        return fewest, most
    raise UserError(
        f'{flag} "{text}": the fewest and the most hosts are wanted, such as 1:4, and at most {MOST_RANKS:,}'
    )


# Kinds of which the parser leaves the text, since `samestep launch --k8s` passes it on as it was written.
_READ: Mapping[Kind, Callable[[str, str], Any]] = {"words": _words, "nodes": _nodes}
