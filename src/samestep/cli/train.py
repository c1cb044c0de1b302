"""Train the job of a file, under any layout."""

import argparse

from samestep.cli import job_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options)
    if options.print_config:
        return job_options.print_config(loaded)

    from samestep.api import train_job
    from samestep.report.tables import print_result

    result = train_job(loaded.job)
    if job_options.is_main():
        print_result(result)
    return 0
