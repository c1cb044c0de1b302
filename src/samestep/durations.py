"""Times that users write, in job files and on command lines: seconds as a number, or a text such as 90s, 10m or 1h.

All are from a millisecond to a year: a limit without end is written as null, where a setting can have one. `seconds`
is the type of a command's option, and `add_time_limit` declares the option that several commands have.
"""

import argparse
import math
import re

from samestep.errors import UserError
from samestep.limits import LEAST_SECONDS, MOST_SECONDS

EXAMPLES = "a time such as 90s, 10m or 1h"

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
# As Python writes numbers, without a sign; then the unit.
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_DURATION = re.compile(rf"({_NUMBER})\s*([smh]?)", re.ASCII)
# The same for the schema of job files.
PATTERN = rf"^\s*{_NUMBER}\s*[smh]?\s*$"
PATTERN_WITH_UNIT = rf"^\s*{_NUMBER}\s*[smh]\s*$"


def wanted(least: float = LEAST_SECONDS) -> str:
    """What a message asks for in place of a wrong time."""
    shortest = f"{least * 1000:g} ms" if least < 1 else duration_text(least)
    return f"seconds above 0, or {EXAMPLES}, from {shortest} to {MOST_SECONDS / 86400:.0f} days"


def parse_duration(duration: str | float, least: float = LEAST_SECONDS) -> float | None:
    """The seconds of a number or a text such as 90, 90s, 1.5m or 2h; None if it is none within the limits."""
    if isinstance(duration, str):
        match = _DURATION.fullmatch(duration.strip())
        if match is None:
            return None
        seconds = float(match[1]) * _UNITS[match[2]]
    else:
        try:
            seconds = float(duration)
        except OverflowError:  # a whole number of hundreds of digits
            return None
    return seconds if least <= seconds <= MOST_SECONDS else None


def has_unit(text: str) -> bool:
    """Whether a time says its unit, where a number alone would be something else, such as steps."""
    return text.strip()[-1:].isalpha()


def duration_text(seconds: float) -> str:
    """Seconds as they are written on the command line, such as 30s or 5m."""
    return f"{seconds / 60:g}m" if seconds % 60 == 0 else f"{seconds:g}s"


def check_seconds(**limits: float) -> None:
    """Raise UserError for an argument of a function outside of the limits; infinity is no limit."""
    for name, seconds in limits.items():
        if not LEAST_SECONDS <= seconds <= MOST_SECONDS and seconds != math.inf:
            raise UserError(
                f"{name} is {seconds:g}; use a number of seconds above 0, {LEAST_SECONDS:g} to {MOST_SECONDS:.0f}"
            )


def seconds(text: str) -> float:
    """The seconds of an option's value; argparse puts the option's name before the message."""
    parsed = parse_duration(text)
    if parsed is None:
        raise argparse.ArgumentTypeError(f'"{text}" is no time; use {wanted()}')
    return parsed


def add_time_limit(to: "argparse._ActionsContainer", of: str, default: float, *, kept: bool = True) -> None:
    """Add `--time-limit`; `of` says what it limits.

    `kept`: the default is the option's value. Without, the value is None where the user gave none, for a command
    that refuses the option beside some others.
    """
    to.add_argument(
        "--time-limit",
        type=seconds,
        default=default if kept else None,
        metavar="TIME",
        help=f"of {of} (default: {duration_text(default)})",
    )
