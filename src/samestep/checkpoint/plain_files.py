"""Opens the files of a checkpoint, which anybody may have put there: only plain ones, and without waiting for any."""

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from samestep.errors import CheckpointError
from samestep.input_files import kind_of


def open_plain(file: Path) -> FileIO:
    """Open a plain file for reading, unbuffered.

    Raises FileNotFoundError where there is none, and CheckpointError for one that can't be read, for a symbolic link,
    which leads out of the checkpoint's folder, and for a pipe or the like, whose reader would wait for a writer.
    """
    try:
        _check_kind(file, file.lstat())
        # Between the two looks the file may have become another one: no wait for a pipe's writer, and no link.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{file} can't be read: {what}") from None
    stream = os.fdopen(descriptor, "rb", buffering=0)
    try:
        _check_kind(file, os.fstat(descriptor))
    except CheckpointError:
        stream.close()
        raise
    return stream


def _check_kind(file: Path, status: os.stat_result) -> None:
    """Raise CheckpointError unless it is a plain file."""
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISLNK(status.st_mode):
        raise CheckpointError(
            f"{file} is a symbolic link, and a checkpoint's files stand in its own folder; put a copy in its place"
        )
    raise CheckpointError(f"{file} is {kind_of(status.st_mode) or 'a folder'} in the place of a file")


def read_plain(file: Path, most: int) -> bytes:
    """The bytes of a plain file. Raises as `open_plain` does, and CheckpointError for more than `most` bytes."""
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{file} has {size:,} bytes, and at most {most:,} are read")
        try:
            content = bytearray()
            while block := stream.read(most + 1 - len(content)):
                content += block
        except OSError as error:
            raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    return bytes(content)
