"""Print the JSON Schema of job files, with which an editor completes their keys."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(options: argparse.Namespace) -> int:
    from samestep.scaffold import JOB_SCHEMA

    sys.stdout.write(JOB_SCHEMA.read_text(encoding="utf-8"))
    return 0
