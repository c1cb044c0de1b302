"""Train one job by many methods and engines, each in processes of its own, and compare them."""

import argparse
from dataclasses import replace

from samestep import output_files
from samestep.cli import job_options
from samestep.durations import add_time_limit
from samestep.limits import MOST_REPEATS, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=("layout", "engine", "folder"))
    parser.add_argument(
        "--methods",
        help='such as "single, ddp-torchrun, native:dp2 tp2" (default: the published ones)',
    )
    parser.add_argument(
        "--repeats", type=WholeNumber(most=MOST_REPEATS), default=3, help="trainings of each method (default: 3)"
    )
    parser.add_argument("--steps", type=WholeNumber(), help="train so many steps instead of the job's")
    add_time_limit(parser, "one run", 3600)
    output_files.add_arguments(
        parser,
        json="write every figure of every repeat to a file",
        report="write a page of HTML, which needs no network",
    )


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.steps is not None:
        recipe = replace(loaded.job.recipe, steps=options.steps, epochs=None)
        loaded.job = replace(loaded.job, recipe=recipe)
        loaded.sources |= {("recipe", "steps"): "--steps", ("recipe", "epochs"): "--steps"}
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json", "report")
    output_files.check_report(options)

    from samestep.comparison.compare import compare_job
    from samestep.comparison.terminal import print_comparison

    comparison = compare_job(
        loaded.job,
        methods=options.methods.split(",") if options.methods is not None else None,
        repeats=options.repeats,
        evaluations=6 if options.report is not None else 1,
        time_limit=options.time_limit,
    )
    output_files.write_json(options.json, comparison.to_json())
    if options.report is not None:
        comparison.save_report(options.report)
    print_comparison(comparison)
    return 0 if comparison.passed else 1
