"""Step work: FLOPs and memory traffic of the operators in one rank's step, counted while the step is taken.

Every operator passes PyTorch's dispatcher, where a mode sees its shapes. Matrix products are counted by their sizes,
attention and convolutions by FLOPs (convolutions by PyTorch's formulas), all others by the bytes that they read and
write. Views are not counted. Tensors need no values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from samestep.comm.observer import Observer, operands
from samestep.torch_internals.operators import arguments_by_name, schema

_COUNTED = frozenset({"aten", "prims", "fsdp"})
# FSDP2's copy into the all-gather buffer; its copies out of it, and of gradients into the reduce-scatter buffer, one
# per message of a unit, each with the argument that lists the unit's tensors.
_COPY_IN = "all_gather_copy_in"
_SHARD_COPIES: Mapping[str, str] = {"split_with_sizes_copy": "out", "chunk_cat": "tensors"}
# Positions of the two factors among the arguments.
_PRODUCTS: Mapping[str, tuple[int, int]] = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}

Sides = tuple[int, int, int, int]  # rows, columns, inner size, batch size


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a rank's operators in one step."""

    products: Mapping[Sides, int]  # number of matrix products by their sizes
    attention_flops: float  # of attention kernels
    other_flops: float  # of convolutions
    bytes: float  # read and written by other operators
    operators: int
    shard_messages: int = 0  # all-gathers and reduce-scatters of FSDP2's hooks, which run in Python
    shard_tensors: int = 0  # parameters and gradients in these messages

    @property
    def flops(self) -> float:
        """Multiplications and additions of all operators counted by FLOPs."""
        return self.product_flops + self.attention_flops + self.other_flops

    @property
    def product_flops(self) -> float:
        return sum(2.0 * m * n * k * count * times for (m, n, k, count), times in self.products.items())

    @property
    def product_elements(self) -> float:
        """Elements of the factors and results of matrix products."""
        return sum(float(m * k + k * n + m * n) * count * times for (m, n, k, count), times in self.products.items())

    def to_json(self) -> dict[str, Any]:
        return {"flops": self.flops, "bytes": self.bytes, "operators": self.operators}


@dataclass
class _Sums:
    products: Counter[Sides] = field(default_factory=Counter)
    attention_flops: float = 0.0
    other_flops: float = 0.0
    bytes: float = 0.0
    operators: int = 0
    shard_messages: int = 0
    shard_tensors: int = 0


class CountedWork(Observer):
    """Counts the work of the operators that run in its context."""

    def __init__(self) -> None:
        super().__init__()
        self._sums = _Sums()

    def found(self) -> StepWork:
        """The work counted so far."""
        sums = self._sums
        return StepWork(
            products=dict(sums.products),
            attention_flops=sums.attention_flops,
            other_flops=sums.other_flops,
            bytes=sums.bytes,
            operators=sums.operators,
            shard_messages=sums.shard_messages,
            shard_tensors=sums.shard_tensors,
        )

    def after(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if func.namespace in _COUNTED and not func.is_view:
            self._count(func, args, kwargs, result)

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count one operator: a matrix product by (rows, columns, inner, batch), others by FLOPs or bytes.

        FSDP2's copies around its collectives also give the number of its messages.
        """
        sums = self._sums
        sums.operators += 1
        name = schema(func).name.partition("::")[2].removesuffix("_")
        if name in _PRODUCTS:
            one, other = (args[place] for place in _PRODUCTS[name])
            batch = one.shape[0] if one.dim() == 3 else 1
            sums.products[int(one.shape[-2]), int(other.shape[-1]), int(one.shape[-1]), int(batch)] += 1
        elif "scaled_dot_product" in name:
            sums.attention_flops += _attention_flops(name, args)
        elif func.overloadpacket in flop_registry:
            sums.other_flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif name == _COPY_IN:
            sums.bytes += 2 * sum(map(_nbytes, operands(args[0])))
        else:
            sums.bytes += sum(map(_nbytes, operands(args, kwargs, result)))
            if func.namespace == "fsdp" and name in _SHARD_COPIES:
                sums.shard_messages += 1
                sums.shard_tensors += len(_argument(func, _SHARD_COPIES[name], args, kwargs))


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """An operator's argument by name; empty if it has none of that name."""
    return arguments_by_name(func, args, kwargs).get(name) or ()


def _attention_flops(name: str, args: Sequence[Any]) -> float:
    """FLOPs of an attention kernel: two products in the forward, five in the backward (arXiv 2205.14135)."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 4]
    backward = "backward" in name
    query, key = tensors[1:3] if backward else tensors[:2]
    batch, heads, tokens, dim = query.shape
    return (5 if backward else 2) * 2.0 * batch * heads * tokens * key.shape[2] * dim


def _nbytes(tensor: Tensor) -> float:
    return float(tensor.nbytes) if tensor.layout is torch.strided else 0.0
