"""Print the JSON Schema of job files, with which an editor completes their keys."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(options: argparse.Namespace) -> int:
    from samestep.scaffold import job_schema

    sys.stdout.write(job_schema())
    return 0
