"""Which texts are held out, and which ones are left by a limit: by a hash of the text alone.

So neither depends on the order of the file or on the process, adding texts moves none of the others, and
copies of a text never stand on both sides.
"""

import hashlib
from collections.abc import Sequence

from samestep.errors import UserError

_SCALE = 2**64


def split(texts: Sequence[str], held_out: float) -> tuple[list[int], list[int]]:
    """Indices of the texts to train on, and of those held out."""
    train: list[int] = []
    held: list[int] = []
    for index, text in enumerate(texts):
        (held if _draw(text, "held out") < held_out * _SCALE else train).append(index)
    return train, held


def limited(texts: Sequence[str], limit: int | None) -> list[int]:
    """Indices of at most `limit` texts, in their order."""
    if limit is None or limit >= len(texts):
        return list(range(len(texts)))
    # A draw of its own: with that of the split, the first to be kept would be those that are held out.
    return sorted(sorted(range(len(texts)), key=lambda index: _draw(texts[index], "limit"))[:limit])


def check_split(train: int, held: int, held_out: float, where: str) -> None:
    """Raise UserError where one side of a split is empty. `where` is the key of the fraction."""
    if train and held:
        return
    side, change = ("training", "smaller") if not train else ("held-out", "larger")
    raise UserError(
        f"{where} is {held_out}: it leaves no {side} samples of {train + held}; "
        f"a {change} fraction, or an eval_source, would do"
    )


def _draw(text: str, purpose: str) -> int:
    """A number below 2**64 that is the text's own."""
    return int.from_bytes(hashlib.sha256(f"{purpose}\0{text}".encode()).digest()[:8], "big")
