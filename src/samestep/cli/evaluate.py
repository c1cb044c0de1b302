"""Compute a job's metrics over its held-out samples, of a checkpoint's model, in one process."""

import argparse

from samestep import output_files
from samestep.cli import job_options
from samestep.input_files import path_option

# What decides how a training is spread, of which nothing matters to one process.
NOT_HERE = ("layout", "processes", "engine", "micro-batch", "checkpoint-every", "folder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=NOT_HERE)
    add_checkpoint(parser)
    output_files.add_arguments(parser, json="write the metrics to a file, curves as well")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=path_option,
        required=True,
        metavar="PATH",
        help="a checkpoint, a run (its newest is taken), or weights in any format",
    )


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json")

    from samestep.display.results import print_metrics
    from samestep.inference import evaluate_job

    metrics = evaluate_job(loaded.job, options.checkpoint)
    output_files.write_json(options.json, metrics)
    print_metrics(metrics)
    return 0
