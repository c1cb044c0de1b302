"""Time every collective on the ranks at hand; `comm demo` shows one, `comm support` tells what each back end has."""

import argparse
from typing import Any

from samestep import output_files
from samestep.durations import add_time_limit, seconds
from samestep.limits import MOST_RANKS_A_HOST, WholeNumber

_AUTO: dict[str, Any] = {"default": "auto"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _ranks_arguments(parser)
    parser.add_argument(
        "--sizes", metavar="SIZES", help="such as 1KiB,1MiB (default: 1 KiB to 256 MiB, in powers of 4)"
    )
    parser.add_argument("--collectives", metavar="NAMES", help="such as all-reduce,broadcast (default: all)")
    parser.add_argument(
        "--seconds", type=seconds, default=0.3, metavar="TIME", help="of the samples of one row (default: 0.3)"
    )
    output_files.add_arguments(
        parser, json="write every row, fit and limit to a file", plot="draw time and bus bandwidth: .svg or .html"
    )
    parser.set_defaults(act=_measure)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser("demo", allow_abbrev=False, help=_one_line(_demo), description=_demo.__doc__)
    demo.add_argument("name", metavar="NAME", help="of the collective, such as all-reduce, or all")
    demo.add_argument(
        "--transport",
        default="auto",
        metavar="NAME",
        help="gloo, shared-memory or accelerator (default: auto, the one that a job gets here)",
    )
    support = commands.add_parser(
        "support", allow_abbrev=False, help=_one_line(_support), description=_support.__doc__
    )
    add_time_limit(support, "one attempt", 10)
    output_files.add_arguments(support, json="write every attempt to a file")
    for command, act in ((demo, _demo), (support, _support)):
        # Without defaults of their own: what stands before the command's name counts, too.
        _ranks_arguments(command, default=argparse.SUPPRESS)
        command.set_defaults(act=act)


def run(options: argparse.Namespace) -> int:
    return options.act(options)


def _ranks_arguments(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument(
        "--processes",
        type=WholeNumber(most=MOST_RANKS_A_HOST),
        metavar="N",
        help="ranks to start here (default: one for each accelerator or core); not in ranks of a launcher",
        **more,
    )
    parser.add_argument("--device", choices=("auto", "cpu"), help="cpu: no accelerator is used", **(more or _AUTO))


def _one_line(command: Any) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _measure(options: argparse.Namespace) -> int:
    """Check and time collectives."""
    output_files.check(options, "json", "plot")

    from samestep.comm_bench.request import USUAL, parse_sizes

    sizes = parse_sizes(options.sizes) if options.sizes is not None else USUAL

    from samestep.comm_bench.display import check_file, print_report, write_plot
    from samestep.comm_bench.request import CommRequest, check_collectives, check_sizes, processes_of
    from samestep.comm_bench.run import measured

    check_file(options.plot)
    request = CommRequest(sizes=sizes, device=options.device, seconds=options.seconds)
    if options.collectives is not None:
        names = check_collectives([name.strip() for name in options.collectives.split(",")])
        request = CommRequest(sizes=sizes, device=options.device, seconds=options.seconds, collectives=names)
    processes = processes_of(options.processes, options.device)
    check_sizes(request, processes)
    report = measured(request, processes)
    if report is None:
        return 0  # only rank 0 prints
    output_files.write_json(options.json, report.to_json())
    if options.plot is not None:
        write_plot(report, options.plot)
    print_report(report)
    return 0 if report.passed else 1


def _demo(options: argparse.Namespace) -> int:
    """Show what a collective does: the tensor of each rank before and after."""
    from samestep.comm.collectives import COLLECTIVES
    from samestep.comm_bench.display import print_demonstration
    from samestep.comm_bench.request import check_collectives, check_transport, processes_of
    from samestep.comm_bench.run import demonstrated

    names = tuple(COLLECTIVES) if options.name == "all" else check_collectives([options.name])
    transport = check_transport(options.transport)
    processes = processes_of(options.processes, options.device)
    shown = demonstrated(names, options.device, processes, transport)
    for demonstration in shown or ():
        print_demonstration(demonstration)
    return 0


def _support(options: argparse.Namespace) -> int:
    """Try each back end with each device, collective and dtype, and tell what works."""
    output_files.check(options, "json")

    from samestep import environment
    from samestep.comm_bench.display import print_support
    from samestep.comm_bench.request import processes_of
    from samestep.comm_bench.support import supported

    processes = options.processes if options.processes is not None or environment.ranks() is not None else 2
    support = supported(options.device, processes_of(processes, options.device), limit=options.time_limit)
    if support is not None:
        output_files.write_json(options.json, support.to_json())
        print_support(support)
    return 0
