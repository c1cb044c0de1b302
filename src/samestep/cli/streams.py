"""Standard error of a command: where it is closed, its reader is gone or its disk is full, the work goes on."""

import io
import os
import sys

_NUMBER = 2  # of its descriptor


class _Unfailing(io.FileIO):
    """Standard error that leaves out what can't be written."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def keep_standard_error() -> None:
    """Replace this process's standard error by one whose failures don't end the command.

    Where it was closed at the start it is the null device: the next file that is opened would get its number, and
    what ranks and libraries write to it.
    """
    try:
        os.fstat(_NUMBER)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        if null != _NUMBER:
            os.dup2(null, _NUMBER)
            os.close(null)
    stream = _Unfailing(_NUMBER, "wb", closefd=False)
    sys.stderr = io.TextIOWrapper(stream, errors="backslashreplace", line_buffering=True, write_through=True)
