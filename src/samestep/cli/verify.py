"""Prove that a layout, or a training script, takes the steps of one process: both run, and are compared."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from samestep import output_files
from samestep.cli import job_options, verify_against, verify_script
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import WholeNumber
from samestep.ranks import DeviceChoice
from samestep.spot_checks import report as spot_checks

if TYPE_CHECKING:
    from samestep.jobfile import LoadedJob
    from samestep.verification.matrix import MatrixRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, job=False)
    job_options.add_check(parser)
    parser.add_argument(
        "more", nargs="*", type=path_option, metavar="JOB.yaml", help="with --layouts: further job files"
    )
    parser.add_argument(
        "--layouts", metavar="LAYOUTS", help='a table of many layouts: "all", "fast", "experts", or "dp2, fsdp2 tp2"'
    )
    parser.add_argument(
        "--steps", type=WholeNumber(), help="how many steps are compared (default: 5; of a script 10)"
    )
    parser.add_argument("--dropout", action="store_true", help="compare steps with the recipe's dropout, too")
    parser.add_argument(
        "--reference-device",
        choices=get_args(DeviceChoice),
        default="auto",
        help="where the one process takes its steps; cpu: where the accelerator's memory is too small for it",
    )
    parser.add_argument(
        "--precision",
        metavar="P",
        help="fp64, fp32 or bf16, in which steps are taken (default: fp64 where it can be)",
    )
    parser.add_argument(
        "--bits", action="store_true", help="hold the bits of run.reduction: ordered against one process, and time it"
    )
    output_files.add_arguments(
        parser, json="write the differences to a file", report="write a page of HTML, without a network"
    )
    verify_against.add_arguments(parser)
    spot_checks.add_argument(parser)
    verify_script.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.spot_checks is not None:
        given = (options.job, options.script, options.against)
        if any(value is not None for value in given) or verify_script.options_of_runs(options):
            raise UserError("--spot-checks judges what was recorded, and runs nothing; leave everything else out")
        return spot_checks.run(options.spot_checks, options)
    if options.against is not None:
        return verify_against.run(options)
    if options.script is not None:
        return verify_script.run(options)
    verify_script.check_absent(options)
    if options.job is None:
        raise UserError('verify needs a job file, or a script of your own: --script "train.py --batch-size 16"')
    options.steps = 5 if options.steps is None else options.steps
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)

    output_files.check(options, "json", "report")
    output_files.check_report(options)
    if options.bits:
        return _bits(options, loaded)
    if options.layouts is not None:
        return _matrix(options, loaded)
    if options.more:
        raise UserError(f"{options.more[0]} is a second job file; a list of layouts takes them: --layouts all")

    job_options.prepare(loaded.job, options)
    from samestep.api import job_name, verify_job
    from samestep.display.proofs import print_proof
    from samestep.verification.matrix import MatrixRow

    proof = verify_job(loaded.job, **_how(options))
    if job_options.is_main():
        output_files.write_json(options.json, proof.to_json())
        _write_page(options.report, [MatrixRow(job=job_name(loaded.job), layout=proof.layout, proof=proof)])
        print_proof(proof)
    return 0 if proof.same_step else 1


def _bits(options: argparse.Namespace, loaded: "LoadedJob") -> int:
    """Print a row for each layout. Raises UserError if all layouts were refused."""
    if options.more:
        raise UserError(f"{options.more[0]} is a second job file, and --bits takes one; prove them one by one")
    if options.precision is not None:
        raise UserError("--precision: --bits compares steps in the recipe's own precision; leave it out")
    if options.report is not None:
        raise UserError("--report: --bits has no page; write its numbers with --json")
    if options.dropout:
        raise UserError("--dropout: --bits compares steps with the recipe's dropout as it is; leave it out")
    job_options.prepare(loaded.job, options)
    from samestep.api import verify_bits
    from samestep.display.proofs import print_bits
    from samestep.verification.matrix import layouts_of

    layouts = [loaded.job.run.layout] if options.layouts is None else layouts_of(options.layouts)
    rows = verify_bits(loaded.job, layouts, steps=options.steps)
    _check_compared({row.layout: row.reason for row in rows})
    output_files.write_json(options.json, [row.to_json() for row in rows])
    print_bits(rows)
    return 0 if all(row.passed for row in rows) else 1


def _matrix(options: argparse.Namespace, first: "LoadedJob") -> int:
    """Verify every job under every layout. A refused layout does not count as a failure; a different step does.

    Raises UserError if all layouts were refused.
    """
    from samestep.api import verify_layouts
    from samestep.display.proofs import print_matrix
    from samestep.verification.matrix import layouts_of

    layouts = layouts_of(options.layouts)
    jobs = [first.job, *(job_options.load(options, file).job for file in options.more)]
    rows = [row for job in jobs for row in verify_layouts(job, layouts, **_how(options))]
    _check_compared({row.layout: row.reason for row in rows})
    output_files.write_json(options.json, [row.to_json() for row in rows])
    _write_page(options.report, rows)
    print_matrix(rows)
    return 0 if all(row.passed for row in rows) else 1


def _write_page(file: Path | None, rows: "Sequence[MatrixRow]") -> None:
    """Write the page of proofs; None: nowhere."""
    if file is not None:
        from samestep.display.proofs_page import page

        output_files.write(file, page(rows))


def _check_compared(reasons: Mapping[str, str | None]) -> None:
    """Raise UserError where no layout was compared. `reasons`: by layout why it was refused, None: it wasn't."""
    if all(reason is not None for reason in reasons.values()):
        named = (
            reason if f'"{layout}"' in reason else f'layout "{layout}": {reason}'
            for layout, reason in reasons.items()
            if reason is not None
        )
        raise UserError("\n".join(dict.fromkeys(named)))


def _how(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments common to the proofs of one layout and of many."""
    return {
        "steps": options.steps,
        "dropout": options.dropout,
        "precision": options.precision,
        "reference_device": options.reference_device,
    }
