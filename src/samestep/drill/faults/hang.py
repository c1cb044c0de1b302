"""A rank stops where it is, and the others wait for it."""

from samestep.drill.drill import Drill, Outcome
from samestep.drill.restarted import restarted
from samestep.drill.runs import Runs

_LIMIT = 5.0  # seconds; a job's own limit is made to be waited for once, not in every drill


def _hang(runs: Runs) -> Outcome:
    limit = runs.job.run.hang_limit
    return restarted(runs, "hang", hang_limit=_LIMIT if limit is None else min(limit, _LIMIT))


HANG = Drill(name="hang", does="a rank stops and does not come to a collective", run=_hang)
