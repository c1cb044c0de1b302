"""The files of spot checks: one a rank, with a line for each recorded step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.limits import MOST_RANKS
from samestep.spot_checks.fingerprints import Fingerprint

Fingerprints = Mapping[str, Fingerprint]


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """What one rank noted of a step."""

    start: int  # how often the training was started before, so that a resumed one's steps stand apart
    step: int  # of the optimizer since that start, from 1
    rank: int
    world_size: int
    reduction: str  # "mean" or "sum": what the reduced gradients are to be of ranks' own
    scale: float = 1.0  # of a GradScaler: own gradients are so many times as large
    clipped: float = 1.0  # by which clipping has multiplied the gradients
    settings: Sequence[Mapping[str, float]] = ()  # of each parameter group: lr, weight_decay, ...
    rows: Sequence[str] = ()  # a hash for each row of the model's inputs
    counts: Mapping[str, int] = field(default_factory=dict)  # possible divisors of a mean over the rows
    random_state: str = ""
    batch_norms: Sequence[str] = ()  # modules that follow a rank's own rows
    before: Fingerprints = field(default_factory=dict)  # weights, before the step
    after: Fingerprints = field(default_factory=dict)
    buffers: Fingerprints = field(default_factory=dict)
    own: Fingerprints = field(default_factory=dict)  # gradients as this rank's loss gives them
    reduced: Fingerprints = field(default_factory=dict)  # gradients by which the optimizer steps
    left_out: int = 0  # parameters of which this rank holds a part only


Ranks = Sequence[CheckedStep]  # what all ranks noted of one step, in the order of ranks

_OF_TENSORS = ("before", "after", "buffers", "own", "reduced")


def line_of(step: CheckedStep) -> str:
    """A step as one line of a file."""
    values = {name: value for name, value in vars(step).items() if name not in _OF_TENSORS}
    values |= {name: {key: one.to_json() for key, one in getattr(step, name).items()} for name in _OF_TENSORS}
    return json.dumps(values) + "\n"


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def starts_in(file: Path) -> int:
    """How many starts of a training a rank's file has records of."""
    steps = _read(file) if file.is_file() else []
    return 1 + max((step.start for step in steps), default=-1)


def read(folder: Path) -> dict[tuple[int, int], dict[int, CheckedStep]]:
    """The steps in a folder in their order, by start and number, and in each what each rank noted.

    Raises UserError for a folder without records, and for lines that are none.
    """
    if not folder.is_dir():
        raise UserError(f"--spot-checks {folder}: there is no such folder; name the one that SpotChecks was given")
    files = sorted(folder.glob("rank-*.jsonl"))[:MOST_RANKS]
    steps: dict[tuple[int, int], dict[int, CheckedStep]] = {}
    for file in files:
        for step in _read(file):
            steps.setdefault((step.start, step.step), {})[step.rank] = step
    if not steps:
        raise UserError(
            f"--spot-checks {folder}: there are no records (rank-0.jsonl and so on); SpotChecks writes them in the "
            "first step and in every k-th one"
        )
    return dict(sorted(steps.items()))


def _read(file: Path) -> list[CheckedStep]:
    lines = file.read_text(encoding="utf-8").splitlines()
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(_step_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            if number == len(lines):
                break  # cut off, by the end of the process
            raise UserError(f"{file}:{number}: this is no record of a step; remove the file") from None
    return steps


def _step_of(values: dict[str, Any]) -> CheckedStep:
    tensors: dict[str, Any] = {
        name: {key: Fingerprint.from_json(one) for key, one in values.pop(name).items()} for name in _OF_TENSORS
    }
    return CheckedStep(**values, **tensors)
