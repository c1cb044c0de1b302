"""Link: the process behind which the far end of one host or several stands, and what comes from it."""

import json
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

from samestep import environment
from samestep.cluster.start.remote import MARK
from samestep.cluster.start.starter import Bring

_NO_COMMAND = (126, 127)  # what a shell ends with that can't run or find a command
_NO_PYTHON = ("No module named 'samestep'", "execve()")  # what Python says, and srun
_LAST_LINES = 12  # of a process that ended before its agent ran
_LATE = 1.0  # seconds for what was printed to arrive when its process has ended


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line that somebody at the far end printed."""

    link: "Link"
    number: int  # of the stream: 1 or 2
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a far end says itself."""

    link: "Link"
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process has ended, and all that it printed has been read."""

    link: "Link"


Event = Line | Told | Ended | None


class Link:
    """A process that was started to reach hosts."""

    def __init__(self, bring: Bring, request: bytes, events: "SimpleQueue[Event]") -> None:
        """Start it, and put all that comes from it into `events`."""
        self.bring = bring
        self.began = time.monotonic()
        self.started: set[str] = set()  # hosts whose agents run
        self._events = events
        self._held: list[tuple[int, bytes]] = []
        self._failure: str | None = None
        try:
            # A session of its own: Ctrl-C at the terminal is ours to pass on.
            self._process = subprocess.Popen(
                bring.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={name: value for name, value in environment.snapshot().items() if name not in bring.without},
            )
        except OSError as error:
            self._process, self._failure = None, f"{bring.command[0]}: {error.strerror}"
            events.put(Ended(link=self))
            return
        self._readers = [
            threading.Thread(target=self._read, args=(number, stream), daemon=True)
            for number, stream in ((1, self._process.stdout), (2, self._process.stderr))
        ]
        for thread in (*self._readers, threading.Thread(target=self._send, args=(request,), daemon=True)):
            thread.start()
        threading.Thread(target=self._await_end, daemon=True).start()

    def _read(self, number: int, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.rstrip(b"\n")
                if number == 1 and text.startswith(MARK):
                    self._events.put(Told(link=self, values=json.loads(text.removeprefix(MARK))))
                else:
                    self._events.put(Line(link=self, number=number, text=text))

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, which is seen elsewhere
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _await_end(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.wait()
        for reader in self._readers:  # ssh may leave a process behind that holds them: its shared connection
            reader.join(_LATE)
        self._events.put(Ended(link=self))
        with suppress(OSError):  # what it was sent and has not read
            self._process.stdin.close()

    def hold(self, number: int, text: bytes) -> None:
        """Keep a line until it is known what it is: an agent's, or why there is none."""
        self._held.append((number, text))

    def let_go(self) -> list[tuple[int, Sequence[bytes]]]:
        """The lines that were kept."""
        held, self._held = self._held, []
        return [(number, [text]) for number, text in held]

    def order(self, text: str) -> None:
        """Tell the far end what to do."""
        if self._process is not None:
            self._send(text.encode() + b"\n")

    def kill(self) -> None:
        """End the process; its far end sees that it is gone."""
        if self._process is not None:
            self._process.kill()

    def why(self, hosts: Sequence[str]) -> str:
        """Why the process ended, where its hosts' agents have not said how theirs did."""
        lost = [host for host in hosts if host in self.started]
        words = [text.decode(errors="replace").strip() for _, text in self._held]
        lines = "\n".join([word for word in words if word][-_LAST_LINES:])
        name = self.bring.command[0].rpartition("/")[2]
        if self._process is None:
            return f"{', '.join(hosts)} can't be reached: {self._failure}"
        end = f"{name} ended with exit code {self._process.returncode}"
        if lost:
            return f"{', '.join(lost)} was lost in the middle of the job: {end}{': ' if lines else ''}{lines}"
        said = f"{', '.join(hosts)} can't be reached: {lines or 'no message'} ({end})"
        if self._process.returncode in _NO_COMMAND or any(words in lines for words in _NO_PYTHON):
            return f"{said}; samestep is to be installed there too, and --remote-python names the Python that has it"
        return said
