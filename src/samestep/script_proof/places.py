"""The line of the user's files that is being run."""

import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

from samestep.errors import shown

_OURS = str(Path(__file__).resolve().parent.parent)


@cache
def _installed() -> tuple[str, ...]:
    """The folders of Python and of installed packages."""
    paths = sysconfig.get_paths()
    return (_OURS, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages())


def script_line() -> tuple[str, int] | None:
    """File and line of the innermost call that is of no installed package; None where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_installed())) and Path(file).is_file():
            return shown(Path(file).resolve()), frame.f_lineno
        frame = frame.f_back
    return None
