"""Attention over the tokens of all ranks, for blocks that have one rank's tokens.

Under attention=ulysses every rank gives its tokens of most heads away and gets all tokens of a few heads; after
attention the tokens go back (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3). Where the heads are no multiple of
the ranks, keys and values of all tokens are gathered instead. Under attention=ring they travel from rank to rank: see
ring.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from samestep.errors import UserError
from samestep.parallel.collectives import Slices, all_to_all_dims, gather_to_region
from samestep.parallel.context.ring import WITHOUT_DROPOUT, ring_attention
from samestep.parallel.context.shares import Shares, own_part
from samestep.parallel.exact.forward_context import ForwardContext, Portion, Positions
from samestep.torch_internals import pytree


class Length:
    """The total number of tokens in the running forward. One object for each list of blocks."""

    def __init__(self, forward_context: ForwardContext, shares: Shares) -> None:
        self._forward_context = forward_context
        self._shares = shares

    @property
    def tokens(self) -> int:
        return self._forward_context.tokens(self)

    def note(self, tokens: int) -> None:
        self._forward_context.note_tokens(self, tokens)

    def positions(self, inputs: Any) -> Positions:
        """The positions of this rank's tokens, on the device of the tensors in `inputs`."""
        device = next((leaf.device for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
        return self._shares.positions(self.tokens, device or torch.device("cpu"))


class AttentionOverAll(TorchFunctionMode):
    """Makes attention span the tokens of all ranks, by exchanging heads, by gathering keys, or by a ring."""

    def __init__(
        self, shares: Shares, length: Length, forward_context: ForwardContext, crossing: Sequence[bool]
    ) -> None:
        """`crossing`: for each call of attention in order, whether its keys are of another sequence."""
        super().__init__()
        self._crossing = crossing
        self._calls = 0
        self._paused = False
        self._forward_context = forward_context
        self._shares = shares
        self._group = shares.group
        self._length = length
        # Graph breaks: the compiler can't trace process groups or batch_isend_irecv, and attention is a kernel of its
        # own anyway.
        self._over_all: Any = torch.compiler.disable(self._attention)
        self._over_another: Any = torch.compiler.disable(self._to_another)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self._paused:
            self._calls += 1
            if self._calls <= len(self._crossing) and self._crossing[self._calls - 1]:
                return self._over_another(*args, **(kwargs or {}))
            return self._over_all(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """Reset the count of attention calls, at the beginning of a block's forward."""
        self._calls = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of code that has all tokens, in which attention is left as it is."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _to_another(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """Cross-attention of this rank's queries to all keys of another sequence."""
        mask = _own_rows(attn_mask, self._length.tokens, False, self._shares, query)
        with self._forward_context.holding(Portion(attention={2: self._length.positions(query)})):
            return F.scaled_dot_product_attention(query, key, value, mask, *rest, **options)

    def _attention(
        self,
        query: Tensor,  # [batch, heads, own tokens, head_dim]
        key: Tensor,  # [batch, key-value heads, own tokens, head_dim]
        value: Tensor,
        attn_mask: Tensor | None = None,  # [batch or 1, heads or 1, tokens, tokens]
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Self-attention of this rank's tokens to the tokens of all ranks, in one of three ways.

        With a zigzag (attention=ring): by the ring, unless the mask needs a gradient. If the heads don't divide by
        the ranks: own queries [batch, heads, own tokens, head_dim] against the gathered keys and values of all
        tokens. Otherwise: exchange tokens for heads, attend with a few heads over all tokens, and exchange back.
        """
        ranks, tokens = self._group.size(), self._length.tokens
        shared = {"dropout_p": dropout_p, **options}
        if self._shares.zigzag and (attn_mask is None or not attn_mask.requires_grad):
            if dropout_p:
                raise UserError(f"attention drops probabilities ({dropout_p:g}), and {WITHOUT_DROPOUT}")
            scale = options.get("scale")
            return ring_attention(
                query, key, value, self._shares, tokens, mask=attn_mask, is_causal=is_causal, scale=scale
            )
        if self._shares.zigzag or query.shape[1] % ranks or key.shape[1] % ranks:
            seen = tokens
            if is_causal and attn_mask is None and not dropout_p and not self._shares.zigzag:
                # Own queries look at no later keys: a triangle at the lower right, for which kernels need no mask.
                # The last ranks' tokens that only fill up stay, or the triangle would begin elsewhere.
                seen = (self._group.rank() + 1) * query.shape[2]
                mask: Any = causal_lower_right(query.shape[2], seen)
            else:
                mask = _own_rows(attn_mask, tokens, is_causal, self._shares, query)
            # [batch, key-value heads, seen tokens, head_dim].
            key, value = (_gather_summed(part, self._shares, seen) for part in (key, value))
            with self._forward_context.holding(Portion(attention={2: self._length.positions(query)})):
                return F.scaled_dot_product_attention(query, key, value, mask, **shared)
        # [batch, heads, own tokens, head_dim] -> [batch, heads / ranks, all tokens, head_dim]; what fills the last
        # ranks' parts up is cut off at once.
        to_heads = partial(all_to_all_dims, group=self._group, split_dim=1, join_dim=2)
        query, key, value = (to_heads(part).narrow(2, 0, tokens) for part in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            # A mask with a dimension of heads: those that this rank has now.
            mask = mask.chunk(ranks, 1)[self._group.rank()]
        with self._forward_context.holding(Portion(attention={1: self._group.rank() * query.shape[1]})):
            output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, **shared)
        missing = self._shares.length(tokens) * ranks - tokens
        # Back to [batch, heads, own tokens, head_dim], filled up again to parts of equal length.
        return all_to_all_dims(F.pad(output, [0, 0, 0, missing]), self._group, split_dim=2, join_dim=1)


def _own_rows(mask: Tensor | None, tokens: int, is_causal: bool, shares: Shares, query: Tensor) -> Tensor | None:
    """The rows of a mask for this rank's queries. [..., own tokens, tokens]"""
    if mask is None and is_causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.shape[-2] == 1:
        return mask
    rows = own_part(mask.contiguous(), shares, dim=mask.ndim - 2)
    if mask.dtype == torch.bool:
        # Rows of padding would have no visible key, which gives NaN; so they see all keys.
        rows = rows | ~rows.any(-1, keepdim=True)
    return rows


def _gather_summed(part: Tensor, shares: Shares, tokens: int) -> Tensor:
    """The first tokens of keys or values [batch, heads, own tokens, head_dim]; backward sums up all ranks' gradients.

    Ranks may ask for different numbers of them, where each has consecutive ones.
    """
    if shares.zigzag:
        return gather_to_region(part, shares.of(tokens), 2)
    # A rank that looks at fewer keys has no gradient for the later ones: zeros.
    equal = Slices(group=shares.group, lengths=[part.shape[2]] * shares.ranks)
    return gather_to_region(part, equal, 2).narrow(2, 0, tokens)
