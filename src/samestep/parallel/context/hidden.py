"""Hidden states: the tensors that the blocks of a list pass on, and how each block works on one rank's tokens."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.calls import Attention, Call, Seen, Trace, seen_in
from samestep.parallel.context.gathered import Gathered, find_gathered, mixing, whole_and_used

Key = str | int  # of an argument: its name, or its position


@dataclass(frozen=True, kw_only=True)
class Block:
    """How a block works on one rank's tokens."""

    name: str
    module: nn.Module
    hidden: Key  # the argument that is the hidden state
    along: tuple[Key, ...]  # others with a row for each token, whole on every rank: positions, rotary tables
    gathered: Sequence[Gathered]  # the modules in it that get all tokens
    crossing: tuple[bool, ...]  # for each call of attention in order: whether it attends to another sequence


def look(model: nn.Module, names: Sequence[str], trace: Trace, layout: Layout, *, whole: bool = False) -> list[Block]:
    """Find out how each block of a list can work on some tokens. Raises LayoutError if one can't.

    `whole`: give all tokens to any module that may be attention, instead of exchanging heads.
    """
    calls = [_only_call(trace, name, layout) for name in names]
    carried, hands_more = find_hidden(calls, layout)
    giving = used_between(calls, trace)
    if giving is not None:
        raise refused(layout, giving, "gives more than a hidden state, which is used outside of the blocks")
    blocks: list[Block] = []
    for call, hidden in zip(calls, carried, strict=True):
        module = model.get_submodule(call.name)
        along = _along(module, call, hidden)
        state = dict(_places(call))[hidden]
        # [batch, tokens, hidden].
        tokens = state.shape[1]
        cut = [seen for key in along for seen in seen_in(dict(_all(call))[key])]
        gathered = find_gathered(call, trace, tokens, state, cut, attentions=hands_more or whole, products=whole)
        if gathered is None:
            raise refused(layout, call.name, f"calls {mixing(call, tokens)} itself, where tokens meet")
        for piece in gathered:
            if whole_and_used(trace.of(piece.name)[0], call, trace, tokens):
                raise refused(layout, piece.name, "gives more than tokens, which its block goes on with")
        inside = {piece.name for piece in gathered}
        shared = trace.used_outside(model, list(inside))
        if shared is not None:
            raise refused(layout, shared, "is used by a module that needs all tokens, and outside of it")
        attends = [piece for piece in trace.attentions if call.name in piece.modules]
        outside = [piece for piece in attends if not inside & set(piece.modules)]
        if not gathered and not attends:
            raise refused(layout, call.name, "does not call scaled_dot_product_attention")
        crossing = tuple(not _attends_to_itself(piece, call, trace) for piece in outside)
        blocks.append(
            Block(name=call.name, module=module, hidden=hidden, along=along, gathered=gathered, crossing=crossing)
        )
    return blocks


def find_hidden(calls: Sequence[Call], layout: Layout) -> tuple[list[Key], bool]:
    """Find the argument of each block that is the hidden state [batch, tokens, hidden] of the block before it.

    Also returns whether blocks pass on further tensors without tokens, such as relative positions. Raises LayoutError
    if they pass on anything else.
    """
    keys: list[Key] = []
    hands_more = False
    for before, call in zip([None, *calls], [*calls, None], strict=True):
        if call is None:
            break
        outputs = {seen.identity for seen in before.outputs()} if before else set()
        places = _places(call)
        handed = [key for key, seen in places if seen.identity in outputs]
        if len(handed) > 1:
            hidden = [key for key in handed if dict(places)[key].shape == _first(call.output)]
            hands_more = True
            others = [key for key in handed if key not in hidden]
            handed = handed if any(_may_carry_tokens(dict(places)[key]) for key in others) else hidden
        if before is None:
            handed = [key for key, seen in places if len(seen.shape) == 3 and seen.shape == _first(call.output)][:1]
        if before is not None and len(handed) != 1:
            raise refused(layout, call.name, "gets more from the block before it than one hidden state")
        if not handed or len(_first(call.output)) != 3:
            raise refused(layout, call.name, _other_shapes(places, call))
        _check_same_tokens(call, dict(places)[handed[0]], layout)
        keys.append(handed[0])
    return keys, hands_more


def used_between(calls: Sequence[Call], trace: Trace) -> str | None:
    """The first block with a further output that needs a gradient and is used outside of the blocks, or None.

    The gradient of such an output is whole on every rank, while that of the hidden state is in parts. Both can't be
    summed over the ranks: the former would be multiplied by the number of ranks.
    """
    for call in calls:
        for seen in call.outputs()[1:]:
            made = seen.source is not None and not call.passed_on(seen)
            used = trace.last_uses.get(seen.identity)
            if made and used is not None and not any(inner.began <= used < inner.ended for inner in calls):
                return call.name
    return None


def keeps_tokens(trace: Trace, name: str) -> bool:
    """Whether a block's hidden state [batch, tokens, hidden] keeps its shape."""
    calls = trace.of(name)
    shape = _first(calls[0].output) if calls else ()
    return len(shape) == 3 and any(seen.shape == shape for seen in calls[0].inputs())


def _may_carry_tokens(seen: Seen) -> bool:
    """Whether a tensor may be [batch, tokens, hidden]; one that is square is a bias between tokens."""
    return len(seen.shape) == 3 and seen.shape[1] != seen.shape[2]


def _other_shapes(places: Sequence[tuple[Key, Seen]], call: Call) -> str:
    """Describe the input and output shapes of a block without a hidden state, for a message."""
    taken = next((list(seen.shape) for _, seen in places if len(seen.shape) == 3), None)
    taken = taken or next((list(seen.shape) for _, seen in places), "no tensor")
    shape = list(_first(call.output)) or "no tensor"
    if shape == taken:
        return f"takes and gives {taken}, which is not [batch, tokens, hidden]"
    return f"takes {taken} and gives {shape}, not the same [batch, tokens, hidden]"


def _check_same_tokens(call: Call, hidden: Seen, layout: Layout) -> None:
    """Raise LayoutError for a block that changes the number of tokens, as pooling does."""
    tokens, returned = hidden.shape[1], _first(call.output)[1]
    if tokens != returned:
        raise refused(layout, call.name, f"takes {tokens} tokens and gives {returned}")


def _first(output: Any) -> tuple[int, ...]:
    """The shape of an output's first tensor, which is the hidden state by convention; () if there is none."""
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output.shape if isinstance(output, Seen) else ()


def _places(call: Call) -> list[tuple[Key, Seen]]:
    """The tensors that are direct arguments of a call, with their position or name."""
    arguments: list[tuple[Key, Any]] = [*enumerate(call.arguments), *call.keywords.items()]
    return [(key, value) for key, value in arguments if isinstance(value, Seen)]


def _only_call(trace: Trace, name: str, layout: Layout) -> Call:
    """The one call of a block. Raises LayoutError for a block that a forward calls several times, or never."""
    calls = trace.of(name)
    if len(calls) != 1:
        raise refused(layout, name, f"is called {len(calls)} times in a forward")
    return calls[0]


def _attends_to_itself(attention: Attention, call: Call, trace: Trace) -> bool:
    """Whether attention is self-attention: queries and keys are computed from a common input of the layer."""
    if attention.query.shape[-2] != attention.key.shape[-2]:
        return False
    queries, keys = (trace.computed_from(seen, call.inputs()) for seen in (attention.query, attention.key))
    return queries == keys == set() or bool(queries & keys)


def refused(layout: Layout, name: str, why: str) -> LayoutError:
    """The error for a module whose tokens can't be split, with a layout to use instead."""
    return LayoutError(
        f'layout "{layout}": {name} {why}, so its tokens can\'t be split; use dp{layout.size} or fsdp{layout.size}'
    )


def _along(block: nn.Module, call: Call, hidden: Key) -> tuple[Key, ...]:
    """Arguments with a row for each token at dimension 1, except masks, which attention needs whole."""
    names = list(inspect.signature(block.forward).parameters)
    named = {key: names[key] if isinstance(key, int) and key < len(names) else str(key) for key, _ in _all(call)}
    tokens = dict(_places(call))[hidden].shape[1]
    return tuple(
        key for key, value in _all(call) if key != hidden and "mask" not in named[key] and _has_rows(value, tokens)
    )


def _all(call: Call) -> list[tuple[Key, Any]]:
    return [*enumerate(call.arguments), *call.keywords.items()]


def _has_rows(value: Any, tokens: int) -> bool:
    """Whether a value is a tensor [.., tokens] or [.., tokens, ..], or a nest of such: rotary tables are pairs."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(_has_rows(inner, tokens) for inner in value)
    return isinstance(value, Seen) and len(value.shape) in (2, 3) and value.shape[1] == tokens
