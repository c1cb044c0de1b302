"""What ranks are started to tell of themselves."""

import os
import sys
from pathlib import Path


def colour_and_folder(start: str) -> tuple[str | None, str]:
    """Print a line to either stream; return a variable, and the folder that this rank works in."""
    for stream in (sys.stdout, sys.stderr):
        stream.write(f"{start} of rank {os.environ['RANK']}\n")  # at once, also where streams hold nothing back
        stream.flush()
    return os.environ.get("SAMESTEP_COLOUR"), str(Path.cwd())
