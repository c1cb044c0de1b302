"""Sizes of messages as people write them. As in nccl-tests 1 KB is 1024 bytes."""

import re
from collections.abc import Sequence

from samestep.errors import UserError

# 1 KB to 256 MB by powers of 4.
USUAL = tuple(1024 * 4**power for power in range(10))

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE | re.ASCII)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of each size in a list such as "1KB,1MB", ascending, none twice. Raises UserError."""
    sizes = [_parse(word.strip()) for word in text.split(",")]
    return tuple(sorted(set(sizes)))


def _parse(word: str) -> int:
    match = _SIZE.fullmatch(word)
    if match is None:
        raise UserError(f'--sizes: "{word}" is no size; use a number of bytes, KB, MB or GB, such as 1KB,1MB')
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size != int(size) or size < 1:
        raise UserError(f'--sizes: "{word}" is {size:g} bytes; use a whole number of bytes, 1 or more')
    return int(size)


def size_in_words(size: float) -> str:
    """Bytes for people, such as 1 KB or 1.5 MB."""
    names = ["B", "KB", "MB", "GB", "TB"]
    power = 0
    while size >= 1024 and power < len(names) - 1:
        size, power = size / 1024, power + 1
    number = f"{size:.1f}".removesuffix(".0")
    return f"{number} {names[power]}"


def in_words(sizes: Sequence[int]) -> str:
    """The first and the last of sizes, and how many there are."""
    if len(sizes) == 1:
        return size_in_words(sizes[0])
    return f"{len(sizes)} sizes, {size_in_words(sizes[0])} to {size_in_words(sizes[-1])}"
