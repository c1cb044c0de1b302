"""Which parameters a loss depends on, found in autograd's graph before a backward sends anything."""

from typing import Any

import torch
from torch import Tensor

# What hides a part of the graph, which it makes in backward: reentrant checkpoints, PyTorch's and DeepSpeed's.
_HIDING = "CheckpointFunctionBackward"


def reached(loss: Tensor) -> set[int] | None:
    """The identities of the parameters that a loss depends on; None where its graph does not show them all."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind == _HIDING:
            return None
        if kind == "AccumulateGrad":
            found.add(id(node.variable))
        nodes.extend(before for before, _ in node.next_functions)
    return found


def digest(numbers: list[int]) -> Tensor:
    """Two whole numbers that are each other's negative: the largest of them over ranks differ where any rank's do."""
    value = hash(tuple(numbers)) & 0x7FFFFFFFFFFFFFFF
    return torch.tensor([value, -value])
