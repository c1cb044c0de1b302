"""Files that a command is asked to write."""

from pathlib import Path

from samestep.errors import UserError


def check(flag: str, file: Path | None) -> None:
    """Raise UserError where a file can't be written; before minutes are spent on what would stand in it."""
    if file is None:
        return
    if file.is_dir():
        raise UserError(f"{flag} {file}: this is a folder; the path of a file is wanted")
    if not file.parent.is_dir():
        raise UserError(f"{flag} {file}: there is no folder {file.parent}; make it, or write elsewhere")
