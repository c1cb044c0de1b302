"""Reads files that anybody may have put there: one that can't be read, is no file, or is too large is one message.

Every path of a command's option is read by `path_option`, every small file that a user names by `text_of` or
`bytes_of`, and JSON by `parse_json`. All files are opened by `opened`, those of a checkpoint too
(`samestep.checkpoint.plain_files`): it waits for no writer that never comes, and opens no device without end.
"""

import argparse
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.sizes import decimal_size

MOST_BYTES = 64 * 2**20  # of a file of settings; data and weights have their own readers
_AT_ONCE = 1 << 20  # bytes
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


def opened(file: Path, *, expected: str = "a file", links: bool = True) -> FileIO:
    """Open a file for reading, unbuffered. /dev/null is an empty one.

    Raises OSError where it can't be opened, and UserError for what is no file. `expected`: what the message asks
    for in its place; `links`: whether it may be a symbolic link.
    """
    waits = links and str(file).startswith(_OPEN_ALREADY)
    _check_kind(file, file.stat(follow_symlinks=links), expected, may_be_pipe=waits)
    # Between the two looks the file may have become another one: no wait for a pipe's writer, and no link.
    flags = (0 if waits else os.O_NONBLOCK) | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        _check_kind(file, os.fstat(descriptor), expected, may_be_pipe=waits)
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(file: Path, status: os.stat_result, expected: str, *, may_be_pipe: bool) -> None:
    """Raise UserError for a folder or a link, and for what would be waited for or read without end."""
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise UserError(f"{file} is a folder; {expected} is wanted")
    if stat.S_ISLNK(mode):
        raise UserError(f"{file} is a symbolic link, which may lead out of its folder; put a copy in its place")
    kind = next((kind for kind, is_it in _KINDS.items() if is_it(mode)), None)
    if kind is None or (may_be_pipe and stat.S_ISFIFO(mode)) or os.path.samestat(status, Path(os.devnull).stat()):
        return
    raise UserError(f"{file} is {kind}; {expected} is wanted")


def read_all(stream: FileIO, file: Path, *, most: int | None, expected: str = "a file") -> bytes:
    """The content of a file that `opened` gave. Raises OSError, and UserError for more than `most` bytes."""
    size = os.fstat(stream.fileno()).st_size
    if most is not None and size > most:
        raise UserError(f"{file} has {decimal_size(size)}; such a file may have {decimal_size(most)}")
    content = stream.readall() if most is None else _up_to(stream, most + 1)
    if content is None:  # as of /proc/kmsg
        raise UserError(f"{file} can't be read: it has no end, and nothing to read now; {expected} is wanted")
    if most is not None and len(content) > most:
        raise UserError(f"{file} has more than {decimal_size(most)}; such a file may have {decimal_size(most)}")
    return content


def _up_to(stream: FileIO, most: int) -> bytes | None:
    """The content of a file, or its first `most` bytes; None where there is nothing to read now, and no end."""
    content = bytearray()
    while len(content) < most:
        block = stream.read(min(_AT_ONCE, most - len(content)))
        if block is None:
            return None
        if not block:
            break
        content += block
    return bytes(content)


def bytes_of(
    file: Path, *, missing: str | None = None, expected: str = "a file", most: int | None = MOST_BYTES
) -> bytes:
    """The content of a file. Raises UserError if it can't be read, or has more than `most` bytes.

    `missing`: the message where there is no such file; `expected`: what it asks for where it is no file.
    """
    if wrong := wrong_path(str(file)):
        raise UserError(f"{short_path(str(file))!r}: {wrong}")
    try:
        with opened(file, expected=expected) as stream:
            return read_all(stream, file, most=most, expected=expected)
    except FileNotFoundError:
        raise UserError(missing or f"{file}: no such file") from None
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from None


def text_of(
    file: Path,
    *,
    missing: str | None = None,
    expected: str = "a file",
    most: int | None = MOST_BYTES,
    newlines: bool = True,
    nul: bool = False,
) -> str:
    """The text of a file in UTF-8, as `bytes_of` reads it. Raises UserError also if it is no such text.

    `newlines`: each end of a line becomes a newline. `nul`: the character NUL is taken, which shows a file of
    UTF-16 or UTF-32, or a binary one, elsewhere.
    """
    content = bytes_of(file, missing=missing, expected=expected, most=most)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{file} is UTF-16; save it as UTF-8")
    if not nul and (place := content.find(b"\0")) >= 0:
        _refuse_packed(file, content)
        raise UserError(f"{file} is no text: byte {place} is 0x0; save it as UTF-8, if it is UTF-16 or UTF-32")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_packed(file, content)
        raise UserError(
            f"{file} is not UTF-8: byte {error.start} is {content[error.start]:#x}; save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if newlines else text


# How files begin that hold a text packed, or a table.
_PACKED: Mapping[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("an archive, such as a spreadsheet (.xlsx, .ods) or a ZIP", "export it as text, or unpack it"),
    b"\x1f\x8b": ("compressed by gzip", "unpack it"),
    b"BZh": ("compressed by bzip2", "unpack it"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it"),
    b"PAR1": ("a Parquet file", "export it as text"),
    b"SQLite format 3\x00": ("an SQLite database", "export it as text"),
    b"%PDF-": ("a PDF", "export it as text"),
    b"\xd0\xcf\x11\xe0": ("an old document of Office (.xls, .doc)", "export it as text"),
}


def _refuse_packed(file: Path, content: bytes) -> None:
    """Raise UserError for a content that is no text, and begins as a known kind of file does."""
    for begin, (what, do) in _PACKED.items():
        if content.startswith(begin):
            raise UserError(f"{file} is {what}; {do}") from None


class _TooManyDigitsError(Exception):
    """A whole number is longer than Python reads."""


def parse_json(text: str, **options: Any) -> Any:
    """The value of a text in JSON. Raises json.JSONDecodeError, also where Python raises something else."""
    try:
        return json.loads(text, parse_int=_whole, **options)
    except RecursionError:
        raise json.JSONDecodeError("values are nested too deep", text, 0) from None
    except _TooManyDigitsError:
        raise json.JSONDecodeError("a number has thousands of digits", text, 0) from None


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise _TooManyDigitsError from None
