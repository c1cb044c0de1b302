"""Prove that a layout takes the steps of one process: both run, in float64, and are compared."""

import argparse
import json
from pathlib import Path

from samestep.cli import job_options
from samestep.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, help="how many steps are compared (default: 5)")
    parser.add_argument("--dropout", action="store_true", help="compare steps with the recipe's dropout, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the differences to a file")


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)

    if options.json is not None:
        _check_file(options.json)

    from samestep.api import verify_job
    from samestep.report.tables import print_proof

    proof = verify_job(loaded.job, steps=options.steps, dropout=options.dropout)
    if job_options.is_main():
        if options.json is not None:
            options.json.write_text(json.dumps(proof.to_json(), indent=2) + "\n", encoding="utf-8")
        print_proof(proof)
    return 0 if proof.same_step else 1


def _check_file(file: Path) -> None:
    """Raise UserError where a file can't be written; before minutes are spent on what would stand in it."""
    if file.is_dir():
        raise UserError(f"--json {file}: this is a folder; the path of a file is wanted")
    if not file.parent.is_dir():
        raise UserError(f"--json {file}: there is no folder {file.parent}; make it, or write elsewhere")
