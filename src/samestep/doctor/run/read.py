"""All that is looked at in a run's files, in the order in which it is shown: one line a check."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from samestep.doctor.finding import Finding
from samestep.doctor.run import ending, learning, speed
from samestep.doctor.run.files import RunFiles, read_run

CHECKS: Mapping[str, Callable[[RunFiles], Iterable[Finding]]] = {
    "end": ending.end,
    "steps": ending.steps,
    "faults": ending.faults,
    "checkpoints": ending.checkpoints,
    "loss": learning.loss,
    "gradients": learning.gradients,
    "evaluations": learning.evaluations,
    "data": speed.data,
    "slow steps": speed.slow_steps,
    "slow ranks": speed.slow_ranks,
    "memory": speed.memory,
}


def read(folder: Path) -> Iterator[Finding]:
    """What went wrong in a run, or is odd. Raises UserError where the folder holds none."""
    run = read_run(folder)
    for check in CHECKS.values():
        yield from check(run)
