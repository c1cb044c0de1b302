"""Standard output and error of a process that goes on where they can't be written, and streams that are closed.

What is printed of a training is worth less than the training: a full disk or a closed pipe behind standard output
costs what would stand there, not the process.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def open_closed() -> None:
    """Open the null device in place of standard streams that this process was started without (`>&-`).

    Otherwise the next file that is opened, such as a checkpoint, would get the stream's number and all that is
    printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, encoding="utf-8")


class _Patient(io.RawIOBase):
    """A file descriptor whose refusals are noted instead of raised."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.error: OSError | None = None  # the first one

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any, /) -> int:
        """Write, or drop what the system refuses."""
        try:
            return os.write(self._number, data)
        except OSError as error:
            self.error = self.error or error
            return len(data)


def go_on_without() -> None:
    """Let this process go on where standard output or error can't be written; what is printed then is dropped."""
    sys.stdout = _patient(sys.stdout)
    sys.stderr = _patient(sys.stderr)


def _patient(stream: TextIO) -> TextIO:
    """A patient stream in place of one on a file descriptor; any other is kept."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Patient):
        return stream
    try:
        number = stream.fileno()
        stream.flush()
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Patient(number)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def refused_output() -> str | None:
    """Return why standard output wasn't written; None if it was, or if its reader is gone, as of `| head`."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if not isinstance(raw, _Patient) or raw.error is None or raw.error.errno == errno.EPIPE:
        return None
    return raw.error.strerror
