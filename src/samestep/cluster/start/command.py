"""What a rank runs: the user's script, module or program, wrapped in what sets a rank up."""

import shutil
import sys
from pathlib import Path

from samestep.cluster.start.part import Part
from samestep.errors import UserError


def rank_command(part: Part) -> tuple[str, ...]:
    """The program of each rank of a host, and its arguments. Raises UserError where it isn't there."""
    return program(part.command, part.host)


def program(command: tuple[str, ...], host: str) -> tuple[str, ...]:
    """A command as the system starts it: scripts and modules by this Python. Raises UserError."""
    first, *rest = command
    if first == "-m":
        if not rest:
            raise UserError("-m is given without a module; `samestep launch -- -m package.module` would do")
        return sys.executable, "-u", "-m", *rest
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f'there is no script "{first}" on {host} in {Path.cwd()}')
        return sys.executable, "-u", first, *rest
    found = shutil.which(first)
    if found is None:
        raise UserError(
            f'"{first}" on {host} is no program: a Python script has a name that ends in .py, '
            "a module is given as -m package.module"
        )
    return found, *rest
