"""Whether a collective gives what its definition says: small messages of known integers, in each dtype."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.collectives import Collective, Values

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
CHUNK = 3  # elements; odd, so that nothing is split evenly by luck

WRONG = "a wrong result"

_LARGEST = 15  # exact in every dtype: float8_e4m3 has four significant bits


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def known_values(collective: Collective, n: int, chunk: int = CHUNK) -> Values:
    """Each rank's input integers, [ranks][elements], chosen so that they and their sums are exact in every dtype.

    For reductions, the inputs of ranks after the fifteenth are zeros, since larger sums would not be exact.
    """
    counts = [collective.elements(chunk, n, rank)[0] for rank in range(n)]
    if not collective.reduces:
        return [[(3 * rank + index) % (_LARGEST + 1) for index in range(count)] for rank, count in enumerate(counts)]
    largest = max(1, _LARGEST // n)
    return [
        [(3 * rank + index) % (largest + 1) if rank < _LARGEST else 0 for index in range(count)]
        for rank, count in enumerate(counts)
    ]


def attempt(collective: Collective, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> str | None:
    """Run a collective once. Returns None if this rank's result is correct, otherwise the difference or the error."""
    rank, n = group.rank(), group.size()
    try:
        values = known_values(collective, n)
        buffers = collective.buffers(CHUNK, n, rank, dtype=dtype, device=device)
        buffers.given.copy_(tensor_of(values[rank], dtype).to(device))
        collective.run(group, buffers)
        return difference(buffers.taken, collective.expected(values, rank))
    except Exception as error:  # of whatever kind the back end has
        return str(error).partition("\n")[0] or type(error).__name__


def agreed(own_reason: str | None, control: dist.ProcessGroup) -> str | None:
    """The failure of the first rank that has one, with its rank; None if no rank failed. Every rank asks."""
    reasons: list[str | None] = [None] * control.size()
    dist.all_gather_object(reasons, own_reason, group=control)
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), None)


def tensor_of(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64).to(dtype)


def difference(taken: Tensor, expected: Sequence[int] | None) -> str | None:
    """Describe the first element that differs from the expected one; None if none does or `expected` is None."""
    if expected is None:
        return None
    values: list[Any] = taken.to("cpu").to(torch.complex128 if taken.is_complex() else torch.float64).tolist()
    expected_values = tensor_of(expected, taken.dtype).to(
        torch.float64 if not taken.is_complex() else torch.complex128
    )
    for index, (have, want) in enumerate(zip(values, expected_values.tolist(), strict=True)):
        if have != want or (isinstance(have, float) and math.isnan(have)):
            return f"{WRONG}: element {index} is {have:g}, and {want:g} is right"
    return None
