"""Sources of labelled texts by name, and readers of files by suffix: one line each."""

import importlib
from collections.abc import Callable
from typing import Any

from samestep.data.installed import locate
from samestep.data.texts import LabelledTexts
from samestep.errors import UserError, closest

# Called without arguments.
SOURCES = {
    "reviews": "samestep.data.reviews:read",
    "debian-packages": "samestep.data.packages:read",
}

# Called with the path.
READERS = {
    ".jsonl": "samestep.data.files:read_jsonl",
    ".csv": "samestep.data.files:read_csv",
}


def read(source: str, where: str) -> LabelledTexts:
    """Read a source: a name of the table, or a path. `where` is the key that names it, for messages.

    Raises UserError where there is no such source, or it can't be read.
    """
    if source in SOURCES:
        return _function(SOURCES[source])()
    path = locate(source, where)
    if path.suffix in READERS:
        return _function(READERS[path.suffix])(path)
    if path.exists():
        raise UserError(f"{where} is {source}; a file that ends in {' or '.join(READERS)} would do")
    raise UserError(f'{where} is "{source}"; {closest(source, SOURCES)}, or a path to a {" or ".join(READERS)} file')


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
