"""Handle: a process that is meant and no other, even when its number has been given to a new one."""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path


class Handle:
    """Of a process that was alive when this was made; where the system has no such handles, its number alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        self._gone = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                self._descriptor = None  # not allowed here

    def alive(self) -> bool:
        if self._gone:
            return False
        if self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._gone = bool(poll.poll(0))  # readable once it has ended
        else:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self._gone = True
        return not self._gone

    def processor_seconds(self) -> float:
        """How long it has computed so far; 0 where the system does not tell."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return 0.0
        user, system = status.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it at once."""
        if self.alive():
            with suppress(ProcessLookupError):
                if self._descriptor is not None:
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor, self._gone = None, True
