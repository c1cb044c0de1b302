"""Attention to a block of keys: its output, and the log-sum-exp of its scores.

With the log-sum-exp the outputs for two blocks of keys can be merged (`merge`), and a block's probabilities can be
recomputed in backward once the log-sum-exp over all keys is known (Dao et al. 2022, FlashAttention, section 3.1).
PyTorch's fused kernels are used where they support the block, otherwise matrix products.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.launch.device import has_flash_attention
from samestep.torch_internals.operators import (
    flash_attention,
    flash_attention_backward,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
)

_ATEN: Any = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class KeyValueBlock:
    """Queries, and a block of keys and values."""

    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, key-value heads, keys, head_dim]
    value: Tensor  # [batch, key-value heads, keys, value_dim]
    mask: Tensor | None = None  # what is added to the scores, of the query's dtype. [batch or 1, heads or 1, ...]
    causal: bool = False  # query i sees keys 0 to i
    scale: float

    @property
    def groups(self) -> int:
        """Query heads for each key-value head."""
        return self.query.shape[1] // self.key.shape[1]


class Attended(NamedTuple):
    """Output of attention, and the log-sum-exp of its scores: -inf for a query that sees no key of the block."""

    output: Tensor  # [batch, heads, queries, value_dim]
    lse: Tensor  # [batch, heads, queries]


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


class _Kernel(NamedTuple):
    """Forward and backward of a block for one kind of device and dtype."""

    attend: Callable[[KeyValueBlock], Attended]
    # (block, gradient of the output over all keys, output over all keys) -> gradients of the block
    gradients: Callable[[KeyValueBlock, Tensor, Attended], Gradients]


def attend(block: KeyValueBlock) -> Attended:
    """A block's attention."""
    return _kernel(block).attend(block)


def gradients(block: KeyValueBlock, gradient: Tensor, attended: Attended) -> Gradients:
    """Gradients of a block's queries, keys and values; `attended`: the output of attention over all keys."""
    # A query that sees no key gets a zero gradient: its scores are -inf, and exp(-inf - 0) = 0.
    # [batch, heads, queries].
    lse = attended.lse.masked_fill(attended.lse == -math.inf, 0.0)
    return _kernel(block).gradients(block, gradient, Attended(attended.output, lse))


def merge(output: Tensor, lse: Tensor, more: Attended) -> None:
    """Merge the output for further keys into `output` and `lse`, in place (Liu et al. 2023, appendix A)."""
    # log(exp(a) + exp(b)); -inf where neither block has a key for the query.
    both = torch.logaddexp(lse, more.lse)
    finite = both.masked_fill(both == -math.inf, 0.0)
    output *= (lse - finite).exp().unsqueeze(-1)
    output += more.output * (more.lse - finite).exp().unsqueeze(-1)
    lse.copy_(both)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask, True for visible keys, to one that is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _kernel(block: KeyValueBlock) -> _Kernel:
    """The fastest kernel that gives the log-sum-exp as well, for this device, dtype and mask."""
    query = block.query
    if query.device.type == "cpu" and block.value.shape[-1] == query.shape[-1]:
        return _FOR_CPU
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and block.mask is None and _fits_flash(block):
        return _FLASH
    return _WRITTEN_OUT


def _fits_flash(block: KeyValueBlock) -> bool:
    """Whether PyTorch's flash attention takes these heads: a width of at most 256, a multiple of 8."""
    width = block.query.shape[-1]
    fits = width % 8 == 0 and width <= 256 and block.value.shape[-1] == width
    return fits and has_flash_attention(block.query.device)


def _attend_for_cpu(block: KeyValueBlock) -> Attended:
    """By PyTorch's kernel for CPUs, which takes any dtype and masks."""
    output, lse = flash_attention_for_cpu(  # lse [batch, heads, queries]
        block.query, block.key, block.value, 0.0, block.causal, attn_mask=block.mask, scale=block.scale
    )
    if block.mask is not None:  # of a query without keys the kernel gives 0
        nothing = (block.mask == -math.inf).all(-1)  # [batch or 1, heads or 1, queries]
        lse = lse.masked_fill(nothing, -math.inf)
    return Attended(output, lse)


def _gradients_for_cpu(block: KeyValueBlock, gradient: Tensor, attended: Attended) -> Gradients:
    return flash_attention_for_cpu_backward(
        gradient,
        block.query,
        block.key,
        block.value,
        attended.output,
        attended.lse,
        0.0,
        block.causal,
        attn_mask=block.mask,
        scale=block.scale,
    )


def _attend_by_flash(block: KeyValueBlock) -> Attended:
    """On an accelerator, in 16 bits and without a mask. lse: [batch, heads, queries] in float32."""
    key, value = _for_each_head(block)
    output, lse, *_ = flash_attention(block.query, key, value, 0.0, block.causal, False, scale=block.scale)
    return Attended(output, lse)


def _gradients_by_flash(block: KeyValueBlock, gradient: Tensor, attended: Attended) -> Gradients:
    key, value = _for_each_head(block)
    # Without dropout the kernel reads neither seed nor offset, and of unpacked samples no lengths.
    unused = torch.empty(0, dtype=torch.int64, device=key.device)
    query, key, value = flash_attention_backward(
        gradient.contiguous(),
        block.query,
        key,
        value,
        attended.output.contiguous(),
        attended.lse.contiguous(),
        None,
        None,
        block.query.shape[2],
        key.shape[2],
        0.0,
        block.causal,
        unused,
        unused,
        scale=block.scale,
    )
    return query, _over_groups(key, block), _over_groups(value, block)


def _attend_written_out(block: KeyValueBlock) -> Attended:
    """By products of matrices: [batch, heads, queries, keys] is in memory for the time of this block."""
    scores = _scores(block)  # [batch, heads, queries, keys]
    # Taken away before exp, so that no exponential overflows.
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)  # [batch, heads, queries, 1]
    value = _for_each_head(block)[1]  # [batch, heads, keys, value_dim]
    output = (weights @ value.to(weights.dtype)) / total.masked_fill(total == 0, 1.0)
    return Attended(output.to(block.query.dtype), (total.log() + largest).squeeze(-1))


def _gradients_written_out(block: KeyValueBlock, gradient: Tensor, attended: Attended) -> Gradients:
    key, value = _for_each_head(block)
    weights = (_scores(block) - attended.lse.unsqueeze(-1)).exp_()  # [batch, heads, queries, keys]
    exact = weights.dtype
    gradient, output = gradient.to(exact), attended.output.to(exact)
    of_value = weights.mT @ gradient
    of_weights = gradient @ value.to(exact).mT
    of_weights -= (gradient * output).sum(-1, keepdim=True)
    of_scores = weights.mul_(of_weights).mul_(block.scale)
    of_query = of_scores @ key.to(exact)
    of_key = of_scores.mT @ block.query.to(exact)
    return of_query, _over_groups(of_key, block), _over_groups(of_value, block)


def _scores(block: KeyValueBlock) -> Tensor:
    """[batch, heads, queries, keys], in float32 where the query is of half precision."""
    key = _for_each_head(block)[0]
    scores = (block.query @ key.mT).to(exact_dtype(block.query.dtype)) * block.scale
    if block.mask is not None:
        scores += block.mask
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def _for_each_head(block: KeyValueBlock) -> tuple[Tensor, Tensor]:
    """Keys and values, once for each head of the queries."""
    if block.groups == 1:
        return block.key, block.value
    return block.key.repeat_interleave(block.groups, 1), block.value.repeat_interleave(block.groups, 1)


def _over_groups(gradient: Tensor, block: KeyValueBlock) -> Tensor:
    """The sum over the query heads that share a key-value head."""
    return gradient if block.groups == 1 else gradient.unflatten(1, (-1, block.groups)).sum(2)


_FOR_CPU = _Kernel(_attend_for_cpu, _gradients_for_cpu)
_FLASH = _Kernel(_attend_by_flash, _gradients_by_flash)
_WRITTEN_OUT = _Kernel(_attend_written_out, _gradients_written_out)
