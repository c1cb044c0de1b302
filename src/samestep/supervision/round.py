"""Round: one start of all ranks. A training that is never disturbed has one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from samestep import environment


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a rank is told about the start that it is part of."""

    number: int = 0
    # Where ranks leave how far they are, and find out that the job is to stop; None: no process looks after them.
    folder: Path | None = None
    # Where copies of the training's state lie in the host's memory, from round to round; None: there are none.
    memory: Path | None = None
    # Where the run leaves its files, as an earlier round has chosen; None: none has.
    run_folder: Path | None = None

    @classmethod
    def told(cls) -> Self | None:
        """The round of a rank that its host's agent has started; None in any other process."""
        told = environment.told_round()
        if told is None:
            return None
        run_folder = Path(told.run_folder) if told.run_folder is not None else None
        memory = Path(told.memory) if told.memory is not None else None
        return cls(number=told.number, folder=Path(told.folder), run_folder=run_folder, memory=memory)
