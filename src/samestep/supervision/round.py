"""Round: one start of all ranks. A training that is never disturbed has one."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a rank is told about the start that it is part of."""

    number: int = 0
    # Where ranks leave how far they are, and find out that the job is to stop; None: no process looks after them.
    folder: Path | None = None
    # Where copies of the training's state lie in the host's memory, from round to round; None: there are none.
    memory: Path | None = None
