"""Numbers of bytes as text, and back: in units of 1,000 (kB, MB, GB) or of 1,024 (KiB, MiB, GiB).

Files, a model's tensors and what goes over networks are shown in units of 1,000. Memory of a machine and sizes that
are powers of two, such as the messages that `samestep comm` times, are shown in units of 1,024.
"""

import re
from typing import Literal

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMG])(I?))?B?", re.IGNORECASE | re.ASCII)
_LARGEST = 2.0**50
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3}


def decimal_size(count: float) -> str:
    """Format a number of bytes with three digits: 1,230,000 are 1.23 MB."""
    power = 0
    while count >= 999.5 and power < len(_DECIMAL) - 1:  # three digits of 999.5 are those of 1,000
        count, power = count / 1000, power + 1
    return f"{count:.3g} {_DECIMAL[power]}" if power else f"{count:.0f} B"


def binary_size(count: float) -> str:
    """Format a number of bytes with one decimal, if it isn't zero: 1,572,864 are 1.5 MiB."""
    power = 0
    while count >= 1023.95 and power < len(_BINARY) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f}".removesuffix(".0") + f" {_BINARY[power]}"


def parse_size(text: str, *, kilo: Literal[1000, 1024]) -> float | None:
    """Parse a size such as 4MB or 1.5 KiB to bytes; None for any other text, and for a million GiB or more.

    `kilo`: the bytes of a KB, of which MB and GB are powers. A KiB always has 1,024.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, letter, binary = match.groups()
    size = float(number) * (1024 if binary else kilo) ** _POWERS[(letter or "").upper()]
    return size if size < _LARGEST else None
