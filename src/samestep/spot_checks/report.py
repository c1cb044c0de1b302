"""`--spot-checks FOLDER`: judge the records of a training, and print what they say."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.errors import UserError
from samestep.input_files import path_option

if TYPE_CHECKING:
    from samestep.spot_checks.judgement import SpotVerdict


def add_argument(parser: "argparse._ActionsContainer") -> None:
    """Add the option to a command."""
    parser.add_argument(
        "--spot-checks",
        type=path_option,
        metavar="FOLDER",
        help="judge the steps that samestep_prove.SpotChecks has recorded of a real training; nothing is run",
    )


def run(folder: Path, options: argparse.Namespace) -> int:
    """Exit codes: 0 nothing is wrong with what was recorded, 1 something is."""
    if options.report is not None:
        raise UserError("--report: spot checks have no page; write what they say with --json")
    output_files.check(options, "json")

    from samestep.spot_checks.judgement import judge

    verdict = judge(folder)
    output_files.write_json(options.json, verdict.to_json())
    print_verdict(verdict)
    return 0 if verdict.right else 1


def print_verdict(verdict: "SpotVerdict") -> None:
    """Print the verdict first, then each kind of difference where it comes first."""
    from samestep.display.tables import plain_console

    console = plain_console()
    recorded = f"{verdict.steps} step{'s' if verdict.steps != 1 else ''} recorded by {verdict.ranks} ranks"
    if verdict.right:
        text = "ranks have the same weights, and step by what is to be made of their own gradients"
        console.print(f"{recorded}: {text}", soft_wrap=True)
    else:
        console.print(f"{recorded}: NOT the step of one process", soft_wrap=True)
    for finding in verdict.findings:
        console.print(finding.line, soft_wrap=True)
    for note in verdict.notes:
        console.print(f"note: {note.en}", soft_wrap=True)
    left = ", ".join(what.en for what in verdict.not_compared)
    console.print(f"not compared: {left}", soft_wrap=True)
