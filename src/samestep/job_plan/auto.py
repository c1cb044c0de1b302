"""`--layout auto`: the fastest layout by plan that fits on this machine, found before any rank starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from samestep import environment
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.machine import this_machine
from samestep.job_plan.plan import JobPlan, plan_job
from samestep.job_plan.predict import Prediction, slower_by
from samestep.launch.device import accelerators
from samestep.sizes import decimal_size

_LIMIT = 60.0  # seconds for rehearsals


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The layout chosen for a job."""

    job: Job  # with the chosen layout
    prediction: Prediction
    why: Sequence[str]  # three lines


def with_layout(job: Job) -> Chosen:
    """Choose the fastest layout for a job, by plan.

    Raises UserError if no layout fits, or if the ranks don't run on this machine's own cores.
    """
    check_here(job)
    plan = plan_job(job, this_machine(job.run.processes, job.recipe.precision), limit=_LIMIT)
    best = plan.best
    run = replace(job.run, layout=best.layout, micro_batch=best.micro_batch, processes=None)
    return Chosen(job=replace(job, run=run), prediction=best, why=_why(plan))


def _why(plan: JobPlan) -> list[str]:
    """Describe the chosen layout, the parts of its step, and why the next one is slower."""
    best, *others = plan.fitting
    tried = len(plan.predictions) + len(plan.refused)
    shares = sorted(best.parts.items(), key=lambda part: -part[1])
    causes = ", ".join(f"{cause} {seconds / best.seconds:.0%}" for cause, seconds in shares if seconds)
    too_large = len(plan.predictions) - len(plan.fitting)
    lines = [
        f'layout auto: "{best.layout}", planned at {best.seconds:.3g} s a step and {decimal_size(best.peak_bytes)} a '
        f"rank: the fastest of {tried} layouts, of which {len(plan.refused)} can't be had and {too_large} don't fit",
        f"its step: {causes}",
    ]
    if not others:
        return [*lines, "no other layout fits"]
    other = others[0]
    cause, more = slower_by(other, best)
    return [
        *lines,
        f'the next, "{other.layout}", {other.seconds / best.seconds - 1:+.0%} ({other.seconds:.3g} s): '
        f"{cause} {more:+.2g} s",
    ]


def check_here(job: Job) -> None:
    """Raise UserError if a launcher started this rank, or ranks run on accelerators."""
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
