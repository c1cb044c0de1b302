"""Which modules can be sliced, and along which dimension of their weight."""

import sys
from typing import Any

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """A linear layer as PyTorch or transformers computes it; a subclass with a forward of its own is none."""
    return (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [in, out]."""
    # Only a model that transformers made has one, so there is nothing to import.
    kinds: Any = sys.modules.get("transformers.pytorch_utils")
    return kinds is not None and type(module) is kinds.Conv1D


def is_embedding(module: nn.Module) -> bool:
    """A table whose rows can be on different ranks, each with its own gradient."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def is_multihead(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def in_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[in_dim(linear)]


def out_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[out_dim(linear)]


def in_dim(linear: nn.Module) -> int:
    """The dimension of the weight along which inputs stand."""
    return 0 if is_conv1d(linear) else 1


def out_dim(linear: nn.Module) -> int:
    return 1 if is_conv1d(linear) else 0


def _weight_shape(linear: nn.Module) -> tuple[int, ...]:
    return tuple(linear.get_parameter("weight").shape)


def has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
