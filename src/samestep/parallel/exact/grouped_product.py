"""The product of groups of rows with a matrix each, as mixtures of experts take it, in any dtype.

PyTorch's own, `torch.nn.functional.grouped_mm`, has float32, float16 and bfloat16 only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.torch_internals.fakes import FakeTensor
from samestep.torch_internals.operators import grouped_mm


def grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What `grouped_mm` gives. Group g ends before index `offs[g]` of the dimension that is grouped.

    a [rows, k], b [groups, k, n]: rows are grouped, the result is [rows, n]; zeros in rows of no group.
    a [groups, m, k], b [k, columns]: columns are grouped, the result is [m, columns].
    a [m, k], b [k, n]: k is grouped, the result is [groups, m, n].
    a [groups, m, k], b [groups, k, n], without `offs`: a product for each group.
    """
    if bias is not None or (offs is None) != (a.ndim == 3 and b.ndim == 3):
        raise NotImplementedError("grouped_mm takes no bias, and offs for all but two batches of matrices")
    if offs is None:
        product = a @ b
    elif isinstance(offs, FakeTensor):
        product = _without_values(a, b, offs)
    elif b.ndim == 3:
        product = _by_rows(a, b, offs)
    elif a.ndim == 3:
        product = _by_rows(b.t(), a.transpose(1, 2), offs).t()
    else:
        product = torch.stack([a[:, first:last] @ b[first:last] for first, last in _ranges(offs)])
    return product if out_dtype is None else product.to(out_dtype)


def _by_rows(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """[rows, k] and [groups, k, n] -> [rows, n]: one product a group of consecutive rows."""
    ranges = _ranges(offs)
    parts = [rows[first:last] @ matrix for (first, last), matrix in zip(ranges, matrices, strict=True)]
    of_no_group = rows.new_zeros(rows.shape[0] - ranges[-1][1], matrices.shape[-1])
    return torch.cat([*parts, of_no_group])


def _ranges(offs: Tensor) -> list[tuple[int, int]]:
    """Convert the end of each group to (first, one past the last)."""
    ends: list[int] = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _without_values(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """A result of the right shape for tensors without values, with the same dependencies and FLOPs."""
    if a.ndim == 2 and b.ndim == 2:
        return (a @ b).expand(offs.shape[0], -1, -1)
    return a @ b.sum(0) if b.ndim == 3 else a.sum(0) @ b


def call_followed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Call a function on tensors without values, as PyTorch supports its grouped product on them in bfloat16 only."""
    return (grouped_product if func is grouped_mm else func)(*args, **(kwargs or {}))


class Followed(TorchFunctionMode):
    """A mode that applies `call_followed` to all calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call_followed(func, args, kwargs)
