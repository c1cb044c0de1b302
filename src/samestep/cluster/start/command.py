"""A rank's command, looked at before any process waits for another."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError


def check_command(command: Sequence[str], host: str) -> None:
    """Raise UserError where a command can't be started here."""
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise UserError("-m names no module; write it after -m")
        if command[1] == "samestep" and (job := _job_file(command)) is not None and not Path(job).is_file():
            raise UserError(f"there is no job file {job} in {Path.cwd()} on {host}")
    elif first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f"there is no script {first} in {Path.cwd()} on {host}")
    elif shutil.which(first) is None:
        raise UserError(
            f"there is no program {first} on {host}; a script of Python's has a name that ends in .py, "
            "and a module stands behind -m"
        )


def _job_file(command: Sequence[str]) -> str | None:
    """The job file among the words of a command of samestep's."""
    return next((word for word in command if word.endswith((".yaml", ".yml")) and "=" not in word), None)
