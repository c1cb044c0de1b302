"""Checksums of a checkpoint's files: made when they are written, compared before they are used."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from samestep.checkpoint.info import FileSum

AT_ONCE = 1 << 20  # bytes


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """The sums of some files of a folder."""
    return {name: _sum_of(folder / name) for name in names}


def _sum_of(file: Path, advance: Callable[[int], None] | None = None) -> FileSum:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(AT_ONCE))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            if advance is not None:
                advance(count)
    return FileSum(bytes=file.stat().st_size, sha256=digest.hexdigest())


def fault_of(
    folder: Path, expected: Mapping[str, FileSum], advance: Callable[[int], None] | None = None
) -> str | None:
    """What is wrong with the first wrong file; None where all are as they were written.

    `advance` is told how many bytes were read, again and again.
    """
    for name, wanted in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != wanted.bytes:
            return f"{file} has {file.stat().st_size:,} bytes, and {wanted.bytes:,} were written"
        if _sum_of(file, advance) != wanted:
            return f"{file} is not what was written: its checksum differs"
    return None
