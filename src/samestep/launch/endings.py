"""How processes end: what a signal means, whether the kernel killed for want of memory, and the fork server's end.

A reason is named where something tells it: the kernel's count or log for memory, this process's limits, the fill of
/dev/shm. Where nothing does, the possible reasons are named as such.
"""

import errno
import os
import re
import resource
import signal
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from samestep.file_errors import room
from samestep.launch.memory import cgroup_limit
from samestep.sizes import binary_size

_IN_MEMORY = Path("/dev/shm")


def ended_by(number: int, *, out_of_memory: bool = False) -> str:
    """Describe that a signal ended a process. `out_of_memory`: the kernel tells that it was for want of memory."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    meaning = _out_of_memory() if out_of_memory and number == signal.SIGKILL else _meaning(number)
    return f"ended by {name}" + (f": {meaning}" if meaning else "")


def _out_of_memory() -> str:
    limit = cgroup_limit()
    most = "" if limit is None else f", of which its group may have {binary_size(limit)}"
    return f"the kernel ended it as memory ran out{most}"


def _meaning(number: int) -> str:
    """What a signal tells of the reason; "" if nothing."""
    if number == signal.SIGKILL:
        seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
        limited = seconds != resource.RLIM_INFINITY
        spent = f", or as {seconds} s of processor time were spent (ulimit -t)" if limited else ""
        return f"by the kernel if memory ran out (dmesg tells){spent}, or by somebody, such as a scheduler"
    if number == signal.SIGBUS:
        sizes = room(_IN_MEMORY)
        free = "" if sizes is None else f", of whose {binary_size(sizes[1])} {binary_size(sizes[0])} are free now"
        return (
            f"a mapped file had no memory behind it, as where {_IN_MEMORY} is full{free} (docker run --shm-size=8g), "
            "or was cut"
        )
    meaning = _MEANINGS.get(number, "")
    if number in (signal.SIGABRT, signal.SIGSEGV):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:  # C++ aborts where it gets no memory
            meaning += f", or it got no memory: a process may have {limit:,} bytes of addresses (ulimit -v)"
    return meaning


_MEANINGS: dict[int, str] = {
    signal.SIGXCPU: "its processor time was spent (ulimit -t)",
    signal.SIGXFSZ: "a file would be larger than it may write (ulimit -f)",
    signal.SIGSEGV: "compiled code touched memory that isn't its own, or its stack was full (ulimit -s)",
    signal.SIGABRT: "compiled code gave up; what it printed says why",
    signal.SIGILL: "compiled code has an instruction that this processor lacks",
    signal.SIGFPE: "compiled code divided by zero",
    signal.SIGSYS: "it called what the system forbids here (seccomp)",
    signal.SIGTERM: "somebody told it to end, such as a scheduler",
    signal.SIGINT: "somebody interrupted it",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGPIPE: "what read its output is gone",
}


class OutOfMemoryKills:
    """Tells whether the kernel has killed for want of memory since this object was made."""

    def __init__(self, groups: Path = Path("/sys/fs/cgroup"), log: Path = Path("/dev/kmsg")) -> None:
        self._groups, self._log = groups, log
        self._before = _kills(groups)

    def has_killed(self, pid: int) -> bool:
        """Whether the kernel's count for this group has grown, or its log names a process."""
        return _kills(self._groups) > self._before or _logged(self._log, pid)


def _kills(groups: Path) -> int:
    """Return how often the kernel has killed in this process's group for want of memory; 0 if that isn't told."""
    places = [groups / "memory.events", groups / "memory/memory.oom_control"]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, names, path = line.split(":", 2)
            if not names:
                places.append(groups / path.lstrip("/") / "memory.events")
            elif "memory" in names.split(","):
                places.append(groups / "memory" / path.lstrip("/") / "memory.oom_control")
    total = 0
    for place in dict.fromkeys(places):
        with suppress(OSError, ValueError):
            total += sum(map(int, re.findall(r"^oom_kill (\d+)$", place.read_text(encoding="ascii"), re.MULTILINE)))
    return total


def _logged(log: Path, pid: int) -> bool:
    """Whether the kernel's log names a process that it has killed for want of memory; False if it can't be read."""
    try:
        file = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        while record := os.read(file, 1 << 13):
            if re.search(rb"[Kk]illed process %d\b" % pid, record):
                return True
    except OSError as error:  # EAGAIN: there is no more
        if error.errno == errno.EPIPE:  # records were overwritten while this read them
            return _logged(log, pid)
    finally:
        os.close(file)
    return False


def server_pid() -> int | None:
    """Return the id of the process that ranks are forked from; None if none was started."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None)  # pyright: ignore[reportAttributeAccessIssue]


def server_end() -> str | None:
    """Describe how the process that ranks are forked from has ended; None if it has not."""
    pid = server_pid()
    if pid is None:
        return None
    try:  # without taking its status, which multiprocessing asks for
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    by_itself = status.si_code == os.CLD_EXITED
    how = f"ended with exit code {status.si_status}" if by_itself else f"was {ended_by(status.si_status)}"
    return f"the process that ranks are forked from (pid {pid}) {how}"


def why_not_started(error: BaseException) -> str:
    """Explain why ranks can't be started: what the system refused, and which limit helps."""
    if (ended := server_end()) is not None:
        return f"the ranks can't be started: {ended}"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"the ranks can't be started: this process may open {limit:,} files, too few; raise it (ulimit -n 4096)"
        )
    if number == errno.EAGAIN:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        most = "" if limit == resource.RLIM_INFINITY else f" of {limit:,}"
        return f"the ranks can't be started: this user's limit{most} of processes is reached; raise it (ulimit -u)"
    if isinstance(error, OSError) and error.filename is None and number in (errno.ENOSPC, errno.EROFS, errno.EACCES):
        sizes = room(_IN_MEMORY)
        free = "" if sizes is None else f" ({binary_size(sizes[0])} of {binary_size(sizes[1])} are free)"
        what = {errno.ENOSPC: f"no space is left there{free}", errno.EROFS: "it is read-only"}
        reason = what.get(number or 0, "it may not be written by this user")
        return (
            f"the ranks can't be started: their semaphores lie in {_IN_MEMORY}, and {reason}; mount it writable, "
            "with 64 MiB or more (docker run --shm-size=8g)"
        )
    return f"the ranks can't be started: {error or type(error).__name__}"
