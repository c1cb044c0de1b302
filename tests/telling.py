"""What ranks are started to tell of themselves."""

import os
import sys
from pathlib import Path


def colour_and_folder(start: str) -> tuple[str | None, str]:
    """Print a line to either stream; return a variable, and the folder that this rank works in."""
    for stream in (sys.stdout, sys.stderr):
        print(f"{start} of rank {os.environ['RANK']}", file=stream, flush=True)
    return os.environ.get("SAMESTEP_COLOUR"), str(Path.cwd())
