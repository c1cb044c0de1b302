"""Opens the files of a checkpoint; what `input_files` says of them is damage here."""

from io import FileIO
from pathlib import Path

from samestep.errors import CheckpointError, UserError
from samestep.input_files import opened, read_all


def open_plain(file: Path) -> FileIO:
    """Open a plain file for reading, unbuffered; a symbolic link is none.

    Raises FileNotFoundError where there is none, and CheckpointError for one that can't be read.
    """
    try:
        return opened(file, links=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    except UserError as error:
        raise CheckpointError(str(error)) from None


def read_plain(file: Path, most: int) -> bytes:
    """The bytes of a plain file. Raises as `open_plain` does, and CheckpointError for more than `most` bytes."""
    with open_plain(file) as stream:
        try:
            return read_all(stream, file, most=most)
        except OSError as error:
            raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
        except UserError as error:
            raise CheckpointError(str(error)) from None
