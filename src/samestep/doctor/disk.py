"""Disks: whether the runs' folder and the temporary folder can be written, and what is free there."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from samestep.doctor.finding import Asked, Finding, in_gib, ok, problem, warning

_TOO_LITTLE, _LITTLE = 100 * 2**20, 5 * 2**30


def disks(asked: Asked) -> Iterator[Finding]:
    yield _folder("runs' folder", asked.folder, "write elsewhere with run.folder or --folder")
    yield _folder("temporary folder", Path(tempfile.gettempdir()), "point TMPDIR to a folder with more room")


def _folder(subject: str, folder: Path, remedy: str) -> Finding:
    """A folder, or where it isn't there yet the one in which it would be made."""
    there = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), Path("/"))
    if not there.is_dir():
        return problem(subject, f"{folder}: {there} is a file", remedy, folder=str(folder))
    total, _, free = shutil.disk_usage(there)
    values = {"folder": str(folder), "total_bytes": total, "free_bytes": free}
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"samestep")
    except OSError as error:
        return problem(subject, f"{folder} can't be written: {error.strerror}", remedy, **values)
    text = f"{folder} can be written, {in_gib(free)} of {in_gib(total)} are free"
    if free < _TOO_LITTLE:
        return problem(subject, text, f"remove old runs and checkpoints, or {remedy}", **values)
    if free < _LITTLE:
        return warning(subject, text, f"remove old runs and checkpoints, or {remedy}", **values)
    return ok(subject, text, **values)
