"""Show the hosts that were found, from where, and what each rank would get. Nothing is started."""

import argparse
import json
from pathlib import Path

from samestep.cli import cluster_options, job_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_options.add_arguments(parser)
    parser.add_argument(
        "--layout", metavar="LAYOUT", help='show who is near to whom under a layout, such as "pp2 dp2 tp2"'
    )
    cluster_options.add_device(parser)
    parser.add_argument("--bind", default="auto", help="show cores as samestep launch --bind would give them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is shown to a file")


def run(options: argparse.Namespace) -> int:
    job_options.check("--json", options.json)
    found = cluster_options.cluster_from(options, options.device)

    from samestep.display.hosts import hosts_shown, print_hosts
    from samestep.launch.affinity import bindings, check_choice, in_words, this_machine

    check_choice(options.bind)
    here = found.cluster.this
    ranks = 0 if here is None else found.cluster.hosts[here].slots
    cores = [in_words(each) for each in bindings(this_machine(), ranks, options.bind)] if ranks else []
    shown = hosts_shown(found, options.layout, cores)
    if not job_options.is_main():
        return 0  # of many that a launcher has started, one tells it
    if options.json is not None:
        options.json.write_text(json.dumps(shown.to_json(), indent=2) + "\n", encoding="utf-8")
    print_hosts(shown)
    return 0
