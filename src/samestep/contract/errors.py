"""What ends a check of a task: a part of the contract that is broken, or a model too large for one process.

An exception in the user's code is reported in one sentence with its line (`said`).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samestep.errors import UserError, ended_by_code, place_of, shown
from samestep.tasks.memory_budget import TooLargeError


class ContractError(UserError):
    """A part of the contract that a task breaks. `complete`: `text` is the whole message, as of a UserError."""

    def __init__(self, part: str, text: str, *, complete: bool = False) -> None:
        super().__init__(text if complete else f"the task's contract, {part}: {text}")
        self.part = part
        self.text = text


def line_of(function: Any) -> str:
    """Where a function or class is defined: " (model.py:31)"; nothing where it has no source."""
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    # A decorator stands above the definition, which is what a reader looks for.
    first += next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class ", "async "))), 0)
    return f" ({shown(Path(inspect.getsourcefile(inspect.unwrap(function)) or '?'))}:{first})"


def at(place: str | None) -> str:
    """Format a place "file:line" as the end of a message: " (model.py:31)"; empty if unknown."""
    if place is None:
        return ""
    file, _, line = place.rpartition(":")
    return f" ({shown(Path(file))}:{line})"


@contextmanager
def said(part: str, what: str, of: Any = None) -> Iterator[None]:
    """Convert an exception of the user's code into a ContractError of one sentence.

    `what` names what failed; `of` is the function whose line is named if the error has no line in the user's code.
    Running out of memory is not the task's fault, and becomes TooLargeError.
    """
    try:
        yield
    except (ContractError, TooLargeError):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise TooLargeError(f"{what} of the whole model takes more memory than one process can have here") from error
    except UserError as error:
        place = place_of(error)
        where = at(place) if place is not None or of is None else line_of(of)
        location = where if place is None or place not in str(error) else ""
        raise ContractError(part, str(error) + location, complete=True) from error
    except SystemExit as error:
        raise ContractError(part, ended_by_code(error, what)) from error
    except Exception as error:
        reason = " ".join(str(error).strip().partition("\n")[0].split()) or "no message"
        place = at(place_of(error))
        raise ContractError(part, f"{what} fails with {type(error).__name__}: {reason}{place}") from error
