"""A training that goes back to its last checkpoint when a loss is not finite, and leaves that batch out."""

import sys

from samestep.cluster.world import World
from samestep.errors import NonFiniteError
from samestep.job import Job
from samestep.layout import Layout
from samestep.supervision.rank import RankSupervision
from samestep.supervision.restarts import again
from samestep.tasks.base import Task
from samestep.training.fit import fit
from samestep.training.result import TrainResult

_MOST = 5  # a training that must leave out more batches than these has another fault


def fit_with_rollbacks(
    job: Job, task: Task, world: World, layout: Layout, supervision: RankSupervision
) -> TrainResult:
    """`fit`, again from the last checkpoint (from the start where there is none) as often as the job asks for it.

    Raises NonFiniteError, on every rank alike, where it doesn't, or there is no end to it.
    """
    anew = not supervision.goes_on(job)
    for _ in range(_MOST):
        try:
            return fit(job, task, world, layout, supervision, anew=anew)
        except NonFiniteError as error:
            if job.run.on_nonfinite != "rollback":
                raise
            if world.rank == 0:
                print(f"samestep: {error}; back to the last checkpoint, without this batch", file=sys.stderr)
            job, anew = again(job), False
    return fit(job, task, world, layout, supervision, anew=anew)
