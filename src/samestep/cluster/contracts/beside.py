"""A helper process beside a rank: it ends when the rank has ended, whatever the rank has become meanwhile."""

import os
import subprocess
import sys

from samestep.errors import UserError


def start_beside(module: str, *arguments: str) -> int:
    """Start a module that prints the port on which it serves, and then reads its standard input to the end.

    Returns the port. Raises UserError where none is printed.
    """
    helper = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    # The helper reads until nobody holds this end any more. It is open in the script too, and in nothing that
    # Python's subprocess starts from there.
    os.set_inheritable(helper.stdin.fileno(), True)
    line = helper.stdout.readline()
    if not line.strip().isdecimal():
        raise UserError(f"{module} {arguments[0]} did not start; its reason stands above")
    return int(line)
