"""Checksums of a checkpoint's files: made when they are written, compared before they are used."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from samestep.checkpoint.info import FileSum


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, FileSum]:
    """The sums of some files of a folder."""
    return {name: _sum_of(folder / name) for name in names}


def _sum_of(file: Path) -> FileSum:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return FileSum(bytes=file.stat().st_size, sha256=digest.hexdigest())


def fault_of(folder: Path, expected: Mapping[str, FileSum]) -> str | None:
    """What is wrong with the first wrong file; None where all are as they were written."""
    for name, wanted in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != wanted.bytes:
            return f"{file} has {file.stat().st_size:,} bytes, and {wanted.bytes:,} were written"
        if _sum_of(file) != wanted:
            return f"{file} is not what was written: its checksum differs"
    return None
