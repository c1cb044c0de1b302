"""Environment variables, read one way: `Variables` parses them, refuses what can't be meant, and notes what it read.

Everything that reads a variable is given a mapping of them; the process's own are in `environment`. A variable that a
job file names may hold a secret: `Expanded` and `without_values` keep what it holds out of messages and records.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

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


# A variable in a text of a job file.
NAMED = re.compile(r"\$\{([A-Za-z_][\w-]*)\}", re.ASCII)


class Expanded(str):
    """A text in which environment variables were expanded, with its original form, such as ${PASSWORD}.

    Messages, which show a value by its `repr`, and records of a run contain the original. To take it as a text, as
    `str` and f-strings do, gives what the variables hold.
    """

    written: str

    def __new__(cls, text: str, written: str = "") -> "Expanded":
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __repr__(self) -> str:
        return repr(self.written)


def expanded_in(value: Any) -> Iterator[Expanded]:
    """Each text in a value, or in its sections, lists and dataclasses, in which variables were expanded."""
    if isinstance(value, Expanded):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from expanded_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from expanded_in(getattr(value, field.name, None))


def held(values: Any, environ: Environ) -> dict[str, str]:
    """What each variable holds that stands in `values`, and each text around one, with how that was written."""
    forms: dict[str, str] = {}
    for text in expanded_in(values):
        forms |= {environ[name]: f"${{{name}}}" for name in NAMED.findall(text.written) if name in environ}
        forms.setdefault(str(text), text.written)
    return forms


# Shorter values are not looked for in messages: they are parts of other words, as 4 is of dp4.
_SHORTEST = 4
_WORDS = ("true", "false", "none", "null", "auto")
# Longer ones are found inside of words too.
_LONG = 8

_HELD: dict[
    str, str
] = {}  # texts in which variables were expanded, and what the variables hold: as they were written


def hide_from_messages(texts: Mapping[str, str]) -> None:
    """Set the texts that `without_values` replaces, each with what it becomes; those set before are forgotten."""
    _HELD.clear()
    _HELD.update({value: written for value, written in texts.items() if _may_be_hidden(value)})


def _may_be_hidden(value: str) -> bool:
    """Whether a value may be replaced in a message: not where it is a word or a number that messages have anyway."""
    return len(value) >= _SHORTEST and value.lower() not in _WORDS and not (value.isdigit() and len(value) < _LONG)


def without_values(message: str, texts: Mapping[str, str] = _HELD) -> str:
    """A message with ${NAME} in place of what the variables of the job file hold."""
    forms = {form: written for value, written in texts.items() for form in _forms(value)}
    if not forms:
        return message
    longest_first = sorted(forms, key=len, reverse=True)
    return re.sub("|".join(map(_as_pattern, longest_first)), lambda match: forms[match[0]], message)


def _forms(value: str) -> set[str]:
    """How a value may stand in a message: as Python, JSON or HTML write it, in one line, or a part of it alone."""
    quoted = (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False))
    lines = [line for line in value.splitlines() if len(line) >= _LONG]
    # Not words of a language, which messages have too.
    words = [word for word in value.split() if len(word) >= _SHORTEST and not word.isalpha()]
    forms = {value, value.strip(), html.escape(value), " ".join(value.split()), *lines, *words}
    with suppress(ValueError):  # no address
        forms.add(urlsplit(value).password or value)
    return {form for form in (*forms, *(text[1:-1] for text in quoted)) if form}


def _as_pattern(form: str) -> str:
    return re.escape(form) if len(form) >= _LONG else rf"(?<!\w){re.escape(form)}(?!\w)"
