"""Beat: a rank's word on how far it is, in memory that outlives the rank and that its starter reads at any time.

It is written by the thread that trains, so it is exact when the rank is killed, and costs a microsecond a step.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["start", "first step", "step", "evaluation", "checkpoint", "end", "left", "failed"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Process, phase, step that was begun last, steps done, first step of this round; when the rank last moved on, when
# its first step was done, its longest step but the first. Times are of the clock that all processes share.
_FORM = struct.Struct("<qqqqqddd")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a rank is. Times in seconds of `time.monotonic`."""

    rank: int
    pid: int
    phase: Phase
    step: int  # begun last; -1: none yet
    done: int  # steps of the training that are complete, those of earlier rounds included
    first_step: int  # of this round; -1: none yet
    moved_at: float
    first_done_at: float  # 0: no step of this round is done
    longest: float  # step of this round but the first, in seconds

    @property
    def over(self) -> bool:
        """Whether this rank has nothing more to do, or can't."""
        return self.phase in ("left", "failed")


class Beat:
    """Written by one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"rank-{rank}").open("w+b")
        self._file.truncate(_FORM.size)
        self._memory = mmap.mmap(self._file.fileno(), _FORM.size)
        self._pid = os.getpid()
        self._phase = PHASES.index("start")
        self._step, self._done, self._first_step = -1, 0, -1
        self._moved_at = self._first_done_at = self._longest = 0.0
        self._write()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._phase = PHASES.index("step" if self._first_done_at else "first step")
        self._step = step
        if self._first_step < 0:
            self._first_step = self._done = step
        self._write()

    def end(self, step: int) -> None:
        """The step is done."""
        began = self._moved_at
        self._done = step + 1
        self._write()
        if self._first_done_at:
            self._longest = max(self._longest, self._moved_at - began)
        else:
            self._first_done_at = self._moved_at
            self._write()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Something other than a step, which may take longer."""
        before = PHASES[self._phase]
        self.enter(phase)
        yield
        self.enter(before)

    def enter(self, phase: Phase) -> None:
        """Something other than a step, until further word."""
        self._phase = PHASES.index(phase)
        self._write()

    def close(self, phase: Phase) -> None:
        """The last word."""
        self.enter(phase)
        self._memory.close()
        self._file.close()

    def _write(self) -> None:
        self._moved_at = time.monotonic()
        _FORM.pack_into(
            self._memory,
            0,
            self._pid,
            self._phase,
            self._step,
            self._done,
            self._first_step,
            self._moved_at,
            self._first_done_at,
            self._longest,
        )


def read(folder: Path, ranks: Iterable[int]) -> list[Progress]:
    """Those of the ranks that have said anything yet, in their order."""
    found = []
    for rank in ranks:
        try:
            content = (folder / f"rank-{rank}").read_bytes()
        except FileNotFoundError:
            continue
        if len(content) != _FORM.size:
            continue
        pid, phase, step, done, first_step, moved_at, first_done_at, longest = _FORM.unpack(content)
        if pid:
            found.append(
                Progress(
                    rank=rank,
                    pid=pid,
                    phase=PHASES[phase],
                    step=step,
                    done=done,
                    first_step=first_step,
                    moved_at=moved_at,
                    first_done_at=first_done_at,
                    longest=longest,
                )
            )
    return found
