"""Changes the last bit of what every operation rounds, to measure how far rounding alone moves a step.

A layout adds the same numbers in another order, so its results differ in their last bits, wherever in the model. A
model may amplify that: where nearly equal numbers are subtracted, as in a batch norm over a tiny variance, most of
the digits that agree are lost. Perturbed parameters alone would not show it: they move all samples alike, which such
a norm subtracts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.torch_internals import pytree
from samestep.torch_internals.operators import DisableTorchFunction, TorchDispatchMode, schema

_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32}

# Operators whose results are rounded; others select, move or compare numbers, and theirs must stay what they are.
_NAMES = """
add sub rsub mul div reciprocal addmm addmv mm bmm baddbmm dot mv linear convolution mkldnn_linear mkldnn_rnn_layer
pow sqrt rsqrt exp expm1 log log1p tanh sigmoid erf sin cos gelu silu mish elu softplus
_softmax _log_softmax logsumexp sum mean var var_mean std prod cumsum linalg_vector_norm addcmul addcdiv lerp
native_batch_norm _native_batch_norm_legit _batch_norm_with_update native_layer_norm native_group_norm
_fused_rms_norm _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
_scaled_dot_product_efficient_attention avg_pool2d _adaptive_avg_pool2d upsample_bilinear2d upsample_bicubic2d
grid_sampler_2d scatter_add index_add scatter_reduce nll_loss_forward mse_loss binary_cross_entropy_with_logits
"""
_ROUNDING = frozenset(_NAMES.split())


class LastBitsChanged(TorchDispatchMode):
    """A mode in which one bit of half of the rounded numbers is changed, up or down as the bit was.

    The half is random, so that equal numbers do not all change in the same way.
    """

    def __init__(self, bit: int = 1, seed: int = 0) -> None:
        """`bit`: 1 for the last, 2 for the one before it. Another seed changes other halves."""
        super().__init__()
        self._bit = bit
        self._generator = torch.Generator().manual_seed(bit + 16 * seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        form = schema(func)
        name = form.name.partition("::")[2]
        in_place = any(returned.alias_info is not None for returned in form.returns)
        if not in_place and (name in _ROUNDING or name.endswith("_backward")):
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._change(tensor)
        return result

    def _change(self, tensor: Tensor) -> None:
        """Change the bit in each number, but integral and infinite ones: forwards compare with such, as with zero."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        integers = _INTEGERS.get(real.dtype)
        if integers is None:
            return
        with DisableTorchFunction():  # draws of samestep's own
            drawn = torch.randint(0, 2, real.shape, generator=self._generator, dtype=integers).to(real.device)
            moved = (real.view(integers) ^ drawn * self._bit).view(real.dtype)
            real.copy_(torch.where(real == real.trunc(), real, moved))
