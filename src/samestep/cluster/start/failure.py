"""Why a rank failed: read from what it left, its error file or the end of what it wrote."""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep.cluster.start.outcome import Failure, first
from samestep.cluster.start.rank_files import errors_of, output_of
from samestep.supervision.watch import Hang

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


def first_of(failures: Mapping[int, ProcessFailure], host: str, folder: Path) -> Failure:
    """The root cause among this host's ranks; `failures` by rank, as the elastic agent met them."""
    found = [_read(rank, failure, host, folder) for rank, failure in failures.items()]
    own = [failure for failure in found if not _was_ended(failure)]
    cause = first(own or found)
    assert cause is not None
    return cause


def of_hang(hang: Hang, host: str, folder: Path) -> Failure:
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


def _read(rank: int, failure: ProcessFailure, host: str, folder: Path) -> Failure:
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


def _told_at(failure: ProcessFailure) -> float:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        with suppress(KeyError, ValueError):
            return float(message["extraInfo"].get("time", message["extraInfo"]["timestamp"]))
    return time.time() - (_MET_WITHIN if failure.exitcode < 0 else 0)


def _told(failure: ProcessFailure) -> str | None:
    """What the rank itself wrote for its starter: samestep's ranks do, and scripts with PyTorch's `@record`."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return None
    return str(message["extraInfo"].get("py_callstack") or message["message"]).rstrip()


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
