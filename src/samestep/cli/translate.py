"""Turn a DeepSpeed, accelerate, SageMaker or torchrun configuration into a job file, or a job file into one."""

import argparse
import sys

from samestep import output_files
from samestep.errors import UserError
from samestep.limits import MOST_RANKS, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE",
        help="the file, - for standard input, or a command behind -- (torchrun ...)",
    )
    parser.add_argument(
        "--from", dest="from_", metavar="FORMAT", help="what FILE is, where its content could be several"
    )
    parser.add_argument("--to", default="job", metavar="FORMAT", help="job (default), deepspeed or accelerate")
    parser.add_argument(
        "--processes", type=WholeNumber(most=MOST_RANKS), help="ranks in all, where the source doesn't say how many"
    )
    parser.add_argument(
        "--batch", type=WholeNumber(), help="samples of a step over all ranks, where the source doesn't say it"
    )
    output_files.add_arguments(parser, output="write to a file instead of standard output")


def run(options: argparse.Namespace) -> int:
    if options.output is not None and str(options.output) in options.words:
        raise UserError(f"--output is {options.output}, the file that is translated; write to another")
    output_files.check(options, "output")

    from samestep.translate.base import GivenSizes
    from samestep.translate.translation import translate

    user_sizes = GivenSizes(processes=options.processes, batch=options.batch)
    written = translate(options.words, options.from_, options.to, user_sizes)
    if options.output is None:
        sys.stdout.write(written.text)
    else:
        output_files.write(options.output, written.text)
    for remark in written.remarks:
        print(f"samestep: without a key there: {remark}", file=sys.stderr)
    return 0
