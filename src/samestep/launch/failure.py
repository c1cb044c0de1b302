"""How a job ended, and why a rank failed: read from its error file or the end of what it wrote.

The rank that failed first is the one whose traceback a user sees.
"""

import json
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any

from samestep.errors import UserError
from samestep.run_folder import errors_of, output_of

if TYPE_CHECKING:  # an agent that is brought up from another host takes orders before it imports PyTorch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from samestep.fault_tolerance.watchdog import Hang


def tell(file: Path, message: str, *, mistake: str | None = None) -> None:
    """Write a failure's message where the elastic agent looks for it; `mistake`: the kind of a UserError."""
    now = time.time()
    extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now, "mistake": mistake}
    new = file.with_name(f"{file.name}.new")  # the agent may look, or end this rank, at any moment
    with suppress(OSError):  # the message stands on standard error as well
        new.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
        new.replace(file)


_USERS_MISTAKE = 2  # what samestep's ranks end with, and those of argparse
_OURS = "samestep: "  # how the message of a samestep rank begins


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed."""

    host: str
    rank: int
    exit_code: int  # of its process; a negative one is the signal that ended it
    reason: str  # its traceback, or the last lines that it wrote
    log: str  # the file with all of them
    at: float  # seconds since 1970
    follows: bool = False  # whether it says that it lost another rank
    hung: bool = False  # whether it was ended since it did not move on, as its reason says

    @property
    def how(self) -> str:
        """How its process ended."""
        if self.hung:
            return "it hung, and was ended"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else ended_by(-self.exit_code)

    def __str__(self) -> str:
        """What the user is told: who failed first, how, why, and where the rest stands."""
        text = f"rank {self.rank} on {self.host} failed first: {self.how}"
        if self.reason:
            text += f"\n{self.reason}"
        return f"{text}\nall that it wrote: {self.host}:{self.log}"


def ended_by(number: int) -> str:
    """In words, that a signal ended a process."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    reason = f"ended by {name}"
    return f"{reason}; the system kills so when memory runs out" if number == signal.SIGKILL else reason


def first(failures: Iterable[Failure]) -> Failure | None:
    """The root cause: the earliest, but for those whose connections broke because another rank was gone."""
    return min(failures, key=lambda failure: (failure.follows, failure.at), default=None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job, or one host's part of it, ended."""

    exit_code: int = 0  # as `samestep` ends: 0, 1, 2 or 128 + n
    message: str | None = None  # what there is to say
    failure: Failure | None = None  # the first of this host's ranks

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Outcome":
        failure = values["failure"]
        return cls(**{**values, "failure": Failure(**failure) if failure is not None else None})


def of_failures(failures: Iterable[Failure]) -> Outcome | None:
    """The end of a job whose ranks failed; None where none did."""
    failure = first(failures)
    if failure is None:
        return None
    if failure.exit_code != _USERS_MISTAKE:
        return Outcome(exit_code=1, message=str(failure), failure=failure)
    # A mistake in a job is the job's, not a rank's.
    message = failure.reason.removeprefix(_OURS) if failure.reason.startswith(_OURS) else str(failure)
    return Outcome(exit_code=_USERS_MISTAKE, message=message, failure=failure)


_LAST_LINES = 20  # of a rank that left no traceback
_MOST_LINES = 60  # of a traceback that are shown
_LINES_OF_AN_END = 5  # that stand behind the last stack of a traceback with which a process ended
_END = 1 << 18  # bytes at the end of a log that are looked at

# A rank that was ended by a signal is met within a tenth of a second, one that raised only when its interpreter is
# done: its peers' tracebacks, which this is held against, have been written by then.
_MET_WITHIN = 1.0

_BEGINS = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

# torch.distributed puts the rank before each line of a traceback, and warns while the interpreter ends.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_WARNING = re.compile(r"^\[(?:rank\d+\]:\[)?[WI]\d{4} |UserWarning: ")

# How those tell it whose peer is gone: gloo, NCCL, the store, Python's sockets.
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|ConnectionResetError|BrokenPipeError|Broken pipe|Connection refused"
    r"|remote process exited|DistNetworkError|recvValue failed|Timed out waiting|connectFullMesh"
    r"|NCCL.*(?:abort|remote)",
)


def first_of(failures: Mapping[int, "ProcessFailure"], host: str, folder: Path) -> Failure:
    """The root cause among this host's ranks; `failures` by rank, as the elastic agent met them."""
    found = [_read(rank, failure, host, folder) for rank, failure in failures.items()]
    own = [failure for failure in found if not _was_ended(failure)]
    cause = first(own or found)
    assert cause is not None
    return cause


def of_hang(hang: "Hang", host: str, folder: Path) -> Failure:
    """A rank that its host's agent has ended, since it did not move on."""
    return Failure(
        host=host,
        rank=hang.rank,
        exit_code=-SIGKILL,
        reason=hang.reason,
        log=str(errors_of(folder, hang.rank)),
        at=time.time(),
        hung=True,
    )


def _was_ended(failure: Failure) -> bool:
    """Whether a rank only ended since the agent ends all by SIGTERM as soon as it has met the first failure.

    One that was about to end with a traceback of its own may be that which the others have lost.
    """
    if failure.exit_code not in (-SIGTERM, 128 + SIGTERM):
        return False
    return not failure.reason.startswith(_BEGINS) or len(_exception(failure.reason).splitlines()) > _LINES_OF_AN_END


def _read(rank: int, failure: "ProcessFailure", host: str, folder: Path) -> Failure:
    log = errors_of(folder, rank)
    at = _told_at(failure)
    reason = _told(failure)
    if reason is None:
        lines = _lines(log)
        reason = _traceback(lines)
        if reason is not None:
            at = log.stat().st_mtime
        else:
            reason = "\n".join((lines or _lines(output_of(folder, rank)))[-_LAST_LINES:])
    return Failure(
        host=host,
        rank=rank,
        exit_code=failure.exitcode,
        reason=reason,
        log=str(log),
        at=at,
        follows=failure.exitcode >= 0 and _PEER_LOST.search(_exception(reason)) is not None,
    )


def _told_at(failure: "ProcessFailure") -> float:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        with suppress(KeyError, ValueError):
            return float(message["extraInfo"].get("time", message["extraInfo"]["timestamp"]))
    return time.time() - (_MET_WITHIN if failure.exitcode < 0 else 0)


def _told(failure: "ProcessFailure") -> str | None:
    """What the rank itself wrote for its starter: samestep's ranks do, and scripts with PyTorch's `@record`."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return None
    return str(message["extraInfo"].get("py_callstack") or message["message"]).rstrip()


def mistake_told(failure: "ProcessFailure") -> UserError | None:
    """The user's mistake for which a rank that calls a function has ended; None where it was another reason."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict) or (name := message["extraInfo"].get("mistake")) is None:
        return None
    kinds = {kind.__name__: kind for kind in (UserError, *UserError.__subclasses__())}
    return kinds.get(name, UserError)(message["message"])


def is_told(failure: "ProcessFailure") -> bool:
    """Whether a rank has written why it ended."""
    return _told(failure) is not None


def _lines(log: Path) -> list[str]:
    """The end of a log, without what PyTorch puts into it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [_RANK.sub("", line) for line in text.splitlines() if not _WARNING.search(line)]
    return [line for line in lines if line.strip()]


def _traceback(lines: list[str]) -> str | None:
    """The last traceback of a log, with those that led to it."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    if not starts:
        return None
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    found = lines[start:]
    if len(found) > _MOST_LINES:
        half = _MOST_LINES // 2
        found = [*found[:half], f"  ... {len(found) - 2 * half} lines more", *found[-half:]]
    return "\n".join(found)


def _exception(reason: str) -> str:
    """What stands behind a traceback's last stack."""
    lines = reason.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last + 1 :])
