"""nn.MultiheadAttention on one rank's heads."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.parallel.attributes import replace_forward
from samestep.parallel.tensor import collectives
from samestep.parallel.tensor.layers import Message, Region

Group = dist.ProcessGroup


def multihead(attention: nn.MultiheadAttention, entries: Mapping[str, Message], region: Region, group: Group) -> None:
    """Make an attention compute its slice of the heads. `entries` are the messages of query, key and value."""
    local = _LocalHeads(attention, group)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        entered: dict[int, Tensor] = {}
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if id(tensor) not in entered:  # one message where they are one tensor
                entered[id(tensor)] = entries[name](tensor)
        region.begin(attention.training)
        query, key, value = (entered[id(tensor)] for tensor in (query, key, value))
        batched = query.dim() == 3
        inputs = [_batch_first(tensor, batched, attention.batch_first) for tensor in (query, key, value)]
        mask = local.mask(attn_mask, key_padding_mask, inputs[0])
        heads, weights = local.attend(inputs, mask, need_weights)
        made = F.linear(heads, attention.out_proj.weight)  # [batch, tokens, features]
        if not batched:
            made = made.squeeze(0)
        elif not attention.batch_first:
            made = made.transpose(0, 1)
        made = region.leave(made)
        bias = attention.out_proj.bias
        output = made if bias is None else made + bias.to(made.dtype)
        if weights is None:
            return output, None
        weights = local.of_all_heads(weights, average_attn_weights)
        return output, weights if batched else weights.squeeze(0)

    replace_forward(attention, forward)


class _LocalHeads:
    """The heads of this rank, and what they compute."""

    def __init__(self, attention: nn.MultiheadAttention, group: Group) -> None:
        self._attention = attention
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._count = attention.num_heads // self._ranks
        self._first = dist.get_rank(group) * self._count

    def mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores, [batch or 1, heads or 1, queries or 1, keys]."""
        batch = query.shape[0]
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, query.dtype)
            if mask.dim() == 3:  # [batch * heads, queries, keys]
                mask = mask.view(batch, -1, *mask.shape[1:])[:, self._first : self._first + self._count]
            else:
                mask = mask[None, None]
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, query.dtype).view(batch, 1, 1, -1)
            mask = padding if mask is None else mask + padding
        return mask

    def attend(self, inputs: list[Tensor], mask: Tensor | None, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """From [batch, tokens, features] to [batch, tokens, local heads * head_dim], and the weights where wanted."""
        query, key, value = (
            self._split(F.linear(x, weight, bias)) for x, (weight, bias) in zip(inputs, self._weights(), strict=True)
        )
        dropout = self._attention.dropout if self._attention.training else 0.0
        weights = None
        if need_weights:
            scores = query @ key.transpose(-2, -1) * self._attention.head_dim**-0.5
            if mask is not None:
                scores = scores + mask
            weights = F.dropout(scores.softmax(-1), dropout)  # [batch, local heads, queries, keys]
            heads = weights @ value
        else:
            heads = F.scaled_dot_product_attention(query, key, value, mask, dropout)
        return heads.transpose(1, 2).flatten(2), weights

    def of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        if average:
            return collectives.reduce(weights.sum(1), self._group) / self._attention.num_heads
        return collectives.gather(weights, self._group, [self._count] * self._ranks, 1)

    def _split(self, x: Tensor) -> Tensor:
        # [batch, tokens, local heads * head_dim] -> [batch, local heads, tokens, head_dim]
        return x.unflatten(-1, (self._count, self._attention.head_dim)).transpose(1, 2)

    def _weights(self) -> list[tuple[Any, Any]]:
        """Weight and bias of queries, keys and values."""
        module = self._attention
        if module.in_proj_weight is not None:
            weights: Any = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None, None, None)
        return list(zip(weights, biases, strict=True))


def _batch_first(x: Tensor, batched: bool, batch_first: bool) -> Tensor:
    """[batch, tokens, features], from whichever order the module takes."""
    if not batched:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores; a boolean one says what is left out."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
