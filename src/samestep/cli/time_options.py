"""Options of all commands whose value is a time, `--time-limit` among them."""

import argparse

from samestep.durations import WANTED, duration_text, parse_duration


def seconds(text: str) -> float:
    """The seconds of an option's value; argparse puts the option's name before the message."""
    found = parse_duration(text)
    if found is None:
        raise argparse.ArgumentTypeError(f'"{text}" is no time; use {WANTED}')
    return found


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
