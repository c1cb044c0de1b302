"""A rank is slower than the others: it is named."""

from samestep.drill.drill import Drill, Outcome
from samestep.drill.runs import Runs
from samestep.job import Inject

_TIMES = 3  # a step of the slow rank, beside the undisturbed run's
_LEAST = 0.1  # seconds


def _slow(runs: Runs) -> Outcome:
    seconds = max(_LEAST, (_TIMES - 1) * runs.step_seconds)
    left = runs.train("slow", inject=(Inject(rank=runs.rank, step=1, fault="slow", seconds=seconds),))
    named = left.report.get("slow_ranks", [])
    return Outcome(
        survived=left.code == 0 and named == [runs.rank],
        happened=f"named as slow: {', '.join(f'rank {rank}' for rank in named) or 'none'}",
        left=left,
        steps_lost=0,
    )


SLOW = Drill(name="slow", does="a rank takes longer than the others", run=_slow, processes=2)
