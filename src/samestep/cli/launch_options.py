"""Options that say on which hosts ranks are started, and how, for `samestep launch` and `train`; and the start.

`samestep hosts` has those alone that name the hosts: it shows where ranks would be.
"""

import argparse
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.launch.node_spec import Limits

if TYPE_CHECKING:
    from samestep.launch.environments.base import FoundCluster
    from samestep.launch.forwarded_env import Variables
    from samestep.launch.launcher import LaunchRequest
    from samestep.ranks import DeviceChoice

# Options that `samestep train` takes from its job, by their names in the job.
OF_LAUNCH = ("device", "engine", "threads", "max_restarts", "grace_period")

# Default of --max-restarts for an elastic job: with 0, the loss of one host would end it.
ELASTIC_RESTARTS = 3


def add_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add all options of a launch except those in `without`."""
    add_hosts(parser)
    start = parser.add_argument_group("start", "over SSH, or by the same command on each host")
    add = _Adder(start, without)
    add("--nodes", metavar="MIN:MAX", help="a job that goes on with MIN hosts and takes up to MAX")
    add("--no-ssh", action="store_true", help="this is started on every host, as in containers")
    add("--node-rank", type=int, metavar="N", help="which of the hosts this is, from 0")
    add("--master-addr", metavar="ADDRESS", help="where the hosts meet: with --no-ssh, the host with node rank 0")
    add("--master-port", type=_port, metavar="PORT", help="its port (default: a free one; with --no-ssh 29500)")
    add("--job-id", metavar="ID", help="the same on all hosts (default: the place's, or made)")
    add("--start-timeout", type=_seconds, default=300.0, metavar="TIME", help="hosts wait so long (default: 5m)")
    add(
        "--max-restarts",
        type=_count,
        metavar="N",
        help=f"restarts of the ranks (default: 0; with --nodes MIN:MAX, MAX more than MIN, {ELASTIC_RESTARTS})",
    )
    add(
        "--grace-period", type=_seconds, default=30.0, metavar="TIME", help="ranks have so long to end (default: 30s)"
    )
    add(
        "--heartbeat-timeout",
        type=_seconds,
        default=Limits.silence,
        metavar="TIME",
        help=f"without a heartbeat for so long, a host is lost (default: {Limits.silence:g}s)",
    )
    add(
        "--rejoin-timeout",
        type=_seconds,
        default=Limits.come_back,
        metavar="TIME",
        help=f"a host that is cut off tries to come back for so long (default: {Limits.come_back:g}s)",
    )
    add(
        "--join-timeout",
        type=_seconds,
        default=Limits.first_call,
        metavar="TIME",
        help=f"with --nodes: wait so long for more than MIN hosts at the start (default: {Limits.first_call:g}s)",
    )
    add("--ssh", default="ssh", metavar="COMMAND", help='OpenSSH, with options of your own: "ssh -F config"')
    add("--remote-python", metavar="COMMAND", help="Python on the hosts (default: the path of this one)")
    add("--chdir", metavar="FOLDER", help="the folder in which ranks work, on every host (default: this one)")
    ranks = parser.add_argument_group("ranks")
    add = _Adder(ranks, without)
    if "device" not in without:
        add_device(ranks)
    add("--engine", default="torch", help="whose scripts: torch, deepspeed, accelerate, horovod, keras, lightning")
    add("--bind", default="auto", metavar="WAY", help="ranks to cores: auto, none, cores or numa")
    add("--threads", type=_positive, metavar="N", help="threads a rank (default: the cores shared out)")
    add(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="what each rank prints (default: runs/launch-<job id>; of a training, logs/ in the run's folder)",
    )
    add(
        "--output",
        choices=("terminal", "files"),
        default="terminal",
        help="where else it goes: the terminal, or none",
    )
    given = parser.add_argument_group("variables", "of NCCL, Python, samestep, ... go to every host; secrets stay")
    add = _Adder(given, without)
    add("--pass", dest="passed", action="append", default=[], metavar="NAME", help="this one goes too")
    add("--print-variables", action="store_true", help="print what goes to every host, and stop")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """The options that name the hosts of a job."""
    group = parser.add_argument_group("hosts", "found in what the place offers, unless they are named here")
    group.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, one a line: worker-1 slots=4")
    group.add_argument("--ray", metavar="ADDRESS", help="the hosts of a Ray cluster, such as auto or 10.0.0.5:6379")
    group.add_argument("--place", metavar="NAME", help="take the hosts of this place, such as slurm")
    group.add_argument(
        "--include", metavar="HOSTS", help='these hosts and slots alone: "worker-2:0,1@worker-3", "localhost:0,1"'
    )
    group.add_argument("--exclude", metavar="HOSTS", help='all but these hosts and slots: "worker-2:0@worker-3:0,1"')
    group.add_argument("--num-nodes", type=int, metavar="N", help="the first N of the hosts")
    group.add_argument("--num-procs", type=int, metavar="N", help="N ranks on each host")


def add_device(parser: "argparse._ActionsContainer") -> None:
    """For a command that has no job, which would say it."""
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: slots are cores, and ranks see no accelerator"
    )


class _Adder:
    def __init__(self, group: "argparse._ArgumentGroup", without: Collection[str]) -> None:
        self._group = group
        self._without = without

    def __call__(self, flag: str, **settings: object) -> None:
        if flag.removeprefix("--").replace("-", "_") not in self._without:
            self._group.add_argument(flag, **settings)  # pyright: ignore[reportArgumentType]


def named_hosts(options: argparse.Namespace) -> list[str]:
    """Return the flags by which the user named or filtered hosts."""
    names = ("hostfile", "ray", "place", "include", "exclude", "num_nodes", "num_procs")
    return [flag(name) for name in names if getattr(options, name) is not None]


def flag(name: str) -> str:
    """Return the flag on the command line for an option's name in the namespace."""
    return "--" + name.replace("_", "-")


def cluster_from(options: argparse.Namespace, device: "DeviceChoice") -> "FoundCluster":
    """Find the hosts of a job, filtered by the options, and how they were found. Raises UserError."""
    from samestep import environment
    from samestep.launch.environments.base import PlaceInputs
    from samestep.launch.environments.registry import find
    from samestep.launch.filters import Filters, apply

    environ = environment.snapshot()
    found = find(
        PlaceInputs(environ=environ, hostfile=options.hostfile, ray=options.ray, device=device), options.place
    )
    filters = Filters(
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_procs=options.num_procs,
        device=device,
    )
    return apply(found, filters, environ)


def found_from(options: argparse.Namespace, device: "DeviceChoice") -> "FoundCluster":
    """Find the hosts of a job; with --no-ssh, this host alone. Raises UserError."""
    if not options.no_ssh or options.hostfile is not None or options.ray is not None:
        return cluster_from(options, device)
    # Each host by itself: how many there are is said, not found, and this is one of them.
    from samestep import environment
    from samestep.launch.environments.base import PlaceInputs
    from samestep.launch.environments.registry import find
    from samestep.launch.filters import Filters, apply

    environ = environment.snapshot()
    found = find(PlaceInputs(environ=environ, device=device), options.place or "this-machine")
    filters = Filters(include=options.include, exclude=options.exclude, num_procs=options.num_procs, device=device)
    return apply(found, filters, environ)


def wanted_from(options: argparse.Namespace, command: tuple[str, ...], **otherwise: Any) -> "LaunchRequest":
    """Build a LaunchRequest from the options; values in `otherwise` take precedence. Raises UserError."""
    from samestep.launch.launcher import LaunchRequest, parse_nodes

    own: dict[str, Any] = {name: otherwise.get(name, getattr(options, name, None)) for name in OF_LAUNCH}
    nodes = parse_nodes(options.nodes) if options.nodes is not None else None
    if options.ray is not None and options.remote_python is not None:
        raise UserError("--remote-python is for hosts reached by SSH or srun; on Ray's nodes it is Ray's own Python")
    if own["max_restarts"] is None:
        own["max_restarts"] = ELASTIC_RESTARTS if nodes is not None and nodes[0] < nodes[1] else 0
    return LaunchRequest(
        command=command,
        bind=options.bind,
        nodes=nodes,
        no_ssh=options.no_ssh,
        num_nodes=options.num_nodes,
        node_rank=options.node_rank,
        address=options.master_addr,
        port=options.master_port,
        job=options.job_id,
        logs=options.logs,
        run=otherwise.get("run"),
        output=options.output,
        start_timeout=options.start_timeout,
        heartbeat_timeout=options.heartbeat_timeout,
        rejoin_timeout=options.rejoin_timeout,
        join_timeout=options.join_timeout,
        ssh=_words("--ssh", options.ssh),
        remote_python=_words("--remote-python", options.remote_python)
        if options.remote_python is not None
        else (sys.executable,),
        ray=options.ray,
        folder=options.chdir or str(Path.cwd()),
        **own,
    )


def launch(options: argparse.Namespace, found: "FoundCluster", wanted: "LaunchRequest") -> int:
    """Start a command as ranks on the hosts that were found, and see it end. Raises UserError."""
    check(wanted)
    variables = variables_from(options)

    from samestep.launch.launcher import launch as start

    outcome = start(found, wanted, variables)
    if outcome.message is not None:
        print(f"samestep: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def check(wanted: "LaunchRequest") -> None:
    """Raise UserError for a wrong engine, binding or time limit, before any host is looked for."""
    from samestep.launch.affinity import check_choice
    from samestep.launch.script_env import registry

    registry.check(wanted.engine)
    check_choice(wanted.bind)
    Limits(silence=wanted.heartbeat_timeout).check()


def variables_from(options: argparse.Namespace) -> "Variables":
    """Gather the environment variables for every host. Raises UserError."""
    from samestep import environment
    from samestep.launch.forwarded_env import files_of, gather

    environ = environment.snapshot()
    files = files_of(environment.variables_file(environ), Path.cwd(), Path.home())
    return gather(environ, asked=options.passed, files=files)


def print_variables(options: argparse.Namespace) -> int:
    variables = variables_from(options)
    for name, value, source in variables.shown():
        print(f"{name}={value}    ({source})")
    for name in variables.kept_back:
        print(f"{name} stays here: its name is that of a secret; --pass {name} sends it")
    return 0


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}".replace("No closing quotation", "a quote has no end")) from None
    if not words:
        raise UserError(f"{flag} is empty; a command is wanted")
    return words


def wishes(options: argparse.Namespace) -> bool:
    """Whether any option of a launch differs from its default."""
    parser = _own_parser()
    return any(getattr(options, name) != value for name, value in vars(parser.parse_args([])).items())


def words_of_others(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that are not options of a launch, in their order."""
    return _own_parser().parse_known_args(words)[1]


# Options that a pod's own launch needs; who it is and where the others are, its variables say.
_IN_A_POD = (
    "nodes",
    "start_timeout",
    "max_restarts",
    "grace_period",
    "heartbeat_timeout",
    "rejoin_timeout",
    "join_timeout",
    "engine",
)
_IN_A_POD += ("device", "bind", "threads", "logs", "output", "chdir")

# Those that say how hosts are reached, or what is sent there from here.
_OF_NO_POD = ("no_ssh", "node_rank", "master_addr", "master_port", "ssh", "remote_python", "passed")


def words_in_a_pod(options: argparse.Namespace) -> list[str]:
    """Return the options of a launch for the command in a pod, except those at their defaults.

    Raises UserError for an option that has no effect there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    usual = parser.parse_args([])
    if refused := [name for name in _OF_NO_POD if getattr(options, name) != getattr(usual, name)]:
        flags = " and ".join("--pass" if name == "passed" else flag(name) for name in refused)
        raise UserError(
            f"{flags} would have no effect with --k8s: Kubernetes starts the pods and tells them of each other, and "
            "their variables are those of the manifest; leave out what has none"
        )
    words = []
    for name in _IN_A_POD:
        value = getattr(options, name)
        if value != getattr(usual, name):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [flag(name), text]
    return words


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, without=OF_LAUNCH)
    return parser


def _seconds(text: str) -> float:
    from samestep.job import seconds_of

    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = seconds_of(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f'"{text}" is no time; use 90s, 5m or 1h') from None
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f'"{text}" is no time; use 90s, 5m or 1h')
    return seconds


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f'"{text}" is no port; a number from 1 to 65535 is')
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f'"{text}" is no number; 0 or more is wanted')
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no number; 1 or more is wanted')
    return int(text)
