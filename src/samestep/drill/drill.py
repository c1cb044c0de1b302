"""What a drill of one fault is, and what came of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from samestep.drill.runs import Left, Runs


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a fault."""

    survived: bool  # it happened, and the training went on to its end
    happened: str  # in a few words
    left: Left  # by the last run
    seconds: float | None = None  # from the fault to the end of the next step
    steps_lost: int | None = None  # taken once more


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A fault that a training is to survive."""

    name: str
    does: str  # in a few words
    run: Callable[[Runs], Outcome]
    processes: int = 1  # fewest that it wants
    changes_result: bool = False  # surviving it means to train on other batches


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault's line in the table, beside the undisturbed run."""

    fault: str
    survived: bool
    happened: str
    seconds: float | None
    steps_lost: int | None
    final_loss: float | None
    difference: float | None  # of the final loss from the undisturbed run's
    same_weights: bool  # bit for bit
    changes_result: bool

    @property
    def passed(self) -> bool:
        return self.survived and (self.changes_result or (self.difference == 0 and self.same_weights))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def row(drill: Drill, outcome: Outcome, undisturbed: Left) -> Row:
    final, expected = (left.report.get("final_loss") for left in (outcome.left, undisturbed))
    return Row(
        fault=drill.name,
        survived=outcome.survived,
        happened=outcome.happened,
        seconds=outcome.seconds,
        steps_lost=outcome.steps_lost,
        final_loss=final,
        difference=None if final is None or expected is None else abs(final - expected),
        same_weights=outcome.left.weights != b"" and outcome.left.weights == undisturbed.weights,
        changes_result=drill.changes_result,
    )
