"""Slurm's way to write many host names as one: gpu[01-03,7]-x,host-b."""

import re
from itertools import product

from samestep.errors import UserError

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
_LARGEST = 100_000  # names in one range


def host_names(variable: str, text: str) -> list[str]:
    """The names that a list stands for, in order. Raises UserError with the variable and what is wrong in it."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):  # the commas outside of brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # plain, ranges, plain, ranges, plain
        plain, ranges = pieces[::2], pieces[1::2]
        if not part or any(_PLAIN.fullmatch(piece) is None for piece in plain):
            raise _wrong(variable, text, part)
        choices = [_numbers(variable, text, piece) for piece in ranges]
        for numbers in product(*choices):
            names.append("".join(word for pair in zip(plain, [*numbers, ""], strict=True) for word in pair))
    return names


def _numbers(variable: str, text: str, ranges: str) -> list[str]:
    """The numbers of what stands between brackets, as wide as they are written there."""
    found: list[str] = []
    for each in ranges.split(","):
        match = _RANGE.fullmatch(each)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _LARGEST:
            raise _wrong(variable, text, each)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(variable: str, text: str, part: str) -> UserError:
    return UserError(f'{variable} is {text!r}; "{part}" is no part of a list of hosts such as gpu[01-03,7],host-b')
