"""Which modules can be sliced, and along which dimension of their weight."""

import sys
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from samestep.parallel.low_rank import Adapted, adapted, base_of


def is_linear(module: nn.Module) -> bool:
    """A linear layer as PyTorch or transformers computes it, perhaps with low-rank adapters.

    A subclass with a forward of its own is none.
    """
    if adapted(module) is not None:
        return True
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return (plain or is_conv1d(module)) and _holds(module, "weight", "bias")


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [in, out]."""
    # Only a model that transformers made has one, so there is nothing to import.
    kinds: Any = sys.modules.get("transformers.pytorch_utils")
    return kinds is not None and isinstance(module, kinds.Conv1D)


def is_embedding(module: nn.Module) -> bool:
    """A table whose rows can be on different ranks, each with its own gradient."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and _holds(module, "weight")
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def is_multihead(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and _holds(module, "in_proj_weight", "in_proj_bias", "q_proj_weight")
        and _holds(module.out_proj, "weight", "bias")
    )


def _holds(module: nn.Module, *names: str) -> bool:
    """Whether a module's weights are parameters of its own (or None), not computed from others before each use."""
    return all(name in module._parameters for name in names) and not is_parametrized(module)


def computes_weight(module: nn.Module) -> bool:
    """Whether a linear layer or a table computes its weight from other parameters before each use."""
    return isinstance(module, (nn.Linear, nn.Embedding)) and not _holds(module, "weight")


def gathered_dims(module: nn.Module) -> dict[str, int] | None:
    """Of a layer whose outputs can be computed in slices: each parameter's name, and the dimension of its outputs.

    Of a parametrized layer (weight_norm) the originals, where each has a row an output: whether its weight is
    computed row by row is for a look at the output to tell. None for any other module.
    """
    if (layer := adapted(module)) is not None:
        return None if is_conv1d(base_of(module)) else _dims_of_adapted(module, layer)
    if isinstance(module, _TRANSPOSED):
        plain, dim = _is_plain(module, _TRANSPOSED), 1
    else:
        plain, dim = _is_plain(module, (nn.Linear, *_CONVOLUTIONS)), 0
    if not plain or getattr(module, "groups", 1) != 1:
        return None
    outputs = outputs_of(module)
    dims = {name: dim if name == "weight" else 0 for name, _ in module.named_parameters()}
    fits = all(
        not parameter.is_complex() and parameter.ndim > dims[name] and parameter.shape[dims[name]] == outputs
        for name, parameter in module.named_parameters()
    )
    return dims if fits and dims else None


def _dims_of_adapted(module: nn.Module, layer: Adapted) -> dict[str, int]:
    """The same of a linear layer with adapters, each rank's slice of which takes all of `down`."""
    own = (name for name, _ in base_of(module).named_parameters(recurse=False))
    return {".".join(filter(None, (layer.base, name))): 0 for name in own} | {
        f"{each.up}.weight": 0 for each in layer.updates
    }


def computes_own_weight(module: nn.Module) -> bool:
    """Whether a layer's weight is computed from other parameters of it, as weight_norm and spectral_norm do."""
    return adapted(module) is None and any(name not in ("weight", "bias") for name, _ in module.named_parameters())


def outputs_of(module: nn.Module) -> int:
    """The output features of a linear layer, or the output channels of a convolution."""
    return getattr(module, "out_features", None) or module.out_channels  # pyright: ignore


def outputs_dim(module: nn.Module) -> int:
    """The dimension of the outputs in what such a layer gives, from the end: convolutions have places behind it."""
    return -1 - len(getattr(module, "kernel_size", ()))


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def in_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[in_dim(linear)]


def out_features(linear: nn.Module) -> int:
    return _weight_shape(linear)[out_dim(linear)]


def in_dim(linear: nn.Module) -> int:
    """The dimension of the weight along which inputs stand."""
    return 0 if is_conv1d(base_of(linear)) else 1


def out_dim(linear: nn.Module) -> int:
    return 1 if is_conv1d(base_of(linear)) else 0


def _weight_shape(linear: nn.Module) -> tuple[int, ...]:
    return tuple(base_of(linear).get_parameter("weight").shape)


def has_own_parameters(module: nn.Module) -> bool:
    """Whether a module computes with parameters itself; those of a parametrized one stand in a module in it."""
    return (
        is_parametrized(module) or adapted(module) is not None or any(True for _ in module.parameters(recurse=False))
    )
