"""A loss that is NaN: back to the last checkpoint, and on without that batch."""

from samestep.drill.drill import Drill, Outcome
from samestep.drill.runs import Runs
from samestep.job import Inject
from samestep.supervision.nonfinite import left_out


def _nan(runs: Runs) -> Outcome:
    planted = Inject(rank=runs.rank, step=runs.step, fault="nan")
    left = runs.train("nan", inject=(planted,), on_nonfinite="rollback")
    steps = sorted(left_out(left.folder))
    return Outcome(
        survived=left.code == 0 and steps == [runs.step],
        happened=f"rolled back, without the batch of step {', '.join(map(str, steps))}" if steps else left.last_words,
        left=left,
    )


NAN = Drill(name="nan", does="a step's loss is NaN", run=_nan, changes_result=True)
