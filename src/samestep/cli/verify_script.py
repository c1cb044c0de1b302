"""`samestep verify --script`: prove that a training script takes, split over processes, the steps of one process."""

import argparse

from samestep.errors import UserError
from samestep.script_proof import options as script_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a script of your own", "run as it stands, alone and split, under a recorder")
    command = '"train.py --batch-size 16", or "-m package.train", after NAME=VALUE; with --processes N'
    group.add_argument("--script", metavar="COMMAND", help=command)
    script_options.add_arguments(group)
    group.add_argument(
        "--launch", metavar="OPTIONS", help='further options of samestep launch, such as "--hostfile hosts"'
    )


_OWN = (*script_options.NAMES, "launch")
OF_JOBS = (
    "layout",
    "layouts",
    "precision",
    "micro_batch",
    "checkpoint_every",
    "max_restarts",
    "folder",
    "threads",
    "no_check",
)


def options_of_scripts(options: argparse.Namespace) -> list[str]:
    """The names of given options that only scripts have."""
    return [name for name in _OWN if getattr(options, name) is not None]


def options_of_runs(options: argparse.Namespace) -> list[str]:
    """The names of given options of what trains, whether a job or a script."""
    return [*options_of_jobs(options), *options_of_scripts(options)]


def check_absent(options: argparse.Namespace) -> None:
    """Raise UserError for an option of scripts that is given with a job file."""
    if names := options_of_scripts(options):
        raise UserError(f"--{names[0].replace('_', '-')} goes with --script, a training script of your own")


def options_of_jobs(options: argparse.Namespace) -> list[str]:
    """The names of given options that only job files have."""
    return [name for name in OF_JOBS if getattr(options, name) is not None] + ["set"] * bool(options.set)


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 the same step, 1 not, 2 a mistake."""
    from samestep.launch.launcher import parse_command
    from samestep.launch.script_env import registry
    from samestep.script_proof.runs import launched, words

    _check_job_absent(options)
    engine = options.engine or "torch"
    registry.check(engine)
    registry.check_installed(engine)  # the script alone runs on this host
    launch = parse_command(words("--launch", options.launch, script=False)) if options.launch else ()
    proof = script_options.read(options, options.script, flag="--script", engine=engine, launch=launch)
    script_options.check_outputs(options, install='pip install "samestep[report]"')
    return script_options.run(proof, options, launched, options.script)


def _check_job_absent(options: argparse.Namespace) -> None:
    """Raise UserError for a job file, and for options that only jobs have."""
    if options.job is not None:
        raise UserError(f"{options.job} is a job file, and --script names a script; leave one of them out")
    if names := options_of_jobs(options):
        raise UserError(f"--{names[0].replace('_', '-')} goes with a job file; a script has its own arguments")
    if options.bits:
        raise UserError("--bits is for run.reduction: ordered of a job file, which a script has not; leave it out")
