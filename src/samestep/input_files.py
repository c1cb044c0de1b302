"""Reads files that users name: one that can't be read, is no file, or is far too large is one message.

Every path of a command's option is read by `path_option`, every small file by `text_of` or `bytes_of`, and JSON by
`parse_json`. None of them waits for a writer that never comes, or reads a device without end.
"""

import argparse
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.sizes import decimal_size

MOST_BYTES = 64 * 2**20  # of a file of settings; data and weights have their own readers
_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # bytes, on Linux

# Pipes that a shell makes for <(command), and standard input, have a writer.
_OPEN_ALREADY = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")

_KINDS: Mapping[str, Callable[[int], bool]] = {
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": stat.S_ISCHR,
    "a disk": stat.S_ISBLK,
}


# Of what is no file here; `Path` makes one slash of two.
_ADDRESS = re.compile(
    r"(s3[an]?|gs|gcs|az|abfss?|adls?|wasbs?|hdfs|dbfs|oss|cosn?|obs|https?|s?ftp|hf|file)://?", re.IGNORECASE
)


def wrong_path(text: str) -> str | None:
    """Why a text can't be the path of a file or folder, and what to do; None if it can."""
    if (scheme := _ADDRESS.match(text)) is not None:
        do = (
            "write the path alone" if scheme[1].lower() == "file" else "copy it here, or mount it, and write its path"
        )
        return f"it is an address, and files are read and written on this machine; {do}"
    if "\0" in text:
        return "it has the character NUL, which no path has"
    if len(os.fsencode(text)) > _LONGEST_PATH:
        return f"it is longer than the {_LONGEST_PATH} bytes that a path may have; use a shorter one"
    if any(len(os.fsencode(name)) > _LONGEST_NAME for name in text.split("/")):
        return f"a name in it is longer than the {_LONGEST_NAME} bytes that a file's may have; use a shorter one"
    return None


def short_path(text: str) -> str:
    """A wrong path as it stands in a message, never long."""
    return text if len(text) <= 60 else f"{text[:60]}..."


def path_option(text: str) -> Path:
    """The type of an option that is a path; argparse puts the option's name before the message."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    if wrong := wrong_path(text):
        raise argparse.ArgumentTypeError(f'"{short_path(text)}": {wrong}')
    return Path(text)


def bytes_of(
    file: Path, *, missing: str | None = None, folder: str = "a file", most: int | None = MOST_BYTES
) -> bytes:
    """The content of a file. Raises UserError if it can't be read, or has more than `most` bytes.

    `missing`: the message where there is no such file; `folder`: what is wanted where it is a folder.
    """
    if wrong := wrong_path(str(file)):
        raise UserError(f"{short_path(str(file))!r}: {wrong}")
    try:
        waits = str(file).startswith(_OPEN_ALREADY)
        _refuse_what_is_no_file(file, folder, may_be_pipe=waits)
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (0 if waits else os.O_NONBLOCK))
        with os.fdopen(descriptor, "rb") as stream:
            size = os.fstat(descriptor).st_size
            content = b"" if most is not None and size > most else stream.read(-1 if most is None else most + 1)
        if content is None:  # the system has nothing to read now, as of /proc/kmsg
            raise UserError(f"{file} can't be read: it has no end; {folder} is wanted")
    except FileNotFoundError:
        raise UserError(missing or f"{file}: no such file") from None
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None
    if most is not None and max(size, len(content)) > most:
        told = decimal_size(size) if size > most else f"more than {decimal_size(most)}"
        raise UserError(f"{file} has {told}; such a file may have {decimal_size(most)}")
    return content


def _refuse_what_is_no_file(file: Path, folder: str, *, may_be_pipe: bool) -> None:
    """Raise UserError for a folder, and for what would be waited for or read without end. /dev/null is empty."""
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise UserError(f"{file} is a folder; {folder} is wanted")
    kind = kind_of(mode)
    if kind is None or (may_be_pipe and stat.S_ISFIFO(mode)) or file == Path(os.devnull):
        return
    raise UserError(f"{file} is {kind}; {folder} is wanted")


def kind_of(mode: int) -> str | None:
    """What a path with this mode is, if it is neither a file nor a folder nor a link."""
    return next((kind for kind, is_it in _KINDS.items() if is_it(mode)), None)


def text_of(
    file: Path,
    *,
    missing: str | None = None,
    folder: str = "a file",
    most: int | None = MOST_BYTES,
    newlines: bool = True,
    nul: bool = False,
) -> str:
    """The text of a file in UTF-8, as `bytes_of` reads it. Raises UserError also if it is no such text.

    `newlines`: each end of a line becomes a newline. `nul`: the character NUL is taken, which shows a file of
    UTF-16 or UTF-32, or a binary one, elsewhere.
    """
    content = bytes_of(file, missing=missing, folder=folder, most=most)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{file} is UTF-16; save it as UTF-8")
    if not nul and (place := content.find(b"\0")) >= 0:
        raise UserError(f"{file} is no text: byte {place} is 0x0; save it as UTF-8, if it is UTF-16 or UTF-32")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8: byte {error.start} is {content[error.start]:#x}; save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines else text


def parse_json(text: str, **options: Any) -> Any:
    """The value of a text in JSON. Raises json.JSONDecodeError, also where Python raises something else."""
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("values are nested too deep", text, 0) from None
    except ValueError:  # more digits than Python turns into a number
        raise json.JSONDecodeError("a number has thousands of digits", text, 0) from None
