"""A rank's command, looked at before any process waits for another."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError

_OURS = ("-m", "samestep")
JOB_FILES = (".yaml", ".yml")


def check_command(command: Sequence[str], host: str) -> None:
    """Raise UserError where a command can't be started here."""
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise UserError("-m names no module; write it after -m")
        if is_ours(command) and (job := _job_file(command)) is not None and not is_file(job):
            raise UserError(f"there is no job file {job} in {Path.cwd()} on {host}")
    elif first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f"there is no script {first} in {Path.cwd()} on {host}")
    elif shutil.which(first) is None:
        raise UserError(
            f"there is no program {first} on {host}; a script of Python's has a name that ends in .py, "
            "and a module stands behind -m"
        )


def is_ours(command: Sequence[str]) -> bool:
    """Whether it is one of samestep's own commands."""
    return tuple(command[:2]) == _OURS


def is_file(word: str) -> bool:
    """Whether a word of a command names a file that is there."""
    try:
        return Path(word).is_file()
    except OSError:  # it is too long for a name
        return False


def _job_file(command: Sequence[str]) -> str | None:
    """The job file among the words of a command of samestep's."""
    return next((word for word in command if word.endswith(JOB_FILES) and "=" not in word), None)
