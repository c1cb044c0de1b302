"""`samestep plan JOB.yaml`: the layouts of a job on this machine, or on devices of a data sheet."""

import argparse
import sys
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.cli import job_options
from samestep.errors import UserError

if TYPE_CHECKING:
    from samestep.job import Job
    from samestep.job_plan.machine import TargetMachine

_OF_MODELS = (
    "model",
    "seq",
    "adapter",
    "global_batch",
    "precision",
    "program",
    "minimum",
    "price",
    "rows",
)


def run(options: argparse.Namespace) -> int:
    from samestep import environment

    check(options)
    loaded = job_options.load(options)
    if environment.ranks() is not None:
        raise UserError("plan starts its own processes; start it without a launcher")
    job_options.prepare(loaded.job, options)
    from samestep.job_plan.display import page, print_job_plan, print_measured
    from samestep.job_plan.measure import measured_plan
    from samestep.job_plan.plan import plan_job

    job = loaded.job
    plan, measured = plan_job(job, machine_of(options, job), say=_say), []
    if options.measure:
        plan, measured = measured_plan(job, plan, most=options.measure, say=lambda text: _say(f"{text}, really"))
    output_files.write_json(options.json, {**plan.to_json(), "measured": [row.to_json() for row in measured]})
    if options.report is not None:
        output_files.write(options.report, page(plan, measured, options.job.stem))
    if measured:
        print_measured(measured)
    print_job_plan(plan, options.top)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise UserError for options that can't be combined with a job file."""
    for name in _OF_MODELS:
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for plans by --model; a job file says what is trained; leave --{flag} out")
    if options.gpu is not None and (options.measure or options.comm):
        flag = "--measure" if options.measure else "--comm"
        raise UserError(f"{flag} is of the machine at hand, --gpu of a data sheet; give one of them")
    if options.gpu is None and (options.node_size or options.link or options.network):
        raise UserError("--node-size, --link and --network go with --gpu; add --gpu, such as --gpu h100")
    if options.gpu is not None and options.devices is None:
        raise UserError("--devices is missing; such as samestep plan JOB.yaml --gpu h100 --devices 8")


def machine_of(options: argparse.Namespace, job: "Job") -> "TargetMachine":
    """Return the cluster that --gpu and its options describe, or this machine."""
    from samestep.job_plan.machine import devices_of, this_machine
    from samestep.launch.device import accelerators
    from samestep.planning.hardware import cluster_of

    if options.gpu is None:
        if job.run.device == "auto" and accelerators():
            raise UserError(
                "this machine has accelerators, whose rates plan does not measure; name them, such as --gpu h100 "
                "--devices 8, or plan for its cores by --set run.device=cpu"
            )
        return this_machine(options.devices, job.recipe.precision, options.comm)
    cluster = cluster_of(
        options.gpu, options.devices, node_size=options.node_size, inside=options.link, between=options.network
    )
    if job.recipe.precision not in cluster.device.flops:
        raise UserError(
            f"recipe.precision is {job.recipe.precision}, which {cluster.device.name} does not have; "
            f"use one of {', '.join(cluster.device.flops)}"
        )
    return devices_of(cluster)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"samestep: {text}", file=sys.stderr)
