"""The owner of a lease: which process it is, and whether it has ended, as far as this host can tell.

Two containers may have the same host name and the same process ids, so a process is looked up only where host name,
kernel boot and process namespace are those of this process. Of all others the heartbeat decides.
"""

import json
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

Life = Literal["alive", "ended", "unknown"]

FORMAT = 1
LARGEST = 4096  # bytes of a lease file
_SIZE = 1024  # bytes that are written, the same at each heartbeat, so that a renewal never changes the file's length
_LONGEST_LIMIT = 3600.0  # seconds that an observer waits at most, whatever the file says


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The contents of a lease file, apart from its count of heartbeats."""

    id: str  # random, of one start
    job: str | None  # common to all rounds of a job whose agent starts its ranks again; None: no agent
    host: str
    boot: str | None  # id of the kernel's boot; None where the system has none
    namespace: int | None  # of process ids
    pid: int
    started: int | None  # of the process, in ticks since the boot
    since: str  # ISO 8601
    limit: float  # seconds without a heartbeat after which the owner counts as ended

    @classmethod
    def here(cls, limit: float, job: str | None = None) -> "Owner":
        """This process, as the owner of a new lease."""
        pid = os.getpid()
        return cls(
            id=uuid.uuid4().hex,
            job=job,
            **_host(),
            pid=pid,
            started=_started(pid),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            limit=limit,
        )

    @property
    def life(self) -> Life:
        """Whether the owning process is alive; unknown where it isn't one of this host and namespace."""
        host = _host()
        if None in host.values() or host != {name: getattr(self, name) for name in host}:
            return "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "ended"
        except (PermissionError, OverflowError):
            pass  # another user's
        started = _started(self.pid)
        if started is None or self.started is None:  # the system hides other users' processes
            return "unknown"
        return "alive" if started == self.started else "ended"

    def follows(self, other: "Owner") -> bool:
        """Whether the other one is of an earlier round of the same job, whose ranks its agents have ended."""
        same = self.job is not None and self.job == other.job
        return same and (self.host, self.pid, self.started) != (other.host, other.pid, other.started)

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}, since {self.since}"

    def content(self, beats: int) -> bytes:
        """The lease file after so many heartbeats."""
        text = json.dumps({"format": FORMAT, **asdict(self), "beats": beats})
        return text.ljust(_SIZE - 1).encode() + b"\n"


def owner_in(content: bytes) -> Owner | None:
    """Read a lease file's content; None where it isn't that of a lease."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        return None
    values = {name: value for name, value in values.items() if name not in ("format", "beats")}
    if values.keys() != Owner.__dataclass_fields__.keys() or not _sound(values):
        return None
    return Owner(**{**values, "limit": min(float(values["limit"]), _LONGEST_LIMIT)})


def _sound(values: Mapping[str, Any]) -> bool:
    """Whether each value is of its type: anybody may have written the file."""
    texts = [values[name] for name in ("id", "host", "since")]
    perhaps = [values[name] for name in ("job", "boot")]
    numbers = [values["pid"], *(values[name] for name in ("namespace", "started") if values[name] is not None)]
    limit = values["limit"]
    return (
        all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(text is None or isinstance(text, str) for text in perhaps)
        and all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in numbers)
        and isinstance(limit, (int, float))
        and not isinstance(limit, bool)
        and limit > 0
    )


@cache
def _boot() -> str | None:
    """The id of the kernel's boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _host() -> dict[str, Any]:
    """What a process id is unique in. The namespace is None where /proc shows the processes of another one."""
    namespace = None
    with suppress(OSError):
        if str(Path("/proc/self").readlink()) == str(os.getpid()):
            namespace = Path("/proc/self/ns/pid").stat().st_ino
    return {"host": socket.gethostname(), "boot": _boot(), "namespace": namespace}


def _started(pid: int) -> int | None:
    """The start of a process in ticks since the boot; 0 for one that has ended, None where it can't be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *values = stat.rpartition(b")")[2].split()  # the name in front may hold anything
    return 0 if state in (b"Z", b"X") else int(values[18])
