"""Random numbers by counter: a number is a function of its key and its position alone, the same on every device.

Keys are split as in SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators",
figure 16): child i of key k is mix(k + (i + 1) * golden). The numbers of a row are 32 bits wide, which is what
makes them cheap: the position in the row goes through a mixer of two multiplications (the shape of MurmurHash3's
finaliser, with the constants of Wellons' "lowbias32"), with half of the row's key added at either multiplication.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int, bits: int) -> int:
    """An unsigned number as the signed one of the same bits, which is what PyTorch computes with."""
    return value - (1 << bits) if value >> (bits - 1) else value


_FIRST_64, _SECOND_64 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_FIRST_32, _SECOND_32 = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


def key_of(*parts: int | str) -> int:
    """Hash names and numbers into a 64-bit key."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"), 64)


def split(keys: Tensor | int, positions: Tensor | int) -> Tensor:
    """The child keys of int64 keys at int64 positions; both are broadcast, and one of them may be a Python int.

    A Python int needs no copy to an accelerator.
    """
    if isinstance(positions, int):
        assert isinstance(keys, Tensor)
        mixed = keys + _signed((positions + 1) * _GOLDEN % (1 << 64), 64)
    else:
        mixed = keys + (positions + 1) * _signed(_GOLDEN, 64)
    mixed ^= (mixed >> 30).bitwise_and_((1 << 34) - 1)  # >> copies the sign; a logical shift brings in zeros
    mixed *= _FIRST_64
    mixed ^= (mixed >> 27).bitwise_and_((1 << 37) - 1)
    mixed *= _SECOND_64
    mixed ^= (mixed >> 31).bitwise_and_((1 << 33) - 1)
    return mixed


def columns(positions: Tensor) -> Tensor:
    """Hash int64 positions in a row to the 32-bit numbers that `draw` takes."""
    # The lower half of each 64-bit number, on a little-endian machine.
    return split(torch.zeros_like(positions), positions).view(torch.int32)[::2]


def draw(keys: Tensor, outer: Sequence[Tensor], row: Tensor) -> Tensor:
    """Uniform int32 numbers, [samples, *lengths], of keys [samples] and positions in each further dimension.

    `outer` holds the int64 positions of all but the last dimension, `row` the `columns` of that one. An element's
    number depends on its sample's key and its own positions, and on no length: a sample that is padded further
    keeps the numbers that it had.

    With K = split(key of the sample, outer positions) as two 32-bit halves (a, b), and c the number of the column:

        x = a ^ c;  x ^= x >> 16;  x *= M1;  x ^= b;  x ^= x >> 15;  x *= M2;  x ^= x >> 16

    Shifts are logical: PyTorch's are arithmetic on int32, so the bits that come from the sign are masked away.
    """
    rows = keys
    for positions in outer:
        rows = split(rows.unsqueeze(-1), positions)
    halves = rows.contiguous().view(torch.int32).view(*rows.shape, 2)
    numbers = halves[..., :1] ^ row  # [samples, ..., length of the last dimension]
    numbers ^= (numbers >> 16).bitwise_and_(0xFFFF)
    numbers *= _FIRST_32
    numbers ^= halves[..., 1:]
    numbers ^= (numbers >> 15).bitwise_and_(0x1FFFF)
    numbers *= _SECOND_32
    numbers ^= (numbers >> 16).bitwise_and_(0xFFFF)
    return numbers


def threshold(probability: float) -> int:
    """The int32 below which this fraction of uniform int32 numbers lies."""
    return min(round(probability * 2**32), 2**32 - 1) - 2**31
