"""Start a script or a program as ranks: on this machine, on the hosts of a file over SSH, or as one host of many."""

import argparse
import sys

from samestep.cli import launch_options
from samestep.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launch_options.add_arguments(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="train.py --lr 3e-4, or -m package.module, or any program, with its arguments",
    )


def run(options: argparse.Namespace) -> int:
    try:
        return _launch(options)
    except UserError as error:
        # Told here: in a pod, variables call this process a rank, and only the first rank would tell it.
        print(f"samestep: {error}", file=sys.stderr)
        return 2


def _launch(options: argparse.Namespace) -> int:
    if options.print_variables:
        return launch_options.print_variables(options)

    from samestep.cluster.start.launch import parse_command

    wanted = launch_options.wanted_from(options, parse_command(options.command))
    return launch_options.launch(options, launch_options.found_from(options), wanted)
