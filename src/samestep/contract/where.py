"""Where something stands in the user's code, as messages name it, and what is said of an exception from there."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samestep.contract.budget import TooLargeError
from samestep.errors import UserError, place_of, shown


class ContractError(UserError):
    """A part of the contract that a task breaks. `told`: the text is whole, as a UserError from elsewhere has it."""

    def __init__(self, part: str, text: str, *, told: bool = False) -> None:
        super().__init__(text if told else f"the task's contract, {part}: {text}")
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
    """A place "file:line" as the end of a message: " (model.py:31)"; nothing where it is not known."""
    if place is None:
        return ""
    file, _, line = place.rpartition(":")
    return f" ({shown(Path(file))}:{line})"


@contextmanager
def said(part: str, what: str, of: Any = None) -> Iterator[None]:
    """Say what an exception of the user's code is in one sentence. Lack of memory is not the task's fault.

    `of` is the function whose line is named where the error comes from what it gave, not from its own code.
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
        given = where if place is None or place not in str(error) else ""
        raise ContractError(part, str(error) + given, told=True) from error
    except Exception as error:
        reason = " ".join(str(error).strip().partition("\n")[0].split()) or "no message"
        place = at(place_of(error))
        raise ContractError(part, f"{what} fails with {type(error).__name__}: {reason}{place}") from error
