"""Files in the round's folder by which ranks and the process that started them communicate.

A rank's status is its current step and the collectives that it has entered, in memory-mapped files that outlive the
rank. The starting process reads them at any time; a thread of the rank writes them, and reads the stop notice. Ranks
also publish facts about their job.
"""

import json
import mmap
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch.distributed as dist

from samestep import file_errors
from samestep.fault_tolerance import pace
from samestep.fault_tolerance.pace import Pace
from samestep.job import Run
from samestep.torch_internals.groups import members_of_groups, sequence_number

Phase = Literal["start", "first step", "step", "evaluation", "checkpoint", "end", "left", "failed"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Process id, phase, last step begun, steps done, first step of this round; times of the last progress and of the end
# of the first step, the longest later step. Times are of CLOCK_MONOTONIC, which all processes share.
_FORM = struct.Struct("<qqqqqddd")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A rank's progress. Times in seconds of `time.monotonic`."""

    rank: int
    pid: int
    phase: Phase
    step: int  # last one begun; -1: none yet
    done: int  # complete steps of the training, including earlier rounds'
    first_step: int  # of this round; -1: none yet
    moved_at: float
    first_done_at: float  # 0: no step of this round is complete
    longest: float  # of the round's steps but the first, in seconds

    @property
    def over(self) -> bool:
        """Whether this rank has finished or failed."""
        return self.phase in ("left", "failed")


class RankStatus:
    """Writes one rank's status."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank-{rank}"
        self._file = path.open("r+b" if path.exists() else "w+b")
        # Written, not only extended: a write to a mapped part that has no room on the disk would raise SIGBUS.
        self._file.write(bytes(_FORM.size))
        self._file.flush()
        self._memory = mmap.mmap(self._file.fileno(), _FORM.size)
        self._pid = os.getpid()
        self._phase = PHASES.index("start")
        self._step, self._done, self._first_step = -1, 0, -1
        self._moved_at = self._first_done_at = self._longest = 0.0
        self._write()

    def begin(self, step: int) -> None:
        """Record the start of a step."""
        self._phase = PHASES.index("step" if self._first_done_at else "first step")
        self._step = step
        if self._first_step < 0:
            self._first_step = self._done = step
        self._write()

    def end(self, step: int) -> None:
        """Record the end of the step."""
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
        """Context of a phase other than a step, which may take longer."""
        before = PHASES[self._phase]
        self.enter(phase)
        yield
        self.enter(before)

    def enter(self, phase: Phase) -> None:
        """Enter a phase until the next call."""
        self._phase = PHASES.index(phase)
        self._write()

    def close(self, phase: Phase) -> None:
        """Record the last phase, and close the file."""
        self.enter(phase)
        self._memory.close()
        self._file.close()

    def _write(self) -> None:
        """Write all fields into the mapped file: a copy of a few bytes, cheap enough for every step."""
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


def reserve(folder: Path, ranks: Iterable[int]) -> None:
    """Create the files of a round that must be written even where the disk is full later: status and notice."""
    for rank in ranks:
        (folder / f"rank-{rank}").write_bytes(bytes(_FORM.size))
    (folder / _NOTICE_FILE).write_bytes(bytes(_NOTICE_SIZE))


def read(folder: Path, ranks: Iterable[int]) -> list[Progress]:
    """Read the status of those ranks that have written one, in order."""
    statuses = []
    for rank in ranks:
        try:
            content = (folder / f"rank-{rank}").read_bytes()
        except FileNotFoundError:
            continue
        if len(content) != _FORM.size:
            continue
        pid, phase, step, done, first_step, moved_at, first_done_at, longest = _FORM.unpack(content)
        if pid:
            statuses.append(
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
    return statuses


# Process group -> collectives entered. The key is the group's ranks and its number among groups of the same ranks,
# since names of groups may differ between ranks.
Counts = Mapping[str, int]


def entered_collectives() -> Counts:
    """Count the collectives that this rank has entered in each process group; callable from any thread.

    Reads the process groups' own sequence numbers, which exclude point-to-point messages.
    """
    if not dist.is_initialized():
        return {}
    counts: dict[str, int] = {}
    seen: Counter[str] = Counter()
    for group, members in list(members_of_groups().items()):
        if not isinstance(group, dist.ProcessGroup):  # placeholder of a group that this rank is not in
            continue
        ranks = ",".join(map(str, sorted(members)))
        seen[ranks] += 1
        with suppress(RuntimeError):  # the back end has no sequence numbers
            counts[f"{ranks}#{seen[ranks]}"] = sequence_number(group)
    return counts


def write_counts(folder: Path, rank: int, entered: Counts) -> None:
    """Write the counts for `read_counts` atomically."""
    new = folder / f"counts-{rank}.new"
    new.write_text(json.dumps(entered), encoding="utf-8")
    new.replace(folder / f"counts-{rank}.json")


def read_counts(folder: Path, ranks: Iterable[int]) -> dict[int, Counts]:
    """Read the counts of some ranks; those that have written none are left out."""
    counts: dict[int, Counts] = {}
    for rank in ranks:
        with suppress(FileNotFoundError):
            counts[rank] = json.loads((folder / f"counts-{rank}.json").read_text(encoding="utf-8"))
    return counts


def members(key: str) -> list[int]:
    """Return the ranks in a group's key."""
    return [int(rank) for rank in key.partition("#")[0].split(",")]


_PACE_BEATS = 20  # heartbeats between writes of the rank's pace
_NOTICE_FILE = "notice"  # contains the signal's number
_NOTICE_SIZE = 8  # bytes


class Heartbeat:
    """Beats every `apart` seconds until it is stopped."""

    def __init__(self, folder: Path, rank: int, *, apart: float, own: Pace, noticed: Callable[[int], None]) -> None:
        self._own = own
        self._folder = folder
        self._rank = rank
        self._apart = apart
        self._noticed = noticed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        """Thread: writes the entered collectives and the rank's pace, and looks for a notice."""
        last: Counts = {}
        beats = 0
        refused = False
        while not self._stop.wait(self._apart):
            entered = entered_collectives()
            beats += 1
            try:
                if entered != last:
                    write_counts(self._folder, self._rank, entered)
                    last = entered
                if beats % _PACE_BEATS == 0:
                    pace.write(self._folder, self._rank, self._own.recent())
            except OSError as error:  # the notice is what this thread must not miss
                refused = refused or self._tell(error)
            number = notice_in(self._folder)
            if number is not None:
                self._noticed(number)

    def _tell(self, error: OSError) -> bool:
        """Warn that the rank's status can't be written."""
        reason = file_errors.reason_of(error, self._folder, elsewhere="point TMPDIR to a folder with room")
        print(
            f"samestep: the status of rank {self._rank} can't be written into {self._folder}: {reason}; the training "
            "goes on, and of a hang less can be told",
            file=sys.stderr,
            flush=True,
        )
        return True

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def give_notice(folder: Path, number: int) -> None:
    """Write the stop notice with the signal's number for the ranks of a round.

    Into the file that `reserve` has made, which takes no further room. Raises OSError.
    """
    with (folder / _NOTICE_FILE).open("r+b" if (folder / _NOTICE_FILE).exists() else "wb", buffering=0) as file:
        file.write(str(number).encode("ascii").ljust(_NOTICE_SIZE, b"\0"))


def notice_in(folder: Path) -> int | None:
    """Read the signal's number from the stop notice; None if there is none."""
    try:
        text = (folder / _NOTICE_FILE).read_bytes().strip(b"\0")
    except OSError:
        return None
    return int(text) if text else None


_JOB_INFO_FILE = "about.json"  # in the round's folder


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Facts about a training that its ranks publish for their starting process, which knows only their command."""

    hang_limit: float | None  # seconds
    grace_period: float  # seconds that they need to save and end
    layout: str | None = None  # once the ranks have met
    run_folder: str | None = None


def job_info_of(run: Run) -> JobInfo:
    """Return what is known before the ranks have joined."""
    return JobInfo(hang_limit=run.hang_limit, grace_period=run.grace_period)


def write_job_info(folder: Path, rank: int, info: JobInfo) -> None:
    """Write the facts for `read_job_info` atomically."""
    new = folder / f"about-{rank}.new"
    new.write_text(json.dumps(asdict(info)), encoding="utf-8")
    new.replace(folder / _JOB_INFO_FILE)


def read_job_info(folder: Path) -> JobInfo | None:
    """Read the published facts; None if there are none yet, or the ranks are not samestep's."""
    try:
        return JobInfo(**json.loads((folder / _JOB_INFO_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
