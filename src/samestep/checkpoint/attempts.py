"""What becomes of a save that the system refuses: it is tried again, then elsewhere, and then left out.

Every rank counts the same: an error on one rank is raised on all (`Saver.together`), so all try again, turn to the
fallback, skip and give up after the same attempt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import CheckpointError, NotSavedError
from samestep.job import Checkpointing
from samestep.run_folder import name_of
from samestep.sizes import binary_size

# Seconds before each further try in the same folder. A file server that is started again takes longer: that save is
# skipped, and the next one is tried as often.
PAUSES = (1.0, 4.0)


class UnwrittenError(CheckpointError):
    """A checkpoint that the system refuses to write. A further try may succeed."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How a training bears saves that fail."""

    most: int = Checkpointing.max_failures  # saves that may fail in a row
    key: str = ""  # of the job, which sets `most`
    fallback: Path | None = None  # the folder for those that can't be written into the first one
    warn: Callable[[str], None]  # called on every rank; one of them prints


class SaveTally:
    """Counts a training's saves that failed; the same on every rank."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self._in_a_row = 0
        self._ending = False
        self.skipped = 0  # in all
        self.newest: Path | None = None  # the last checkpoint that was written, or that the training resumed from
        self.reason = ""  # why the last skipped one couldn't be written

    def wrote(self, path: Path, *, instead_of: Sequence[str] = ()) -> None:
        """Note a complete checkpoint; `instead_of`: why it isn't in the first folder."""
        self._in_a_row = 0
        self.newest = path
        if instead_of:
            self._tolerance.warn(f"{'; '.join(instead_of)}; it is in the fallback folder, {path}")

    def skip(self, step: int, refusals: Sequence[str], needs: int) -> None:
        """Note a save that failed in every folder, for the reasons `refusals`; `needs`: bytes of a checkpoint.

        Raises NotSavedError if that is one too many in a row.
        """
        self.skipped += 1
        self._in_a_row += 1
        self.reason = f"{'; '.join(refusals)}; a checkpoint takes {binary_size(needs)}; tried {1 + len(PAUSES)} times"
        if self._ending:
            return
        limit = f" ({self._tolerance.key})" if self._tolerance.key else ""
        if self._in_a_row > self._tolerance.most:
            raise NotSavedError(
                f"{self.reason}; {_in_a_row(self._in_a_row)}, more than the {self._tolerance.most} that may{limit}: "
                f"the training ends, and {self.kept}"
            )
        self._tolerance.warn(
            f"{self.reason}; {name_of(step)} is skipped, and the training goes on: {self.kept}; "
            f"{_in_a_row(self._in_a_row)}, and {self._tolerance.most + 1} end the training{limit}"
        )

    def last(self) -> None:
        """The training has ended: from now on a save that fails is only counted."""
        self._ending = True

    @property
    def failing(self) -> bool:
        """Whether the last save was skipped."""
        return self._in_a_row > 0

    @property
    def kept(self) -> str:
        """Which checkpoint there is, in words."""
        return f"the newest checkpoint is {self.newest}" if self.newest is not None else "there is no checkpoint"


def _in_a_row(count: int) -> str:
    return "1 save has failed" if count == 1 else f"{count:,} saves have failed in a row"
