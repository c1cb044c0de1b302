"""Attention over the tokens of all ranks, for blocks that have one rank's tokens.

Every rank gives its tokens of most heads away and gets all tokens of a few heads; after attention the tokens go back
(Jacobs et al. 2023, DeepSpeed-Ulysses, section 3). Where the heads are no multiple of the ranks, keys and values of
all tokens are gathered instead.
"""

# PyTorch's stub of backward takes any number of gradients, and its mark of one that is taken once knows no ctx.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from samestep.comm.gather import all_gather, reduce_scatter_uneven
from samestep.parallel.context.messages import exchange, own_part, part_length
from samestep.parallel.exact.forward_context import ForwardContext, Portion


class Length:
    """How many tokens the running forward has in all. One object for each list of blocks."""

    def __init__(self, now: ForwardContext) -> None:
        self._now = now

    @property
    def tokens(self) -> int:
        return self._now.tokens(self)

    def note(self, tokens: int) -> None:
        self._now.note_tokens(self, tokens)


class AttentionOverAll(TorchFunctionMode):
    """Gives attention all tokens: of some heads where heads can be shared out, else of all keys and values."""

    def __init__(
        self, group: dist.ProcessGroup, length: Length, now: ForwardContext, crossing: Sequence[bool]
    ) -> None:
        """`crossing` tells of each call in its order whether keys are of another sequence, whole on every rank."""
        super().__init__()
        self._crossing = crossing
        self._calls = 0
        self._paused = False
        self._now = now
        self._group = group
        self._length = length

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and not self._paused:
            self._calls += 1
            if self._calls <= len(self._crossing) and self._crossing[self._calls - 1]:
                return self._to_another(*args, **(kwargs or {}))
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """A block's forward begins, whose calls of attention are counted."""
        self._calls = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Code that has all tokens."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _to_another(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """This rank's queries over all of another sequence's keys."""
        mask = _own_rows(attn_mask, self._length.tokens, False, self._group, query)
        with self._now.holding(Portion(attention={2: self._group.rank() * query.shape[2]})):
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
        ranks, tokens = self._group.size(), self._length.tokens
        shared = {"dropout_p": dropout_p, **options}
        if query.shape[1] % ranks or key.shape[1] % ranks:
            first = self._group.rank() * query.shape[2]
            seen = tokens
            if is_causal and attn_mask is None and not dropout_p:
                # Own queries look at no later keys: a triangle at the lower right, for which kernels need no mask.
                # The last ranks' tokens that only fill up stay, or the triangle would begin elsewhere.
                seen = first + query.shape[2]
                mask: Any = causal_lower_right(query.shape[2], seen)
            else:
                mask = _own_rows(attn_mask, tokens, is_causal, self._group, query)
            key, value = (_gather_summed(part, self._group, seen) for part in (key, value))
            with self._now.holding(Portion(attention={2: first})):
                return F.scaled_dot_product_attention(query, key, value, mask, **shared)
        to_heads = partial(exchange, group=self._group, split_dim=1, join_dim=2)
        query, key, value = (to_heads(part).narrow(2, 0, tokens) for part in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask.chunk(ranks, 1)[self._group.rank()]
        with self._now.holding(Portion(attention={1: self._group.rank() * query.shape[1]})):
            output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, **shared)
        missing = part_length(tokens, ranks) * ranks - tokens
        return exchange(F.pad(output, [0, 0, 0, missing]), self._group, split_dim=2, join_dim=1)


def _own_rows(
    mask: Tensor | None, tokens: int, is_causal: bool, group: dist.ProcessGroup, query: Tensor
) -> Tensor | None:
    """The mask's rows of this rank's queries. [..., own tokens, tokens]"""
    if mask is None and is_causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.shape[-2] == 1:
        return mask
    rows = own_part(mask.contiguous(), group, dim=mask.ndim - 2)
    if mask.dtype == torch.bool:
        # A row that only fills up would see nothing, which makes NaN; what it sees doesn't matter.
        rows = rows | ~rows.any(-1, keepdim=True)
    return rows


def _gather_summed(part: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
    """The first tokens of keys or values [batch, heads, own tokens, head_dim]; backward sums up all ranks' gradients.

    Ranks may ask for different numbers of them.
    """
    return _GatherSummed.apply(part, group, tokens)  # pyright: ignore[reportReturnType]


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
        ctx.group, ctx.length = group, part.shape[2]
        return all_gather(part, group, 2).narrow(2, 0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        missing = ctx.length * ctx.group.size() - gradients[0].shape[2]
        whole = F.pad(gradients[0], [0, 0, 0, missing])
        return reduce_scatter_uneven(whole, ctx.group, [ctx.length] * ctx.group.size(), 2), None, None
