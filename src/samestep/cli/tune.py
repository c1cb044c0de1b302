"""Find the settings with which a job's step is shortest here, each tried for a few steps."""

import argparse

from samestep import output_files
from samestep.cli import job_options
from samestep.durations import add_time_limit
from samestep.limits import MOST_REPEATS, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser, without=("checkpoint-every", "max-restarts", "folder"))
    job_options.add_check(parser)
    parser.add_argument("--settings", help='which to try, such as "threads, micro_batch" (default: all)')
    parser.add_argument(
        "--steps", type=WholeNumber(), default=10, help="of each trial; the first 3 don't count (default: 10)"
    )
    parser.add_argument(
        "--repeats", type=WholeNumber(most=MOST_REPEATS), default=3, help="trials of each value (default: 3)"
    )
    add_time_limit(parser, "one trial", 600)
    output_files.add_arguments(
        parser,
        json="write every timing of every trial to a file",
        write="write the job with the settings that were kept",
    )


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)
    output_files.check(options, "json", "write")

    from samestep.jobfile import LoadedJob, dump
    from samestep.tuning.results import print_tuned
    from samestep.tuning.tune import tune_job

    names = options.settings.split(",") if options.settings is not None else None
    tuned = tune_job(
        loaded.job,
        settings=[name.strip() for name in names if name.strip()] if names is not None else None,
        steps=options.steps,
        repeats=options.repeats,
        time_limit=options.time_limit,
    )
    output_files.write_json(options.json, tuned.to_json())
    if options.write is not None:
        kept = {("run", key): "samestep tune" for key in tuned.run}
        text = dump(LoadedJob(tuned.job, options.write, {**loaded.sources, **kept}))
        output_files.write(options.write, text + "\n")
    print_tuned(tuned)
    return 0
