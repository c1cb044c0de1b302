"""Show how a job reads its data: samples as text and tokens, what of them counts, and their lengths."""

import argparse

from samestep import output_files
from samestep.cli import job_options
from samestep.cli.evaluate import NOT_HERE
from samestep.errors import UserError
from samestep.limits import WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=NOT_HERE)
    parser.add_argument(
        "--show", type=WholeNumber(least=0), default=1, metavar="N", help="so many samples (default: 1)"
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=WholeNumber(least=0),
        default=0,
        metavar="I",
        help="the first of them (default: 0)",
    )
    output_files.add_arguments(parser, json="write the samples with their tokens, and the lengths, to a file")


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json")

    from samestep.display.data import print_reading, reading_json
    from samestep.tasks.registry import resolve

    task = resolve(loaded.job.recipe)
    reading = task.reading()
    if reading is None:
        raise UserError(
            f"task {loaded.job.recipe.task} doesn't say how it reads its samples; give it a `reading`, as "
            "samestep.tasks.chat has, or use a job of task chat"
        )
    if options.show and not options.first < reading.samples:
        raise UserError(f"--from is {options.first}, and there are {reading.samples} samples, numbered from 0")
    chosen = range(options.first, min(options.first + options.show, reading.samples))
    print_reading(reading, chosen)
    output_files.write_json(options.json, reading_json(reading, chosen))
    return 0
