"""`samestep-prove "train.py --batch-size 16"`: the proof of a script as a command of its own.

It is there where only the prover is installed (the distribution samestep-prove). Ranks are started by
`samestep launch` where samestep is installed as well, else by torchrun.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import NoReturn

from samestep import environment, output_files
from samestep.errors import USERS_MISTAKE, InterruptedJobError, UserError
from samestep.limits import WholeNumber
from samestep.progress import phases
from samestep.script_proof import options as script_options
from samestep.spot_checks import report as spot_checks
from samestep.variables import without_values


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove a script. Exit codes: 0 the same step, 1 not, 2 the user's mistake, 128 + n signal n."""
    try:
        options = _parser().parse_args(arguments)
        with environment.progress_every(options.progress), phases.running("verify"):
            return _run(options)
    except UserError as error:
        print(f"samestep-prove: {without_values(str(error))}", file=sys.stderr)
        return USERS_MISTAKE
    except InterruptedJobError as error:
        print(f"samestep-prove: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("samestep-prove: interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    from samestep.script_proof.runs import launched
    from samestep.script_proof.torchrun import by_torchrun

    if options.spot_checks is not None:
        if options.script is not None:
            raise UserError("--spot-checks judges what was recorded, and runs nothing; leave the command out")
        return spot_checks.run(options.spot_checks, options)
    if options.script is None:
        raise UserError('samestep-prove needs a command, such as "train.py --batch-size 16", or --spot-checks FOLDER')
    proof = script_options.read(options, options.script, flag="COMMAND")
    script_options.check_outputs(options, install="pip install plotly")
    whole = importlib.util.find_spec("samestep.launch") is not None
    return script_options.run(proof, options, launched if whole else by_torchrun, options.script)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `samestep-prove --help` says what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="samestep-prove",
        allow_abbrev=False,
        description="Prove that a training script takes, split over processes, the steps of one process. It runs as "
        "it stands, alone and split, under a recorder.",
    )
    add = parser.add_argument
    add(
        "script",
        nargs="?",
        metavar="COMMAND",
        help='"train.py --batch-size 16", or "-m package.train", after NAME=VALUE',
    )
    add("--processes", metavar="N", help=f"ranks of the split run (default: {script_options.PROCESSES})")
    add("--steps", type=WholeNumber(), metavar="N", help=f"how many are compared (default: {script_options.STEPS})")
    add("--device", choices=("auto", "cpu"), help="cpu: without accelerators (default: auto)")
    add("--dropout", action="store_true", help="leave dropout on")
    add("--progress", metavar="TIME", help="off a terminal, a line every so often, or none")
    spot_checks.add_argument(parser)
    script_options.add_arguments(parser)
    output_files.add_arguments(
        parser, json="write the differences to a file", report="write a page of HTML, without a network"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
