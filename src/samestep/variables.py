"""Environment variables, read one way: `Variables` parses them, refuses what can't be meant, and notes what it read.

Everything that reads a variable is given a mapping of them; the process's own are in `environment`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from samestep.errors import UserError
from samestep.limits import MOST_ID, in_words, read_whole

Environ = Mapping[str, str]
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class Read:
    """A variable or line that was read, for display."""

    source: str  # the variable, or the file and its line
    value: str


class Variables:
    """Reads environment variables, and records each that is set, for display.

    An empty one counts as not set; where it is required, the message says that it is empty.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._read: dict[str, str] = {}

    def read(self) -> tuple[Read, ...]:
        return tuple(Read(source=name, value=value) for name, value in self._read.items())

    def text(self, name: str) -> str | None:
        """Return a variable's value; None if unset or empty."""
        value = self._environ.get(name, "").strip()
        if not value:
            return None
        self._read[name] = value
        return value

    def first(self, *names: str) -> str | None:
        """Return the value of the first of these variables that is set."""
        return next((value for name in names if (value := self.text(name)) is not None), None)

    def wanted(self, name: str, what: str) -> str:
        """Return the value of a required variable. Raises UserError if it is unset."""
        value = self.text(name)
        if value is None:
            raise UserError(f"{name} is {'empty' if name in self._environ else 'not set'}; it must hold {what}")
        return value

    def number(self, name: str, least: int = 0, most: int = MOST_ID) -> int | None:
        """Return an integer from `least` to `most`; None if the variable is unset."""
        text = self.text(name)
        if text is None:
            return None
        number = read_whole(text) if text.isdigit() else None  # without a sign
        if number is None or number < least:
            raise UserError(f"{name} is {text[:60]!r}; a whole number of {least} or more is wanted")
        if number > most:
            raise UserError(f"{name} is {text!r}; {in_words(least, most)} is wanted")
        return number

    def needed(self, name: str, least: int = 0, most: int = MOST_ID) -> int:
        """Return a required integer. Raises UserError if it is unset, no integer, or out of its limits."""
        self.wanted(name, f"a whole number of {least} or more")
        number = self.number(name, least, most)
        assert number is not None
        return number

    def json(self, name: str, kind: type[_Kind], what: str) -> _Kind | None:
        """Parse a variable as JSON, a list or a mapping; None if unset."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{name} is {text[:200]!r}, which is not JSON: {error.msg}; {what} is wanted") from None
        except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
            raise UserError(f"{name} is {text[:60]!r}..., which can't be read as JSON; {what} is wanted") from None
        if not isinstance(value, kind):
            raise UserError(f"{name} is {text[:200]!r}; {what} is wanted")
        return value


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """Accelerators that a variable makes visible to this process, as numbers or ids."""

    variable: str
    devices: tuple[str, ...]


# Of NVIDIA's, AMD's, Intel's and Huawei's accelerators.
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)

_NO_DEVICE = ("-1", "NoDevFiles")  # the second is what some versions of Slurm set for a task without accelerators


def visible_devices(environ: Mapping[str, str]) -> VisibleDevices | None:
    """Which accelerators a variable chooses for this process; None where none does. An empty one chooses none."""
    name = next((name for name in DEVICE_VARIABLES if name in environ), None)
    if name is None:
        return None
    devices = tuple(device.strip() for device in environ[name].split(",") if device.strip())
    # Vendors' libraries stop at the first invalid entry.
    end = next((index for index, device in enumerate(devices) if device in _NO_DEVICE), len(devices))
    return VisibleDevices(variable=name, devices=devices[:end])
