"""`--layout auto`: the fastest layout by plan that fits on this machine, found before any rank starts."""

from dataclasses import replace

from samestep import environment
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.machine import this_machine
from samestep.job_plan.plan import plan_job
from samestep.launch.device import accelerators

_LIMIT = 60.0  # seconds of rehearsing


def with_layout(job: Job) -> tuple[Job, str]:
    """The job with the layout that is chosen for it, and a line that says which and why.

    Raises UserError where nothing fits, and where the ranks are not this machine's own cores.
    """
    check_here(job)
    plan = plan_job(job, this_machine(job.run.processes, job.recipe.precision), limit=_LIMIT)
    best, *others = plan.fitting or [plan.best]
    told = ", ".join(f"{each.layout} {each.seconds:.3g} s" for each in others[:2])
    line = f'layout auto: "{best.layout}", {best.seconds:.3g} s a step predicted'
    return replace(job, run=replace(job.run, layout=best.layout, processes=None)), line + (told and f" ({told})")


def check_here(job: Job) -> None:
    """Raise UserError where ranks are others' to start, or run on accelerators."""
    if environment.ranks() is not None:
        raise UserError(
            "layout auto is chosen before ranks start, and this process is a rank already; name a layout, such as "
            "the first one of samestep plan JOB.yaml"
        )
    if job.run.device == "auto" and accelerators():
        raise UserError(
            "layout auto is chosen by the rates of this machine's cores, and it has accelerators; name a layout, "
            "such as the first one of samestep plan JOB.yaml --gpu h100 --devices 8, or use device: cpu"
        )
