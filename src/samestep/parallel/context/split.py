"""Context parallel: each rank has a part of the tokens, and attention exchanges heads for tokens.

From the first block to the last a rank works on its own tokens. Attention needs all of them: before it every rank
gives its tokens of most heads away and gets all tokens of a few heads; after it the tokens go back (Jacobs et al.
2023, DeepSpeed-Ulysses, section 3). Where the heads are no multiple of the ranks, keys and values of all tokens are
gathered instead.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import expert_counts, with_forward
from samestep.parallel.calls import Attention, Call, Seen, Trace
from samestep.parallel.context.messages import exchange, gather, own_part, part_length, split
from samestep.parallel.moment import Now, Portion
from samestep.parallel.parts import Parts
from samestep.parallel.recorder import along

Key = str | int  # of an argument: its name, or its position

# Functions in which tokens may meet outside of attention.
_MIXES_TOKENS = (
    "softmax",
    "multi_head_attention_forward",
    "conv1d",
    "conv2d",
    "cumsum",
    "flip",
    "roll",
    "lstm",
    "gru",
)


class Length:
    """How many tokens the running forward has in all. One object a model, shared by its blocks."""

    def __init__(self) -> None:
        self.tokens = 0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Which arguments of a block carry tokens."""

    hidden: Key
    along: tuple[Key, ...]  # others with a row a token, whole on every rank: positions, rotary tables


def split_tokens(
    model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, mesh: Mesh, parts: Parts, now: Now
) -> None:
    """Make the blocks work on this rank's tokens. Raises LayoutError for blocks that carry no tokens.

    Embeddings before the blocks, and what stands after them, see all tokens on every rank.
    """
    blocks = with_forward(blocks)
    if not blocks:
        raise _refused(parts.layout, type(model).__name__, "has no blocks between which it hands on hidden states")
    names = {module: name for name, module in model.named_modules()}
    calls = [_only_call(trace, names[block], parts.layout) for block in blocks]
    group, length = mesh.group("context"), Length()
    for block, call in zip(blocks, calls, strict=True):
        tokens = {seen.shape[1] for _, seen in _places(call) if len(seen.shape) == 3}
        _check_attention(call, trace, parts.layout, expert_counts(block) - tokens)
    carried = find_hidden(calls, parts.layout)
    used_outside = trace.used_outside(model, [call.name for call in calls])
    if used_outside is not None:
        raise _refused(parts.layout, used_outside, "is also used outside of its block, on all tokens")
    for block, call, hidden in zip(blocks, calls, carried, strict=True):
        arguments = Arguments(hidden=hidden, along=_along(block, call, hidden))
        block.forward = _on_own_tokens(block.forward, arguments, group, length, now)
    _at_the_edges(blocks, carried[0], group, length)
    for block in blocks:
        for name, _ in block.named_parameters(prefix=names[block]):
            parts.add_sum(name, group)


def find_hidden(calls: Sequence[Call], layout: Layout) -> list[Key]:
    """Which argument of each block is the hidden state [batch, tokens, hidden]: what the block before it gave.

    Raises LayoutError where blocks hand on anything else, or more than that.
    """
    found: list[Key] = []
    for before, call in zip([None, *calls], [*calls, None], strict=True):
        if call is None:
            break
        outputs = {seen.identity for seen in before.outputs()} if before else set()
        places = _places(call)
        handed = [key for key, seen in places if seen.identity in outputs]
        if before is None:
            handed = [key for key, seen in places if len(seen.shape) == 3 and seen.shape == _first(call.output)]
        if before is not None and len(handed) != 1:
            raise _refused(layout, call.name, "gets more from the block before it than one hidden state")
        if not handed or len(_first(call.output)) != 3:
            raise _refused(layout, call.name, _other_shapes(places, call))
        _check_same_tokens(call, dict(places)[handed[0]], layout)
        found.append(handed[0])
    return found


def _other_shapes(places: Sequence[tuple[Key, Seen]], call: Call) -> str:
    """What a block takes and gives that hands on no hidden state."""
    taken = next((list(seen.shape) for _, seen in places if len(seen.shape) == 3), None)
    taken = taken or next((list(seen.shape) for _, seen in places), "no tensor")
    return f"takes {taken} and gives {list(_first(call.output)) or 'no tensor'}, not the same [batch, tokens, hidden]"


def _check_same_tokens(call: Call, hidden: Seen, layout: Layout) -> None:
    tokens, given = hidden.shape[1], _first(call.output)[1]
    if tokens != given:
        raise _refused(layout, call.name, f"takes {tokens} tokens and gives {given}")


def _first(output: Any) -> tuple[int, ...]:
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output.shape if isinstance(output, Seen) else ()


def _places(call: Call) -> list[tuple[Key, Seen]]:
    given: list[tuple[Key, Any]] = [*enumerate(call.arguments), *call.keywords.items()]
    return [(key, value) for key, value in given if isinstance(value, Seen)]


def _only_call(trace: Trace, name: str, layout: Layout) -> Call:
    calls = trace.of(name)
    if len(calls) != 1:
        raise _refused(layout, name, f"is called {len(calls)} times in a forward")
    return calls[0]


def _check_attention(call: Call, trace: Trace, layout: Layout, experts: Collection[int]) -> None:
    """A layer's own tokens may meet in PyTorch's attention, where they are exchanged, and nowhere else.

    `experts`: how many experts the layer has to choose among; along these no tokens stand.
    """
    if call.functions.get("multi_head_attention_forward"):
        raise _refused(
            layout, call.name, "attends by nn.MultiheadAttention, in which no rank can exchange tokens with others"
        )
    if not call.functions.get("scaled_dot_product_attention"):
        raise _refused(layout, call.name, "does not call scaled_dot_product_attention")
    for attention in trace.attentions:
        if call.name in attention.modules and not _attends_to_itself(attention, call, trace):
            raise _refused(
                layout,
                attention.modules[-1],
                "attends to another sequence than its queries come from (cross-attention)",
            )
    of_experts = {name: sum(call.functions.get(along(name, n), 0) for n in experts) for name in _MIXES_TOKENS}
    mixing = [name for name in _MIXES_TOKENS if call.functions.get(name, 0) > of_experts[name]]
    if mixing:
        raise _refused(layout, call.name, f"also calls {mixing[0]}, where tokens may meet that are on other ranks")


def _attends_to_itself(attention: Attention, call: Call, trace: Trace) -> bool:
    """Whether queries and keys are computed from the same of what the layer was given."""
    if attention.query.shape[-2] != attention.key.shape[-2]:
        return False
    queries, keys = (trace.computed_from(seen, call.inputs()) for seen in (attention.query, attention.key))
    return queries == keys == set() or bool(queries & keys)


def _refused(layout: Layout, name: str, why: str) -> LayoutError:
    return LayoutError(
        f'layout "{layout}": {name} {why}, so its tokens can\'t be split; use dp{layout.size} or fsdp{layout.size}'
    )


def _along(block: nn.Module, call: Call, hidden: Key) -> tuple[Key, ...]:
    """Arguments with a row a token, at dimension 1: not masks, which attention needs whole."""
    names = list(inspect.signature(block.forward).parameters)
    named = {key: names[key] if isinstance(key, int) and key < len(names) else str(key) for key, _ in _all(call)}
    tokens = dict(_places(call))[hidden].shape[1]
    return tuple(
        key for key, value in _all(call) if key != hidden and "mask" not in named[key] and _has_rows(value, tokens)
    )


def _all(call: Call) -> list[tuple[Key, Any]]:
    return [*enumerate(call.arguments), *call.keywords.items()]


def _has_rows(value: Any, tokens: int) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(_has_rows(inner, tokens) for inner in value)
    return isinstance(value, Seen) and len(value.shape) in (2, 3) and value.shape[1] == tokens


def _at_the_edges(blocks: Sequence[nn.Module], hidden: Key, group: dist.ProcessGroup, length: Length) -> None:
    """Split the hidden state before the first block, and gather it after the last."""

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        length.tokens = _get(arguments, keywords, hidden).shape[1]
        return _with(arguments, keywords, {hidden: partial(split, group=group)})

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather(output[0], group, length.tokens), *output[1:])
        return gather(output, group, length.tokens)

    blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    blocks[-1].register_forward_hook(after)


def _on_own_tokens(
    forward: Callable[..., Any], which: Arguments, group: dist.ProcessGroup, length: Length, now: Now
) -> Callable[..., Any]:
    """A block's forward with its further arguments cut to this rank's tokens, and attention over all tokens."""
    mode = _AttentionOverAll(group, length, now)
    mine = partial(_own_tokens, group=group)

    @wraps(forward)
    def on_own_tokens(*arguments: Any, **keywords: Any) -> Any:
        arguments, keywords = _with(arguments, keywords, dict.fromkeys(which.along, mine))
        first = group.rank() * part_length(length.tokens, group.size())
        with now.holding(Portion(activations={1: first})), mode:
            return forward(*arguments, **keywords)

    return on_own_tokens


def _own_tokens(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part; what is computed from parameters gets the gradient of every rank's part."""
    return split(tokens, group=group) if tokens.requires_grad else own_part(tokens, group=group)


def _get(arguments: tuple[Any, ...], keywords: Mapping[str, Any], key: Key) -> Any:
    return arguments[key] if isinstance(key, int) else keywords[key]


def _with(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], changes: Mapping[Key, Callable[[Tensor], Tensor]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with some tensors (or tuples of them) put through a function."""
    positions, named = list(arguments), dict(keywords)
    for key, change in changes.items():
        holder: Any = positions if isinstance(key, int) else named
        value = holder[key]
        holder[key] = tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
    return tuple(positions), named


class _AttentionOverAll(TorchFunctionMode):
    """Gives attention all tokens: of some heads where heads can be shared out, else of all keys and values."""

    def __init__(self, group: dist.ProcessGroup, length: Length, now: Now) -> None:
        super().__init__()
        self._now = now
        self._group = group
        self._length = length

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

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
            key, value = (gather_summed(part, self._group, tokens) for part in (key, value))
            mask = _own_rows(attn_mask, tokens, is_causal, self._group, query)
            with self._now.holding(Portion(attention={2: self._group.rank() * query.shape[2]})):
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


def gather_summed(part: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
    """All tokens of keys or values [batch, heads, own tokens, head_dim]; backward adds up every rank's gradient."""
    return _GatherSummed.apply(part, group, tokens)  # pyright: ignore[reportReturnType]


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, tokens: int) -> Tensor:
        ctx.group = group
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(gathered, part.contiguous(), group=group)
        return torch.cat(gathered, 2).narrow(2, 0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        summed = gradients[0].contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return own_part(summed, ctx.group, dim=2), None, None
