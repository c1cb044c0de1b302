"""A job in a later round of its ranks: after a restart, and with fewer ranks."""

from dataclasses import replace

from samestep import environment
from samestep.door.entry import check
from samestep.door.ready import Ready
from samestep.errors import UserError
from samestep.fault_tolerance.policy import again, shrink
from samestep.fault_tolerance.rank import Round
from samestep.job import Job
from samestep.layout import Layout, unsized


def of_round(job: Job, round_: Round) -> Job:
    """Adapt a job to the round of its ranks: resume after a restart, and take a layout that fits the world size."""
    job = again(job) if round_.number > 0 else job
    if round_.run_folder is not None:
        job = replace(job, run=replace(job.run, folder=round_.run_folder))
    ranks = environment.ranks()
    if not job.run.elastic or ranks is None or unsized(job.run.layout):
        return job
    layout = Layout.parse(job.run.layout, None)
    for candidate in shrink(layout, job.run.min_processes):
        if candidate.size == ranks.world_size:
            inject = tuple(fault for fault in job.run.inject if fault.rank < ranks.world_size)
            of_this = {"layout": str(candidate), "elastic": False, "min_processes": 1, "inject": inject}
            return replace(job, run=replace(job.run, processes=None, **of_this))
    return job


def shrunk(ready: Ready) -> Ready | None:
    """Return the job under the largest smaller layout that passes the checks; None if there is none."""
    job = ready.job
    for candidate in shrink(ready.layout, job.run.min_processes):
        smaller = replace(job, run=replace(job.run, layout=str(candidate), processes=None, inject=()))
        try:
            fitting = check(smaller, task=ready.task)
        except UserError:
            continue
        return fitting.of(replace(fitting.job, run=replace(fitting.job.run, inject=job.run.inject)))
    return None
