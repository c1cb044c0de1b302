"""Write a checkpoint's predictions for given samples, or for the held-out ones, as JSON lines."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import Any, TextIO

from samestep import output_files
from samestep.cli import job_options
from samestep.cli.evaluate import NOT_HERE, add_checkpoint
from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import MOST_LENGTH, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=NOT_HERE)
    add_checkpoint(parser)
    parser.add_argument(
        "--input",
        type=path_option,
        metavar="FILE",
        help="texts, one a line; or an image, or a folder with images (default: the held-out samples)",
    )
    output_files.add_arguments(parser, output="where to write (default: standard output)")
    parser.add_argument(
        "--new-tokens",
        type=WholeNumber(least=0, most=MOST_LENGTH),
        default=0,
        metavar="N",
        help="language models: go on with each text by so many",
    )


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    if options.input is not None and not options.input.exists():
        raise UserError(f"--input {options.input}: there is no such file or folder")
    files = (options.input, options.output)
    if all(file is not None and file.exists() for file in files) and options.output.samefile(options.input):
        raise UserError(f"--output is {options.output}, which is read; write to another file")
    output_files.check(options, "output")

    from samestep.inference import predict_job

    predictions = predict_job(loaded.job, options.checkpoint, options.input, options.new_tokens)
    # The first one is asked for before the file is opened: a mistake leaves what stands there as it is.
    first = list(islice(predictions, 1))
    if options.output is None:
        try:
            _write(chain(first, predictions), sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # who reads has enough, such as `head`; what is left to be flushed goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    with options.output.open("w", encoding="utf-8") as stream:
        count = _write(chain(first, predictions), stream)
    print(f"{options.output}: {count:,} predictions")
    return 0


def _write(predictions: Iterable[Mapping[str, Any]], stream: TextIO) -> int:
    """Write a line each, and return how many they are."""
    count = 0
    for prediction in predictions:
        stream.write(json.dumps(prediction, ensure_ascii=False) + "\n")
        count += 1
    return count
