"""Faults of a rank, after which all ranks are started anew: injected by the job itself."""

from typing import Any

from samestep.drill.drill import Outcome
from samestep.drill.runs import Runs
from samestep.job import Fault, Inject


def restarted(runs: Runs, fault: Fault, **run: Any) -> Outcome:
    """Commit a fault, with one restart at hand."""
    planted = Inject(rank=runs.rank, step=runs.step, fault=fault)
    left = runs.train(fault, inject=(planted,), max_restarts=1, **run)
    if len(left.faults) != 1:
        return Outcome(survived=False, happened=left.last_words, left=left)
    (found,) = left.faults
    right = found["rank"] == runs.rank and found["step"] == runs.step and found["goes_on_at"] is not None
    return Outcome(
        survived=left.code == 0 and right,
        happened=f"rank {found['rank']} in step {found['step']}: {found['cause']}",
        left=left,
        seconds=found["seconds"],
        steps_lost=found["steps_lost"],
    )
