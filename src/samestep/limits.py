"""The limits of numbers that users give, and their one reader from text and from Python.

A limit is far above what a training has used so far, and below what would only fill memory, start processes until
the machine stops, or compute for hours before anything is checked. `field_types` has them for the fields of a job,
`WholeNumber` for options of commands, `read_whole` for words in files and variables, `check_whole` for arguments of
functions.
"""

import argparse
from dataclasses import dataclass
from math import isqrt
from typing import Any

from samestep.errors import UserError

MOST = 10**9  # of what is counted and has no limit of its own: steps, samples, tokens
MOST_RANKS = 2**20  # of a job: ten times the devices of the largest cluster
MOST_RANKS_A_HOST = 1024
MOST_HOSTS = 2**16  # of a job
MOST_THREADS = 1024  # a process
MOST_WORKERS = 256  # processes that load data, a rank
MOST_RESTARTS = 10_000
MOST_REPEATS = 1000
MOST_WIDTH = 2**20  # of a layer or a convolution
MOST_LAYERS = 10_000
MOST_VOCABULARY = 10**7
MOST_LENGTH = 10**7  # tokens of a sample
MOST_SEED = 2**32 - 1
MOST_PORT = 65535
MOST_ID = 2**32 - 1  # of what others have numbered: jobs, steps, tasks
MOST_SECONDS = 366 * 24 * 3600.0
LEAST_SECONDS = 1e-3  # below it a limit would pass before a process could do anything
LEAST_PATIENCE = 0.1  # seconds; ranks publish where they are several times a second, and end within tenths of one
MOST_LR = 1e4
MOST_FACTOR = 1e9  # of other real numbers: norms, factors of a loss, differences of a metric
LEAST_REAL = 1.2e-38  # of what must be above 0: float32 has no smaller number with all its digits

_DIGITS = 40  # more than any limit has; Python needs minutes for a number of millions of digits


def read_whole(text: str) -> int | None:
    """Parse a whole number in decimal digits, with or without a sign; None for any other text."""
    digits = text.strip()
    plain = digits[1:] if digits[:1] in ("-", "+") else digits
    if not (plain.isascii() and plain.isdigit()) or len(plain) > _DIGITS:
        return None
    return int(digits)


def in_words(least: int, most: int) -> str:
    """The numbers that are allowed, for a message."""
    return f"a whole number from {least:,} to {most:,}"


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """Raise UserError for an argument of a function that is no whole number within its limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{name} is {_short(str(value))}; it must be {in_words(least, most)}")


def whole_of(text: str, name: str, least: int, most: int) -> int:
    """Parse the number of a variable, a line or a word of an option. Raises UserError that names it."""
    number = read_whole(text)
    if number is None or not least <= number <= most:
        raise UserError(f"{name} is {_short(repr(text))}; {in_words(least, most)} is wanted")
    return number


def divisors(number: int) -> list[int]:
    """The whole numbers that divide one, ascending, in the time of its square root."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


@dataclass(frozen=True, kw_only=True)
class WholeNumber:
    """The type of an option: a whole number within limits. argparse puts the option's name before its message."""

    least: int = 1
    most: int = MOST

    def __call__(self, text: str) -> int:
        number = read_whole(text)
        if number is None or not self.least <= number <= self.most:
            what = "is no whole number" if number is None else "is out of range"
            raise argparse.ArgumentTypeError(f'"{_short(text)}" {what}; use {in_words(self.least, self.most)}')
        return number


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
