"""How a job ended, and why a rank failed: read from its error file, or from the end of its log.

The user sees the traceback of the rank that failed first.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from samestep.errors import USERS_MISTAKE, UserError
from samestep.launch.endings import ended_by
from samestep.run_folder import errors_of, output_of
from samestep.variables import without_values

if TYPE_CHECKING:  # a remote agent imports this module before PyTorch, so that it accepts orders early
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from samestep.fault_tolerance.watchdog import Hang


def tell(file: Path, message: str, *, mistake: str | None = None, instead: Path | None = None) -> None:
    """Write a failure's message to the elastic agent's error file; `mistake`: the class of a UserError.

    `instead`: a folder for it where its own has no room.
    """
    message, now = without_values(message), time.time()
    extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now, "mistake": mistake}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}})
    places = [file, *([instead / file.name] if instead is not None else [])]
    for place in places:
        new = place.with_name(f"{place.name}.new")  # atomic: the agent may read it, or kill this rank, at any moment
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(place)
        except OSError:  # no room is left there, or the run's folder was removed
            continue
        return


_OURS = "samestep: "  # prefix of a samestep rank's message


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed."""

    host: str
    rank: int
    exit_code: int  # of its process; negative: the signal that ended it
    reason: str  # its traceback, or the last lines of its log
    log: str  # the log file
    at: Annotated[float, Ge(0), Le(1e11)]  # seconds since 1970
    follows: bool = False  # whether its reason is a lost connection to another rank
    hung: bool = False  # whether the watchdog killed it for a hang
    end: str = ""  # how its process ended, where this host's agent knows more than the exit code

    @property
    def how(self) -> str:
        """How its process ended, in words."""
        if self.hung:
            return "it hung, and was ended"
        if self.end:
            return self.end
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else ended_by(-self.exit_code)

    def __str__(self) -> str:
        """Message for the user: who failed first, how, why, and where the log is."""
        text = f"rank {self.rank} on {self.host} failed first: {self.how}"
        if self.reason:
            text += f"\n{self.reason}"
        return f"{text}\nall that it wrote: {self.host}:{self.log}"


def first(failures: Iterable[Failure]) -> Failure | None:
    """Return the root cause: the earliest failure, preferring those that don't follow from a lost rank."""
    return min(failures, key=lambda failure: (failure.follows, failure.at), default=None)


@dataclass(frozen=True, kw_only=True)
class JobOutcome:
    """The end of a job, or of one host's part of it."""

    exit_code: int = 0  # as `samestep` ends: 0, 1, 2 or 128 + n
    message: str | None = None  # message for the user
    failure: Failure | None = None  # the first failure on this host

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobOutcome":
        failure = values["failure"]
        return cls(**{**values, "failure": Failure(**failure) if failure is not None else None})


def of_failures(failures: Iterable[Failure]) -> JobOutcome | None:
    """Return the outcome of a job whose ranks failed; None if none did."""
    failure = first(failures)
    if failure is None:
        return None
    if failure.exit_code != USERS_MISTAKE:
        return JobOutcome(exit_code=1, message=str(failure), failure=failure)
    # A user's mistake is reported as the job's, not a rank's.
    message = failure.reason.removeprefix(_OURS) if failure.reason.startswith(_OURS) else str(failure)
    return JobOutcome(exit_code=USERS_MISTAKE, message=message, failure=failure)


_LAST_LINES = 20  # shown of the log of a rank without a traceback
_MOST_LINES = 60  # shown of a traceback
_LINES_OF_AN_END = 5  # most lines after a traceback's last stack, if the process ended with it
_END = 1 << 18  # bytes read from the end of a log

# The agent sees a rank killed by a signal within a tenth of a second, but one that raised only after its interpreter
# has shut down: by then its peers have written the tracebacks that it is compared with.
_MET_WITHIN = 1.0

_BEGINS = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

# torch.distributed prefixes each line of a traceback with the rank, and warns while the interpreter shuts down.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_WARNING = re.compile(r"^\[(?:rank\d+\]:\[)?[WI]\d{4} |UserWarning: ")

# Messages of gloo, NCCL, the store and Python's sockets about a lost peer.
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|ConnectionResetError|BrokenPipeError|Broken pipe|Connection refused"
    r"|remote process exited|DistNetworkError|recvValue failed|Timed out waiting|connectFullMesh"
    r"|NCCL.*(?:abort|remote)",
)


def first_of(failures: Mapping[int, "ProcessFailure"], host: str, folder: Path) -> Failure:
    """Find the root cause among this host's ranks; `failures` by rank, from the elastic agent."""
    read = [_read(rank, failure, host, folder) for rank, failure in failures.items()]
    own = [failure for failure in read if not _was_ended(failure)]
    cause = first(own or read)
    assert cause is not None
    return cause


def find_told(failure: "ProcessFailure", file: Path) -> None:
    """Add to a failure what its rank has told in a file, if it could not write its error file."""
    with suppress(OSError, ValueError):
        failure.error_file_data = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()


# In the data of a ProcessFailure: what the agent knows of its end.
_AGENTS = "samestep"


def note(failure: "ProcessFailure", end: str, *, follows: bool = False) -> None:
    """Note how a rank's process ended; `follows`: samestep ended it after another one had failed."""
    failure.error_file_data = {**failure.error_file_data, _AGENTS: {"end": end, "follows": follows}}


def of_hang(hang: "Hang", host: str, folder: Path) -> Failure:
    """Build the failure of a rank that its host's agent has killed for a hang."""
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
    """Whether a rank only ended by the SIGTERM that the agent sends to all after the first failure.

    A rank that was ending with a traceback of its own does not count: it may be the one that the others have lost.
    Neither does one of which the agent knows that somebody else ended it.
    """
    if failure.exit_code not in (-SIGTERM, 128 + SIGTERM) or (failure.end and not failure.follows):
        return False
    return not failure.reason.startswith(_BEGINS) or len(_exception(failure.reason).splitlines()) > _LINES_OF_AN_END


def _read(rank: int, failure: "ProcessFailure", host: str, folder: Path) -> Failure:
    log = errors_of(folder, rank)
    from_agent = failure.error_file_data.get(_AGENTS, {})
    at = _time_of(failure)
    reason = _message_of(failure)
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
        follows=from_agent.get("follows", False)
        or (failure.exitcode > 0 and _PEER_LOST.search(_exception(reason)) is not None),
        end=from_agent.get("end", ""),
    )


def _time_of(failure: "ProcessFailure") -> float:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        with suppress(KeyError, ValueError):
            return float(message["extraInfo"].get("time", message["extraInfo"]["timestamp"]))
    return time.time() - (_MET_WITHIN if failure.exitcode < 0 else 0)


def _message_of(failure: "ProcessFailure") -> str | None:
    """Return the message in the rank's error file: from samestep's ranks, and scripts with PyTorch's `@record`."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return None
    return str(message["extraInfo"].get("py_callstack") or message["message"]).rstrip()


def user_error_of(failure: "ProcessFailure") -> UserError | None:
    """Return the UserError for which a rank that runs a function has ended; None for any other reason."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict) or (name := message["extraInfo"].get("mistake")) is None:
        return None
    kinds = {kind.__name__: kind for kind in (UserError, *UserError.__subclasses__())}
    return kinds.get(name, UserError)(message["message"])


def has_error_file(failure: "ProcessFailure") -> bool:
    """Whether a rank has written an error file."""
    return _message_of(failure) is not None


def _lines(log: Path) -> list[str]:
    """Read the last lines of a log, without PyTorch's additions."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _END))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [_RANK.sub("", line) for line in text.splitlines() if not _WARNING.search(line)]
    return [line for line in lines if line.strip()]


def _traceback(lines: list[str]) -> str | None:
    """Return the last traceback of a log, with the chained ones before it."""
    starts = [number for number, line in enumerate(lines) if line.startswith(_BEGINS)]
    if not starts:
        return None
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    lines_shown = lines[start:]
    if len(lines_shown) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines_shown = [*lines_shown[:half], f"  ... {len(lines_shown) - 2 * half} lines more", *lines_shown[-half:]]
    return "\n".join(lines_shown)


def _exception(reason: str) -> str:
    """Return the exception after a traceback's last stack, without the stack that PyTorch adds below "At:".

    PyTorch does so for a callback that failed in its own thread, such as that of a collective.
    """
    lines = reason.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    own = dropwhile(lambda line: line.startswith("  "), lines[last + 1 :])
    return "\n".join(takewhile(lambda line: line != "At:", own))
