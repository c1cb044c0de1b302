"""The Keras counterpart of each PyTorch module and function that a model may be made of: one line a kind.

PyTorch keeps the channels of an image in front, [batch, channels, height, width]; TensorFlow computes on a CPU
with channels last only. Every tensor of four dimensions is kept as [batch, height, width, channels] here, and
flattened in PyTorch's order.

Layouts: PyTorch has images as [samples, channels, height, width], TensorFlow on a CPU as [samples, height, width,
channels]. A weight's `axes` say how its dimensions are permuted from PyTorch's to Keras's.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from samestep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The modules and the dtype with which counterparts are made."""

    tf: Any
    keras: Any
    dtype: str

    @property
    def layers(self) -> Any:
        return self.keras.layers

    def apply(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Apply a layer without weights that calls a TensorFlow function."""
        return self.layers.Lambda(lambda input_: function(*input_), dtype=self.dtype)(list(tensors))


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of a module, and the Keras variable that holds its values."""

    name: str
    variable: Any
    axes: tuple[int, ...] | None = None  # the parameter's dimensions in the variable's order; None: the same


# From a module and a Keras tensor to the Keras tensor that comes out, and the weights that were made for it.
Counterpart = Callable[[Tools, Any, Any], tuple[Any, Sequence[Weight]]]


def is_image(tensor: Any) -> bool:
    return len(tensor.shape) == 4


def channels_first(tools: Tools, tensor: Any) -> Any:
    """Permute an image to PyTorch's channels-first layout; anything else is returned as it is."""
    return tools.layers.Permute((3, 1, 2), dtype=tools.dtype)(tensor) if is_image(tensor) else tensor


def channels_last(tools: Tools, tensor: Any) -> Any:
    return tools.layers.Permute((2, 3, 1), dtype=tools.dtype)(tensor) if is_image(tensor) else tensor


def _refuse(module: nn.Module, why: str) -> UserError:
    return UserError(f"{module} has no Keras counterpart: {why}")


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _linear(tools: Tools, module: nn.Linear, input_: Any) -> tuple[Any, Sequence[Weight]]:
    """Dense: its kernel is [in, out], PyTorch's weight [out, in]."""
    if is_image(input_):
        raise _refuse(module, "it would slice images along their width; flatten them first")
    layer = tools.layers.Dense(module.out_features, use_bias=module.bias is not None, dtype=tools.dtype)
    output = layer(input_)
    return output, [Weight(name="weight", variable=layer.kernel, axes=(1, 0)), *_bias(module, layer)]


def _bias(module: Any, layer: Any) -> list[Weight]:
    return [] if module.bias is None else [Weight(name="bias", variable=layer.bias)]


def _conv(tools: Tools, module: nn.Conv2d, input_: Any) -> tuple[Any, Sequence[Weight]]:
    """Conv2D: its kernel is [height, width, in, out], PyTorch's weight [out, in, height, width]."""
    if module.groups != 1 or module.padding_mode != "zeros":
        raise _refuse(module, "TensorFlow's convolution has neither groups nor this padding on a CPU")
    if max(module.stride) > 1 and max(module.dilation) > 1:
        raise _refuse(module, "Keras's takes a stride or a dilation above 1, not both")
    if isinstance(module.padding, str):
        padding = module.padding
    else:
        # Keras's "same" pads unevenly where a stride is above 1, so zeros are put around the image beforehand.
        padding = "valid"
        if any(module.padding):
            input_ = tools.layers.ZeroPadding2D(_pair(module.padding), dtype=tools.dtype)(input_)
    layer = tools.layers.Conv2D(
        module.out_channels,
        module.kernel_size,
        strides=module.stride,
        padding=padding,
        dilation_rate=module.dilation,
        use_bias=module.bias is not None,
        dtype=tools.dtype,
    )
    output = layer(input_)
    return output, [Weight(name="weight", variable=layer.kernel, axes=(2, 3, 1, 0)), *_bias(module, layer)]


def _norm_weights(module: Any, layer: Any) -> list[Weight]:
    """Scale and shift of a norm: gamma and beta in Keras."""
    if module.weight is None:
        return []
    return [Weight(name="weight", variable=layer.gamma), *([] if module.bias is None else [_beta(layer)])]


def _beta(layer: Any) -> Weight:
    return Weight(name="bias", variable=layer.beta)


def _group_norm(tools: Tools, module: nn.GroupNorm, input_: Any) -> tuple[Any, Sequence[Weight]]:
    layer = tools.layers.GroupNormalization(
        module.num_groups, epsilon=module.eps, center=module.affine, scale=module.affine, dtype=tools.dtype
    )
    output = layer(input_)
    return output, _norm_weights(module, layer)


def _layer_norm(tools: Tools, module: nn.LayerNorm, input_: Any) -> tuple[Any, Sequence[Weight]]:
    if is_image(input_):
        raise _refuse(module, "it would average over other dimensions of an image; use group norm")
    last = list(range(-len(module.normalized_shape), 0))
    layer = tools.layers.LayerNormalization(
        axis=last,
        epsilon=module.eps,
        scale=module.weight is not None,
        center=module.bias is not None,
        dtype=tools.dtype,
    )
    output = layer(input_)
    return output, _norm_weights(module, layer)


def _max_pool(tools: Tools, module: nn.MaxPool2d, input_: Any) -> tuple[Any, Sequence[Weight]]:
    """Padding by the smallest number of the dtype, which no maximum takes."""
    if module.ceil_mode or _pair(module.dilation) != (1, 1) or module.return_indices:
        raise _refuse(module, "Keras's has neither ceil_mode nor dilation nor return_indices")
    height, width = _pair(module.padding)
    if height or width:
        around = [[0, 0], [height, height], [width, width], [0, 0]]
        input_ = tools.apply(lambda image: tools.tf.pad(image, around, constant_values=image.dtype.min), input_)
    size, strides = _pair(module.kernel_size), _pair(module.stride)
    return tools.layers.MaxPooling2D(size, strides=strides, dtype=tools.dtype)(input_), []


def _average_pool(tools: Tools, module: nn.AvgPool2d, input_: Any) -> tuple[Any, Sequence[Weight]]:
    if module.ceil_mode or any(_pair(module.padding)) or module.divisor_override is not None:
        raise _refuse(module, "Keras's has neither ceil_mode nor padding nor a divisor of one's own")
    size, strides = _pair(module.kernel_size), _pair(module.stride)
    return tools.layers.AveragePooling2D(size, strides=strides, dtype=tools.dtype)(input_), []


def _adaptive_average_pool(tools: Tools, module: nn.AdaptiveAvgPool2d, input_: Any) -> tuple[Any, Sequence[Weight]]:
    """Only where the output's size divides the input's: the windows are then equal and apart."""
    output_size: Any = module.output_size
    before = input_.shape[1:3]
    after = [there if size is None else size for size, there in zip(_pair(output_size), before, strict=True)]
    if any(there % size for size, there in zip(after, before, strict=True)):
        raise _refuse(module, f"{tuple(before)} is no multiple of {tuple(after)}, and its windows would overlap")
    size = [there // size for size, there in zip(after, before, strict=True)]
    return tools.layers.AveragePooling2D(size, dtype=tools.dtype)(input_), []


def _flatten(tools: Tools, module: nn.Flatten, input_: Any) -> tuple[Any, Sequence[Weight]]:
    """Through PyTorch's order of dimensions, in which the next layer's weights are."""
    if module.start_dim != 1 or module.end_dim != -1:
        raise _refuse(module, "Keras's flattens everything but the samples; use start_dim=1, end_dim=-1")
    return tools.layers.Flatten(dtype=tools.dtype)(channels_first(tools, input_)), []


def _dropout(tools: Tools, module: nn.Dropout, input_: Any) -> tuple[Any, Sequence[Weight]]:
    return (tools.layers.Dropout(module.p, dtype=tools.dtype)(input_) if module.p else input_), []


def _identity(tools: Tools, module: nn.Identity, input_: Any) -> tuple[Any, Sequence[Weight]]:
    return input_, []


def _activation(function: Callable[[Any, Any], Callable[[Any], Any]]) -> Counterpart:
    """A layer that calls a function of TensorFlow's, found from TensorFlow and the module."""

    def make(tools: Tools, module: Any, input_: Any) -> tuple[Any, Sequence[Weight]]:
        return tools.layers.Activation(function(tools.tf, module), dtype=tools.dtype)(input_), []

    return make


def _gelu(tf: Any, module: nn.GELU) -> Callable[[Any], Any]:
    """Hendrycks & Gimpel 2016, section 2. TensorFlow's own has its constants in float32."""
    if module.approximate == "tanh":
        factor = math.sqrt(2 / math.pi)
        return lambda x: 0.5 * x * (1 + tf.tanh(factor * (x + 0.044715 * x * x * x)))
    return lambda x: 0.5 * x * (1 + tf.math.erf(x * math.sqrt(0.5)))


MODULES: Mapping[type[nn.Module], Counterpart] = {
    nn.AdaptiveAvgPool2d: _adaptive_average_pool,
    nn.AvgPool2d: _average_pool,
    nn.Conv2d: _conv,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.GELU: _activation(_gelu),
    nn.GroupNorm: _group_norm,
    nn.Identity: _identity,
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    nn.MaxPool2d: _max_pool,
    nn.ReLU: _activation(lambda tf, module: tf.nn.relu),
    nn.Sigmoid: _activation(lambda tf, module: tf.math.sigmoid),
    nn.SiLU: _activation(lambda tf, module: tf.nn.silu),
    nn.Tanh: _activation(lambda tf, module: tf.math.tanh),
}


def _add(tools: Tools, one: Any, other: Any) -> Any:
    return tools.layers.Add(dtype=tools.dtype)([one, other])


def _relu(tools: Tools, input_: Any, inplace: bool = False) -> Any:
    return tools.apply(tools.tf.nn.relu, input_)


def _flat(tools: Tools, input_: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return _flatten(tools, nn.Flatten(start_dim, end_dim), input_)[0]


_IMAGE_AXES = {0: 0, 1: 3, 2: 1, 3: 2}  # from PyTorch's dimensions to TensorFlow's


def _mean(tools: Tools, input_: Any, dim: Any, keepdim: bool = False) -> Any:
    """A mean over dimensions, counted as PyTorch does."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    rank = len(input_.shape)
    axes = [axis % rank for axis in dims]
    if is_image(input_):
        if not keepdim and set(axes) != {2, 3}:
            raise UserError(f"mean over dimensions {dims} of an image has no Keras counterpart; use (2, 3)")
        axes = [_IMAGE_AXES[axis] for axis in axes]
    return tools.apply(lambda tensor: tools.tf.reduce_mean(tensor, axes, keepdims=keepdim), input_)


# Functions, and methods of tensors by their names.
FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    F.relu: _relu,
    operator.add: _add,
    operator.iadd: _add,
    torch.add: _add,
    torch.flatten: _flat,
    torch.mean: _mean,
    torch.relu: _relu,
    "flatten": _flat,
    "mean": _mean,
    "relu": _relu,
}
