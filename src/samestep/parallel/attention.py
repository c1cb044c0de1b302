"""Attention with its probabilities written out, for dropout that decides on each of them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """What `F.scaled_dot_product_attention` gives, with `drop` applied to the probabilities.

    Shapes: query [..., heads, queries, head_dim], key and value [..., heads, keys, head_dim]; with `enable_gqa`
    keys may have fewer heads, each for as many consecutive ones of the queries. Memory grows with queries x keys.
    (Vaswani et al. 2017, section 3.2.1; grouped queries: Ainslie et al. 2023.)
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if attn_mask is None:
        return drop(scores.softmax(-1)) @ value  # [..., heads, queries, head_dim]
    if attn_mask.dtype == torch.bool:
        nothing = ~attn_mask.any(-1, keepdim=True)  # a query that may see no key
        scores = scores.masked_fill(~(attn_mask | nothing), -math.inf)
    else:
        nothing = (attn_mask == -math.inf).all(-1, keepdim=True)
        scores = scores + attn_mask.masked_fill(nothing, 0.0)
    # A softmax over nothing is not a number; PyTorch's attention has zeros there.
    return drop(scores.softmax(-1).masked_fill(nothing, 0.0)) @ value
