"""Train a job under one fault after the other, and compare each run with an undisturbed one."""

import argparse
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.cli import job_options
from samestep.durations import add_time_limit, seconds
from samestep.errors import UserError
from samestep.limits import MOST_REPEATS, MOST_SEED, WholeNumber

if TYPE_CHECKING:
    from samestep.jobfile import LoadedJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=("folder", "max-restarts", "checkpoint-every"))
    parser.add_argument("--faults", help='such as "kill, hang" (default: all)')
    parser.add_argument(
        "--steps", type=WholeNumber(), help="train so many steps in each run (default: 20; of a soak by time)"
    )
    parser.add_argument(
        "--soak",
        type=WholeNumber(most=MOST_REPEATS),
        metavar="N",
        help="one long job under N faults at random moments",
    )
    parser.add_argument("--seed", type=WholeNumber(least=0, most=MOST_SEED), help="of a soak's faults (default: 0)")
    parser.add_argument(
        "--between", type=seconds, metavar="TIME", help="from one fault of a soak to the next (default: 15s)"
    )
    add_time_limit(parser, "one run, or a soak's step", 600)
    output_files.add_arguments(parser, json="write the table's numbers to a file")


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json")

    if options.soak is not None:
        return _soak(options, loaded)
    for flag in ("seed", "between"):
        if getattr(options, flag) is not None:
            raise UserError(f"--{flag} is of a soak; use it with --soak N")
    from samestep.drill.run import drill_job, print_drill

    drilled = drill_job(
        loaded.job,
        steps=20 if options.steps is None else options.steps,
        faults=options.faults.split(",") if options.faults is not None else None,
        time_limit=options.time_limit,
    )
    output_files.write_json(options.json, drilled.to_json())
    print_drill(drilled)
    return 0 if drilled.passed else 1


def _soak(options: argparse.Namespace, loaded: "LoadedJob") -> int:
    from samestep.drill.run import print_soak
    from samestep.drill.soak import soak_job

    soaked = soak_job(
        loaded.job,
        faults=options.soak,
        seed=options.seed or 0,
        between=15.0 if options.between is None else options.between,
        kinds=options.faults.split(",") if options.faults is not None else None,
        steps=options.steps,
        time_limit=options.time_limit,
    )
    output_files.write_json(options.json, soaked.to_json())
    print_soak(soaked)
    return 0 if soaked.passed else 1
