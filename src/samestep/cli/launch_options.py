"""Options that say on which hosts ranks are started, and how, for `samestep launch` and `train`; and the start.

`launch/options.py` declares them, with their defaults and their help. `samestep hosts` has those alone that name the
hosts: it shows where ranks would be.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.durations import seconds
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.launch.options import (
    HostOptions,
    Kind,
    LaunchOptions,
    LaunchRequest,
    LaunchTimeouts,
    Option,
    RankOptions,
    options_of,
    values_for,
)
from samestep.limits import MOST_PORT, MOST_RANKS, MOST_RANKS_A_HOST, MOST_RESTARTS, MOST_THREADS, WholeNumber

if TYPE_CHECKING:
    from samestep.launch.environments.base import FoundCluster
    from samestep.launch.forwarded_env import ForwardedVariables
    from samestep.ranks import DeviceChoice
    from samestep.run_folder import RunPlace

# Options that `samestep train` takes from its job, by their names in the job.
OF_LAUNCH = ("device", "engine", "threads", "max_restarts", "grace_period")


def add_arguments(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Add all options of a launch except those in `without`."""
    add_hosts(parser)
    start = parser.add_argument_group("start", "over SSH, or by the same command on each host")
    for owner in (LaunchRequest, LaunchTimeouts, LaunchOptions):
        _add_options(start, options_of(owner))
    ranks = [option for option in options_of(RankOptions) if option.name not in without]
    _add_options(parser.add_argument_group("ranks"), ranks)
    group = parser.add_argument_group("variables", "of NCCL, Python, samestep, ... go to every host; secrets stay")
    group.add_argument("--pass", dest="passed", action="append", default=[], metavar="NAME", help="this one goes too")
    group.add_argument("--print-variables", action="store_true", help="print what goes to every host, and stop")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """The options that name the hosts of a job."""
    group = parser.add_argument_group("hosts", "found in what the place offers, unless they are named here")
    _add_options(group, options_of(HostOptions))


def add_device(parser: argparse.ArgumentParser) -> None:
    """For a command that has no job, which would say it."""
    _add_options(parser, [option for option in options_of(RankOptions) if option.name == "device"])


def _add_options(group: "argparse._ActionsContainer", declared: Sequence[Option]) -> None:
    for option in declared:
        if option.help.kind == "flag":
            group.add_argument(option.flag, action="store_true", help=option.help.text)
        else:
            group.add_argument(
                option.flag,
                type=_PARSERS.get(option.help.kind, str),
                default=option.default,
                choices=option.help.choices,
                metavar=option.help.metavar,
                help=option.help.text,
            )


def hosts_from(options: argparse.Namespace) -> HostOptions:
    return HostOptions(**values_for(HostOptions, vars(options)))


def named_hosts(options: argparse.Namespace) -> list[str]:
    """Return the flags by which the user named or filtered hosts."""
    return [option.flag for option in options_of(HostOptions) if getattr(options, option.name) is not None]


def cluster_from(hosts: HostOptions, device: "DeviceChoice") -> "FoundCluster":
    """Find the hosts of a job, filtered by the options, and how they were found. Raises UserError."""
    from samestep import environment
    from samestep.launch.environments.base import PlaceInputs
    from samestep.launch.environments.registry import find
    from samestep.launch.filters import apply

    environ = environment.snapshot()
    inputs = PlaceInputs(environ=environ, hostfile=hosts.hostfile, ray=hosts.ray, device=device)
    return apply(find(inputs, hosts.place), hosts, environ, device)


def found_from(request: LaunchRequest) -> "FoundCluster":
    """Find the hosts of a job; with --no-ssh, this host alone. Raises UserError."""
    hosts = request.hosts
    if request.no_ssh and hosts.hostfile is None and hosts.ray is None:
        # Each host by itself: how many there are is said, not found, and this is one of them.
        hosts = replace(hosts, place=hosts.place or "this-machine", num_nodes=None)
    return cluster_from(hosts, request.ranks.device)


def request_from(
    options: argparse.Namespace, command: tuple[str, ...], *, run: "RunPlace | None" = None, **of_job: Any
) -> LaunchRequest:
    """Build a LaunchRequest from the options; values in `of_job` take precedence. Raises UserError."""
    values = {**vars(options), **of_job}
    if values["ray"] is not None and values["remote_python"] is not None:
        raise UserError("--remote-python is for hosts reached by SSH or srun; on Ray's nodes it is Ray's own Python")
    return LaunchRequest(
        command=command,
        hosts=hosts_from(options),
        ranks=RankOptions(**values_for(RankOptions, values)),
        timeouts=LaunchTimeouts(**values_for(LaunchTimeouts, values)),
        reach=LaunchOptions(**values_for(LaunchOptions, values)),
        run=run,
        **values_for(LaunchRequest, values),
    )


def launch(options: argparse.Namespace, found_cluster: "FoundCluster", request: LaunchRequest) -> int:
    """Start a command as ranks on the hosts that were found, and see it end. Raises UserError."""
    check(request)
    variables = variables_from(options)

    from samestep.launch.job_secret import of_user
    from samestep.launch.launcher import launch as start

    outcome = start(found_cluster, request, variables, of_user(request.secret_file, options.job_secret))
    if outcome.message is not None:
        print(f"samestep: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def check(request: LaunchRequest) -> None:
    """Raise UserError for a wrong engine, binding or time limit, before any host is looked for."""
    from samestep.launch.affinity import check_choice
    from samestep.launch.script_env import registry

    registry.check(request.ranks.engine)
    check_choice(request.ranks.bind)
    request.timeouts.check()


def variables_from(options: argparse.Namespace) -> "ForwardedVariables":
    """Gather the environment variables for every host. Raises UserError."""
    from samestep import environment
    from samestep.launch.forwarded_env import files_of, gather
    from samestep.launch.job_secret import check_not_sent

    environ = environment.snapshot()
    check_not_sent(dict.fromkeys(options.passed, "--pass"))
    files = files_of(environment.variables_file(environ), Path.cwd(), environment.home_folder(environ))
    variables = gather(environ, passed=options.passed, files=files)
    check_not_sent(variables.sources)
    return variables


def print_variables(options: argparse.Namespace) -> int:
    variables = variables_from(options)
    for name, value, source in variables.shown():
        print(f"{name}={value}    ({source})")
    for name in variables.kept_back:
        print(f"{name} stays here: its name is that of a secret; --pass {name} sends it")
    for name in variables.unknown:
        print(f"{name} stays here: samestep doesn't know it; --pass {name} sends it")
    return 0


def wishes(options: argparse.Namespace) -> bool:
    """Whether any option of a launch differs from its default."""
    parser = _own_parser()
    return any(getattr(options, name) != value for name, value in vars(parser.parse_args([])).items())


def words_of_others(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that are not options of a launch, in their order."""
    return _own_parser().parse_known_args(words)[1]


# Options that a pod's own launch needs; who it is and where the others are, its variables say.
_IN_A_POD = (
    *("nodes", "secret_file"),
    *(option.name for owner in (LaunchTimeouts, RankOptions) for option in options_of(owner)),
    "chdir",
)

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
        flags = " and ".join("--pass" if name == "passed" else _flag(name) for name in refused)
        raise UserError(
            f"{flags} would have no effect with --k8s: Kubernetes starts the pods and tells them of each other, and "
            "their variables are those of the manifest; leave out what has none"
        )
    words = []
    for name in _IN_A_POD:
        value = getattr(options, name)
        if value != getattr(usual, name):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [_flag(name), text]
    if (every := vars(options).get("progress")) is not None:  # of every command
        words += ["--progress", every]
    return words


def _flag(name: str) -> str:
    """Return the flag on the command line for an option's name in the namespace."""
    return "--" + name.replace("_", "-")


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser, without=OF_LAUNCH)
    return parser


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty; write one, or leave the option out")
    return text


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    "text": _text,
    "path": path_option,
    "hosts": WholeNumber(most=MOST_RANKS),
    "node-rank": WholeNumber(least=0, most=MOST_RANKS - 1),
    "ranks": WholeNumber(most=MOST_RANKS_A_HOST),
    "restarts": WholeNumber(least=0, most=MOST_RESTARTS),
    "threads": WholeNumber(most=MOST_THREADS),
    "port": WholeNumber(most=MOST_PORT),
    "seconds": seconds,
}
