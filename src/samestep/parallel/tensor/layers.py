"""Forwards of sliced layers. A layer's forward is replaced, not the module, so that parameters keep their names.

An nn.MultiheadAttention computes this rank's heads.

A unit of columns and a row (Shoeybi et al. 2019, section 3), with p ranks in the tensor group:

    x [batch, tokens, features]           the same on all ranks
    f: identity, backward all-reduce      `InputMessage`, one for all columns that take this x
    columns: x W_c.T + b_c                [batch, tokens, width / p], W_c [width / p, features]
    element-wise or per-head modules      `UnitRegion`: dropout draws for this rank's part
    row: h W_r.T                          [batch, tokens, features], a part of the sum; W_r [features, width / p]
    g: all-reduce, backward identity      `UnitRegion.leave`
    + b_r                                 once, after the sum

With split tokens (`sequence_parallel`) f is an all-gather and g a reduce-scatter along the tokens. All ranks of the
group run every collective of a unit, in forward and in backward, in the same order.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.parallel import collectives
from samestep.parallel.attributes import replace_forward
from samestep.parallel.exact.forward_context import ForwardContext, Portion
from samestep.parallel.low_rank import base_of, is_conv1d, updates_of
from samestep.parallel.valueless import has_values

Message = Callable[[Tensor], Tensor]
Context = Callable[[], AbstractContextManager[None]]


class InputMessage:
    """The collective at the input of column layers: one for all that take the same tensor."""

    def __init__(self, message: Message, uses: int = 1) -> None:
        self._message = message
        self._uses = uses
        self._left = 0
        self._given: Tensor | None = None
        self._taken: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The collective's result for x, computed once for all layers that take this very tensor."""
        # Compared by identity: query, key and value projections are called with one tensor, so one all-reduce of the
        # sum of their gradients replaces three.
        if self._taken is None or self._given is not x:
            self._given, self._taken, self._left = x, self._message(x), self._uses
        taken = self._taken
        self._left -= 1
        if not self._left:  # free the activation once all layers have taken it
            self._given = self._taken = None
        return taken


class UnitRegion:
    """The part of a unit between its columns and its row layer, where a rank has its own heads or features."""

    def __init__(
        self, leave: Message, forward_context: ForwardContext, part: Portion, *, all_tokens: bool = False
    ) -> None:
        """`all_tokens`: the columns get the tokens of all ranks, while outside the unit a rank has a part of them."""
        self._leave = leave
        self._forward_context = forward_context
        self._part = part  # this rank's heads and features
        self._all_tokens = all_tokens
        self._outside: Portion | None = None

    def begin(self, training: bool) -> None:
        """Enter the region, so that dropout draws for this rank's part; the first column calls it."""
        self._outside = self._forward_context.hold(self._part) if training else None

    def at_entry(self) -> AbstractContextManager[None]:
        """The context of modules on the columns' input, such as an adapter's dropout: every rank has all features."""
        if self._outside is None:  # not in training
            return nullcontext()
        return self._forward_context.holding(Portion() if self._all_tokens else self._outside)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial results."""
        if self._outside is not None:
            self._forward_context.hold(self._outside)
            self._outside = None
        return self._leave(x)


def column(linear: nn.Module, entry: Message, region: UnitRegion, *, begins: bool) -> None:
    """Make a linear layer compute its slice of the outputs. `begins`: it is the first column of its region."""
    product = product_of(linear, region.at_entry)

    def forward(x: Tensor) -> Tensor:
        x = entry(x)
        # After the collective: with split tokens that is a gather, which isn't part of the region.
        if begins:
            region.begin(linear.training)
        return with_bias(product(x), linear)

    replace_forward(linear, forward)


def shared_column(linear: nn.Module, entry: Message, region: UnitRegion, features: Tensor, *, begins: bool) -> None:
    """Make a whole linear layer return only the features [n] that this rank needs, of heads that ranks share."""
    product = product_of(linear, region.at_entry)

    def forward(x: Tensor) -> Tensor:
        x = entry(x)
        if begins:
            region.begin(linear.training)
        return with_bias(product(x), linear).index_select(-1, features.to(x.device))

    replace_forward(linear, forward)


def gathered(module: nn.Module, enter: Message, gather: Message) -> None:
    """Make a layer compute its slice of the outputs and gather those of all ranks."""
    inner: Callable[..., Tensor] = module.forward

    def forward(input: Tensor, *arguments: object) -> Tensor:  # the name that PyTorch's layers give it
        return gather(inner(enter(input), *arguments))

    module.forward = forward


def row(linear: nn.Module, region: UnitRegion) -> None:
    """Make a linear layer compute with its slice of the inputs; the bias is added once, to the sum over the ranks."""
    product = product_of(linear)

    def forward(x: Tensor) -> Tensor:
        return with_bias(region.leave(product(x)), linear)

    replace_forward(linear, forward)


def product_of(linear: nn.Module, around_dropout: Context = nullcontext) -> Message:
    """The function that a linear layer with its adapters computes, without the bias.

    If the layer's outputs are sliced, so are those of the adapters' `up`; if its inputs are, so are those of `down`.
    `around_dropout`: the context of the adapters' dropout of the inputs.
    """
    base = base_of(linear)
    plain = _product_with(base)
    add = updates_of(linear)
    if add is None:
        return plain
    return lambda x: plain(x) + add(x, around_dropout)


def _product_with(base: nn.Module) -> Message:
    """The product of a linear layer without its bias, x [..., in] -> [..., out], for either layout of the weight."""
    if is_conv1d(base):
        # The weight is [in, out].
        return lambda x: F.linear(x, base.get_parameter("weight").t())
    return lambda x: F.linear(x, base.get_parameter("weight"))


def with_bias(x: Tensor, linear: nn.Module) -> Tensor:
    """Add a linear layer's bias to its product, in the product's dtype."""
    bias = base_of(linear).bias
    # Under autocast the product has the lower precision, as the output of a whole linear layer has.
    # [..., features or a slice of them] + the bias or the same slice of it.
    return x if bias is None else x + bias.to(x.dtype)  # pyright: ignore[reportCallIssue, reportOperatorIssue]


def table(embedding: nn.Embedding, first: int, sum_over_ranks: Message) -> None:
    """Make an embedding look up the ids of its own rows, from id `first` on; the sum over ranks has all rows."""
    padding = embedding.padding_idx
    rows, total = embedding.weight.shape[0], embedding.num_embeddings
    has_padding = padding is not None and first <= padding < first + rows
    own_padding = padding - first if padding is not None and has_padding else None

    def forward(input: Tensor) -> Tensor:  # the name that nn.Embedding gives it
        # No rank has the row of an id that is out of range: without this check its sum over ranks would be zeros.
        outside = (input < 0) | (input >= total) if input.device.type == "cpu" else None
        if outside is not None and has_values(outside) and bool(outside.any()):
            raise IndexError("index out of range in self")
        local = input - first
        foreign = (local < 0) | (local >= rows)  # [batch, tokens]
        # [batch, tokens, features]: rows of this rank's ids, zeros for other ranks' ids.
        rows_here = F.embedding(local.masked_fill(foreign, 0), embedding.weight, own_padding)
        return sum_over_ranks(rows_here.masked_fill(foreign.unsqueeze(-1), 0))

    replace_forward(embedding, forward)


def no_fast_path(model: nn.Module) -> None:
    """Disable the fast path of PyTorch's transformer layers, which reads weights of modules without calling them."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


Group = dist.ProcessGroup


def multihead(
    attention: nn.MultiheadAttention, entries: Mapping[str, Message], region: UnitRegion, group: Group
) -> None:
    """Make an attention compute its slice of the heads.

    `entries`: the input collectives of query, key and value, and of masks that need a gradient.
    """
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
            if id(tensor) not in entered:  # one collective if they are one tensor
                entered[id(tensor)] = entries[name](tensor)
        region.begin(attention.training)
        query, key, value = (entered[id(tensor)] for tensor in (query, key, value))
        attn_mask, key_padding_mask = (
            entries[name](tensor) if tensor is not None and tensor.requires_grad else tensor
            for name, tensor in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask))
        )
        batched = query.dim() == 3
        inputs = [_batch_first(tensor, batched, attention.batch_first) for tensor in (query, key, value)]
        mask = local.mask(attn_mask, key_padding_mask, inputs[0])
        # heads [batch, tokens, local heads * head_dim]; weights [batch, local heads, queries, keys] or None.
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
    """Computes this rank's heads of an attention."""

    def __init__(self, attention: nn.MultiheadAttention, group: Group) -> None:
        self._attention = attention
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._count = attention.num_heads // self._ranks
        self._first = dist.get_rank(group) * self._count

    def mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Combine both masks into one to add to the scores, [batch or 1, heads or 1, queries or 1, keys]."""
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
        """Attention from [batch, tokens, features] to [batch, tokens, local heads * head_dim]; weights if needed."""
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
        """The attention weights as the whole module returns them: averaged over all heads, or per head."""
        if average:
            # [batch, queries, keys]: the average over all ranks' heads.
            return collectives.reduce_from_region(weights.sum(1), self._group) / self._attention.num_heads
        # [batch, heads, queries, keys], in the order of the heads.
        heads = collectives.Slices(group=self._group, lengths=[self._count] * self._ranks)
        return collectives.gather_from_region(weights, heads, 1)

    def _split(self, x: Tensor) -> Tensor:
        """Split the last dimension into heads and features."""
        # [batch, tokens, local heads * head_dim] -> [batch, local heads, tokens, head_dim]
        return x.reshape(*x.shape[:-1], self._count, self._attention.head_dim).transpose(1, 2)

    def _weights(self) -> list[tuple[Any, Any]]:
        """The weight and the bias of the query, key and value projections."""
        module = self._attention
        if module.in_proj_weight is not None:
            # [3 * local heads * head_dim, features]: this rank's queries, then its keys, then its values.
            weights: Any = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None, None, None)
        return list(zip(weights, biases, strict=True))


def _batch_first(x: Tensor, batched: bool, batch_first: bool) -> Tensor:
    """Convert an input of the module to [batch, tokens, features], from any order that it accepts."""
    if not batched:
        return x.unsqueeze(0)
    return x if batch_first else x.transpose(0, 1)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to one that is added to scores; True in a boolean mask excludes a key."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
