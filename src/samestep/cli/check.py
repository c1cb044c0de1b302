"""Check a job's task: is its contract kept, which layouts can its model have, and what stands in the others' way."""

import argparse
from typing import TYPE_CHECKING

from samestep.cli import job_options, output_files

if TYPE_CHECKING:
    from samestep.job_check import Checked

_KEPT = {True: "kept", False: "BROKEN", None: "?"}


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

    from samestep.job_check import check_layouts
    from samestep.matrix import layouts_of

    layouts = None if options.layouts is None else layouts_of(options.layouts)
    found = check_layouts(loaded.job, layouts)
    output_files.write_json(options.json, found.to_json())
    _print(found)
    return 0 if found.passed else 1


def _print(found: "Checked") -> None:
    """The parts of the contract, then the layouts that the model can have, and why it can't have the others."""
    from rich.table import Table

    from samestep.display.console import plain_console

    console = plain_console()
    table = Table(title=f"the contract of {found.job}")
    table.add_column("part", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for finding in found.contract:
        table.add_row(finding.part, _KEPT[finding.kept], finding.text if finding.kept else "")
    console.print(table)
    for finding in found.contract:
        if finding.kept is not True:
            console.print(f"{finding.part}: {finding.text}", soft_wrap=True)
            why = "is broken" if finding.kept is False else "was not looked at"
            console.print(f"The contract {why}, so no layout was tried.")
            return
    table = Table(title="layouts, each tried for two steps beside one process in float64")
    table.add_column("layout", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("largest difference", justify="right", no_wrap=True)
    for row in found.layouts:
        largest = max(row.proof.max_relative_difference.values()) if row.proof else None
        table.add_row(row.layout, row.verdict, "" if largest is None else f"{largest:.1e}")
    console.print(table)
    for row in found.layouts:
        if row.reason or row.failure:
            console.print(f"{row.verdict}: {row.reason or row.failure}", soft_wrap=True)
