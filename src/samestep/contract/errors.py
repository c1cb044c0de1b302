"""What ends a check of a task: a part of the contract that is broken, or a model too large for one process.

An exception in the user's code is reported in one sentence with its line (`said`). A model that fits only into the
memory of many ranks can't be built in one process: `Budget` stops the attempt before memory runs out.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError, ended_by_code, place_of, shown
from samestep.launch.memory import available_memory
from samestep.sizes import binary_size
from samestep.torch_internals import pytree
from samestep.torch_internals.operators import TorchDispatchMode


class ContractError(UserError):
    """A part of the contract that a task breaks. `complete`: `text` is the whole message, as of a UserError."""

    def __init__(self, part: str, text: str, *, complete: bool = False) -> None:
        super().__init__(text if complete else f"the task's contract, {part}: {text}")
        self.part = part
        self.text = text


# A model with its gradients, once in float32 and once in float64, and the activations of a few samples.
_PART = 4

_SMALL = 2**16  # bytes; smaller storages aren't counted


class TooLargeError(Exception):
    """The model needs more memory than the check may use."""


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
        given = where if place is None or place not in str(error) else ""
        raise ContractError(part, str(error) + given, complete=True) from error
    except SystemExit as error:
        raise ContractError(part, ended_by_code(error, what)) from error
    except Exception as error:
        reason = " ".join(str(error).strip().partition("\n")[0].split()) or "no message"
        place = at(place_of(error))
        raise ContractError(part, f"{what} fails with {type(error).__name__}: {reason}{place}") from error


class Budget(TorchDispatchMode):
    """Raise TooLargeError as soon as the live tensors that were made in this mode exceed a memory budget.

    The error comes before memory runs out, since the system gives a process memory on first write. `most`: bytes;
    None: a quarter of the memory that this process can have.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self._most = available_memory() // _PART if most is None else most
        self._alive = 0
        self._known: set[int] = set()  # addresses of storages that still exist

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed; once, however many tensors share it."""
        size, place = storage.nbytes(), storage.data_ptr()
        if size < _SMALL or place in self._known:
            return
        self._known.add(place)
        self._alive += size
        weakref.finalize(storage, self._free, place, size)
        if self._most is not None and self._alive > self._most:
            raise TooLargeError(
                f"the model takes more than {binary_size(self._most)}, a quarter of the memory that one process "
                "can have here"
            )

    def _free(self, place: int, size: int) -> None:
        """Subtract a storage that was freed."""
        self._known.discard(place)
        self._alive -= size
