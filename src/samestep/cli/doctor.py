"""Diagnose this machine or a run: what works, what went wrong, and what to do."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import environment, output_files
from samestep.durations import add_time_limit
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import MOST_PORT, WholeNumber

if TYPE_CHECKING:
    from samestep.doctor.findings import ExaminationRequest

_LIMIT = 60.0
_OF_THE_MACHINE = ("hosts", "hostfile", "port", "folder", "time_limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder",
        nargs="?",
        type=path_option,
        metavar="RUN_FOLDER",
        help="read the files of this run, not the machine",
    )
    parser.add_argument("--hosts", metavar="A,B", help="other hosts to reach, such as worker-1,10.0.0.7:2222")
    parser.add_argument(
        "--hostfile", type=path_option, metavar="FILE", help="the same from a file, as in samestep launch"
    )
    parser.add_argument("--port", type=WholeNumber(most=MOST_PORT), help="a port that should be free")
    parser.add_argument("--folder", type=path_option, help="where runs go (default: runs)")
    add_time_limit(parser, "all checks, and of a trial of ranks", _LIMIT, kept=False)
    output_files.add_arguments(parser, json="write everything that was found to a file")


def run(options: argparse.Namespace) -> int:
    output_files.check(options, "json")
    if options.run_folder is not None:
        names = [name for name in _OF_THE_MACHINE if getattr(options, name) is not None]
        if names:
            flag = "--" + names[0].replace("_", "-")
            raise UserError(f"{flag} is for the machine, and a run's folder is read alone; leave one of them out")

        from samestep.doctor.run import read

        findings, title = list(read(options.run_folder)), f"the run in {options.run_folder}"
    else:
        request, limit = _asked(options), _LIMIT if options.time_limit is None else options.time_limit
        if environment.ranks() is not None:
            raise UserError("the doctor starts its own processes; start it without a launcher")

        from samestep.doctor.examine import examine

        findings, title = list(examine(request, limit=limit)), "this machine"

    from samestep.doctor.findings import print_findings

    output_files.write_json(options.json, [finding.to_json() for finding in findings])
    print_findings(findings, title)
    return 1 if any(finding.verdict == "problem" for finding in findings) else 0


def _asked(options: argparse.Namespace) -> "ExaminationRequest":
    from samestep.doctor.findings import ExaminationRequest, HostAddress, parse_hosts
    from samestep.launch.environments.hostfile import read_hostfile

    if options.hosts is not None and options.hostfile is not None:
        raise UserError("--hosts and --hostfile both name hosts; leave one of them out")
    hosts = ()
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        listed, _ = read_hostfile(options.hostfile)
        hosts = tuple(HostAddress(name=host.name) for host in listed)
    return ExaminationRequest(hosts=hosts, port=options.port, folder=options.folder or Path("runs"))
