"""Which samples are held out, and which ones are left by a limit: by a hash of a sample's own content alone.

So neither depends on the order of the file or on the process, adding samples moves none of the others, and
copies of a sample never stand on both sides.
"""

import hashlib
from collections.abc import Sequence

from samestep.errors import UserError

_SCALE = 2**64


def split(contents: Sequence[str | bytes], held_out: float) -> tuple[list[int], list[int]]:
    """Indices of the samples (texts, or the bytes of anything else) to train on, and of those held out."""
    train: list[int] = []
    held: list[int] = []
    for index, content in enumerate(contents):
        (held if _draw(content, "held out") < held_out * _SCALE else train).append(index)
    return train, held


def limited(contents: Sequence[str | bytes], limit: int | None) -> list[int]:
    """Indices of at most `limit` samples, in their order."""
    if limit is None or limit >= len(contents):
        return list(range(len(contents)))
    # A draw of its own: with that of the split, the first to be kept would be those that are held out.
    return sorted(sorted(range(len(contents)), key=lambda index: _draw(contents[index], "limit"))[:limit])


def check_split(train: int, held: int, held_out: float, where: str) -> None:
    """Raise UserError where one side of a split is empty. `where` is the key of the fraction."""
    if train and held:
        return
    side, change = ("training", "smaller") if not train else ("held-out", "larger")
    raise UserError(
        f"{where} is {held_out}: it leaves no {side} samples of {train + held}; use "
        f"a {change} fraction, or an eval_source"
    )


def _draw(content: str | bytes, purpose: str) -> int:
    """Return a hash of the content as a number below 2**64."""
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(purpose.encode() + b"\0" + raw).digest()[:8], "big")
