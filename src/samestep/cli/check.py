"""Check a job's task: its contract, the layouts that its model supports, and why it doesn't support the others."""

import argparse

from samestep import output_files
from samestep.cli import job_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=("layout", "processes", "checkpoint-every", "max-restarts", "folder"))
    parser.add_argument(
        "--layouts",
        metavar="LAYOUTS",
        help='layouts to try: "all", "fast", "experts", or "dp2, fsdp2 tp2" (default: each axis, over two processes)',
    )
    output_files.add_arguments(parser, json="write what was found to a file")


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json")

    from samestep.job_check import check_layouts, print_checked
    from samestep.verification.matrix import layouts_of

    layouts = None if options.layouts is None else layouts_of(options.layouts)
    checked = check_layouts(loaded.job, layouts)
    output_files.write_json(options.json, checked.to_json())
    print_checked(checked)
    return 0 if checked.passed else 1
