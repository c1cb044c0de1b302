"""Train the job of a file, under any layout."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.cli import job_options, launch_options, next_command
from samestep.errors import UserError
from samestep.limits import MOST_RANKS, WholeNumber

if TYPE_CHECKING:
    from samestep.job import Job
    from samestep.job_plan.auto import Chosen
    from samestep.jobfile import LoadedJob
    from samestep.training.result import TrainResult

_AUTO = "auto"  # a layout that is found before ranks start
_OVERWRITE = [("run.overwrite", "true", "--force")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job_options.add_arguments(parser)
    job_options.add_check(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="last",
        metavar="CHECKPOINT",
        help="go on from a checkpoint: the newest of the run that is there, or the one of a path",
    )
    parser.add_argument(
        "--accept-data-change",
        action="store_const",
        const="true",
        help="with --resume: go on with other data than those of the checkpoint",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="take three steps, write no run, print what each rank held and sent",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="print at the end also what each rank held and sent in a step, and confusion matrices",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const=job_options.BARE,
        action=job_options.Once,
        metavar="FOLDER",
        help="profile five steps on every rank: a trace a rank and a table (default: profile/ in the run's folder)",
    )
    output_files.add_arguments(
        parser,
        json="with --dry-run: write its numbers to a file",
        also=", and the training an earlier run in its folder, with its checkpoints",
    )
    parser.add_argument(
        "--world",
        type=WholeNumber(most=MOST_RANKS),
        metavar="N",
        help="with --dry-run: the step of a rank of N processes, of which none starts, on tensors without values",
    )
    launch_options.add_arguments(parser, without=launch_options.OF_LAUNCH)


def run(options: argparse.Namespace) -> int:
    loaded = job_options.load(options, also=_OVERWRITE if options.force and not options.dry_run else ())
    if options.print_config:
        return job_options.print_config(loaded)

    if options.json is not None and not options.dry_run:
        raise UserError("--json goes with --dry-run; a training writes report.json into its folder")
    output_files.check(options, "json")
    if options.accept_data_change and (saved := loaded.job.run.checkpoint) is not None and saved.resume == "never":
        raise UserError("--accept-data-change goes with --resume; a training from its start has no data of before")
    if options.profile is not None and options.dry_run:
        raise UserError("--profile goes with a training, and --dry-run takes three steps of one; give one of them")
    if options.world is not None and not options.dry_run:
        raise UserError("--world goes with --dry-run; a training starts as many processes as its layout has")
    if options.world is not None and launch_options.wishes(options):
        raise UserError("--world is a dry run in one process, which starts no hosts; leave out what names them")
    if options.print_variables:
        return launch_options.print_variables(options)
    if launch_options.wishes(options):
        if loaded.job.run.layout == _AUTO:
            raise UserError(
                "layout auto is chosen for one machine; name a layout for hosts, as samestep plan ranks them"
            )
        return _on_hosts(options, loaded)
    chosen = None
    if loaded.job.run.layout == _AUTO:
        chosen = _with_layout(options, loaded.job)
        loaded.job = chosen.job
    if options.world is not None:
        return _rehearse(loaded.job, options.world, options.json)
    job_options.prepare(loaded.job, options)
    if options.dry_run:
        return _dry_run(loaded.job, options.json)

    from samestep import environment
    from samestep.api import train_job
    from samestep.display.results import print_profile, print_result
    from samestep.launch.environments.registry import idle_hosts

    if environment.ranks() is None and (idle := idle_hosts(environment.snapshot())) is not None:
        print(f"samestep: {idle}", file=sys.stderr)
    result = train_job(loaded.job)
    if job_options.is_main():
        command = next_command.after_training(options, loaded, result.folder)
        print_result(result, details=options.details, next_command=command)
        if result.profile is not None:
            print_profile(result.profile)
        if chosen is not None:
            _print_planned_and_measured(chosen, result)
    return 0


def _with_layout(options: argparse.Namespace, job: "Job") -> "Chosen":
    """Find a layout for the job, and print why it was chosen."""
    if options.world is not None:
        raise UserError("layout auto is of the processes of this machine, and --world of others; name a layout")
    job_options.prepare(job, options)
    from samestep.job_plan.auto import with_layout

    chosen = with_layout(job)
    for line in chosen.why:
        print(f"samestep: {line}", file=sys.stderr)
    return chosen


def _print_planned_and_measured(chosen: "Chosen", result: "TrainResult") -> None:
    """Print the plan next to the run's measurements, and save it into the run's folder for `samestep doctor`."""
    from samestep.doctor.plan_and_run import lines_of, terms
    from samestep.doctor.run_files import read_run

    chosen.prediction.write(result.folder)
    run = read_run(result.folder)
    for line in lines_of(terms(chosen.prediction.to_json(), run.report or {}, run.numbers("step_seconds"))):
        print(line)


def _on_hosts(options: argparse.Namespace, loaded: "LoadedJob") -> int:
    """Start this command as ranks on the hosts found; the job is checked here first."""
    from samestep import environment
    from samestep.launch.launcher import world_of
    from samestep.run_folder import RunPlace

    job = loaded.job
    if environment.ranks() is not None:
        raise UserError("this process is a rank already, which a launcher started: it starts no other hosts")
    request = launch_options.request_from(
        options,
        ("-m", "samestep", *launch_options.words_of_others(options.command_line)),
        device=job.run.device,
        engine="torch",  # the variables from which each engine of samestep reads its rank
        threads=job.run.threads,
        max_restarts=job.run.max_restarts if ("run", "max_restarts") in loaded.sources else None,
        grace_period=job.run.grace_period,
        run=None if options.dry_run else RunPlace.of(job),
    )
    found_cluster = launch_options.found_from(request)

    with environment.quiet_import():
        from samestep import door
        from samestep.training.own_folder import check_folder_free
        from samestep.training.result import check_folder

    on_each = request.no_ssh or found_cluster.on_every_host
    here = on_each or found_cluster.cluster.this is not None
    if here:
        check_folder(job.run.folder)
    if here and not on_each and request.run is not None:
        # A host that starts its own part may join ranks that hold the folder already.
        check_folder_free(job, request.run.chosen())
    with environment.as_first_of(*world_of(found_cluster, request)):
        door.check(job, here=here)
    return launch_options.launch(options, found_cluster, request)


def _dry_run(job: "Job", file: Path | None) -> int:
    from samestep.api import dry_run_job
    from samestep.display.results import print_usage

    ranks = dry_run_job(job)
    if job_options.is_main():
        output_files.write_json(file, {"usage_bytes": [usage.to_json() for usage in ranks]})
        print_usage(ranks)
    return 0


def _rehearse(job: "Job", world_size: int, file: Path | None) -> int:
    from samestep.api import rehearse_job
    from samestep.display.results import print_rehearsals

    ranks = rehearse_job(job, world_size)
    values = {"world_size": world_size, "layout": job.run.layout, "ranks": [rank.to_json() for rank in ranks]}
    output_files.write_json(file, values)
    print_rehearsals(ranks)
    return 0
