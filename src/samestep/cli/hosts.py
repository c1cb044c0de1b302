"""Show the hosts that were found, from where, and what each rank would get. Nothing is started."""

import argparse

from samestep import output_files
from samestep.cli import job_options, launch_options
from samestep.launch.options import RankOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launch_options.add_hosts(parser)
    parser.add_argument(
        "--layout", metavar="LAYOUT", help='show who is near to whom under a layout, such as "pp2 dp2 tp2"'
    )
    launch_options.add_device(parser)
    parser.add_argument(
        "--bind", default=RankOptions.bind, help="show cores as samestep launch --bind would give them"
    )
    output_files.add_arguments(parser, json="write everything that is shown to a file")


def run(options: argparse.Namespace) -> int:
    output_files.check(options, "json")
    found_cluster = launch_options.cluster_from(launch_options.hosts_from(options), options.device)

    from samestep.display.hosts import hosts_shown, print_hosts
    from samestep.launch.affinity import bindings, check_choice, in_words, this_machine

    check_choice(options.bind)
    here = found_cluster.cluster.this
    ranks = 0 if here is None else found_cluster.cluster.hosts[here].slots
    cores = [in_words(binding) for binding in bindings(this_machine(), ranks, options.bind)] if ranks else []
    shown = hosts_shown(found_cluster, options.layout, cores)
    if not job_options.is_main():
        return 0  # of many processes that a launcher has started, rank 0 alone prints
    output_files.write_json(options.json, shown.to_json())
    print_hosts(shown)
    return 0
