"""Train a job under one fault after the other, and hold each run beside the undisturbed one."""

import argparse

from samestep.cli import job_options, output_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=("folder", "max-restarts", "checkpoint-every"))
    parser.add_argument("--faults", help='such as "kill, hang" (default: all)')
    parser.add_argument("--steps", type=int, default=20, help="train so many steps in each run (default: 20)")
    parser.add_argument("--time-limit", type=float, default=600, metavar="S", help="of one run (default: 600 s)")
    output_files.add_arguments(parser, json="write the table's numbers to a file")


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json")

    from samestep.drill.run import drill_job, print_drill

    drilled = drill_job(
        loaded.job,
        steps=options.steps,
        faults=options.faults.split(",") if options.faults is not None else None,
        time_limit=options.time_limit,
    )
    output_files.write_json(options.json, drilled.to_json())
    print_drill(drilled)
    return 0 if drilled.passed else 1
