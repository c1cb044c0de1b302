"""Where samestep keeps files that it can make again."""

import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/samestep`, or `~/.cache/samestep`; it may not be there yet."""
    if home := environ.get("XDG_CACHE_HOME"):
        return Path(home) / "samestep"
    return Path(environ.get("HOME", tempfile.gettempdir())) / ".cache" / "samestep"
