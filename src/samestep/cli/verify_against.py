"""`samestep verify FOLDER --against FOLDER`: hold an exported or converted model against the trained one."""

import argparse
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.cli import verify_script
from samestep.errors import UserError
from samestep.input_files import path_option

if TYPE_CHECKING:
    from samestep.convert.beside import Beside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        type=path_option,
        metavar="FOLDER",
        help="an exported or converted model: hold it against the trained one, whose folder or run stands in place "
        "of the job file",
    )


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 the same model, 1 another one, 2 a mistake."""
    _check_alone(options)
    output_files.check(options, "json")

    from samestep.convert.beside import compare
    from samestep.progress import phases

    with phases.phase("comparing the two models"):
        beside = compare(options.job, options.against)
    output_files.write_json(options.json, beside.to_json())
    _print(beside)
    return 0 if beside.same else 1


def _print(beside: "Beside") -> None:
    """Print whether it is the same model, or the first thing that departs."""
    from samestep.display.tables import plain_console

    verdict = "the same model as" if beside.same else "NOT the same model as"
    lines = [f"{beside.exported}: {verdict} {beside.trained}"]
    if beside.departure is not None:
        lines.append(f"first difference: {beside.departure.line}")
    elif beside.logits is not None:
        lines.append(f"results apart by {beside.logits:.2g}, outputs of {beside.modules} modules compared")
    for line in [*lines, *beside.notes]:
        plain_console().print(line, soft_wrap=True, markup=False)


def _check_alone(options: argparse.Namespace) -> None:
    """Raise UserError where the trained model is missing, or an option is given that trains."""
    if options.script is not None:
        raise UserError("--script trains, and --against compares what was trained; leave one of them out")
    if options.job is None:
        raise UserError(
            f"--against {options.against} compares with a trained model; name its folder: "
            f"samestep verify FOLDER --against {options.against}"
        )
    if not options.job.is_dir():
        raise UserError(f"{options.job} is no folder; --against compares with a folder of save_pretrained, or a run")
    names = verify_script.options_of_jobs(options)
    if options.report is not None:
        names.append("report")
    if names:
        raise UserError(
            f"--{names[0].replace('_', '-')} goes with a job file; --against trains nothing, leave it out"
        )
    verify_script.check_absent(options)
