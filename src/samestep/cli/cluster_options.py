"""Options that name the hosts of a job, for every command that starts ranks or shows where they would be."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samestep.launch.environments.base import FoundCluster
    from samestep.ranks import DeviceChoice


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def named(options: argparse.Namespace) -> list[str]:
    """The flags with which hosts were named or filtered."""
    names = ("hostfile", "ray", "place", "include", "exclude", "num_nodes", "num_procs")
    return [flag(name) for name in names if getattr(options, name) is not None]


def flag(name: str) -> str:
    """An option as the user writes it, of the name that it has here."""
    return "--" + name.replace("_", "-")


def cluster_from(options: argparse.Namespace, device: "DeviceChoice") -> "FoundCluster":
    """The hosts that a job on such devices takes, and how they came to be known. Raises UserError."""
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
