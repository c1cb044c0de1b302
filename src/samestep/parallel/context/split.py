"""Context parallel: each rank has a part of the tokens, and attention exchanges heads for tokens.

From the first block to the last a rank works on its own tokens. Attention needs all of them: see attention.py. So do
other modules in which tokens meet: see gathered.py.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import with_forward
from samestep.parallel.calls import Attention, Call, Seen, Trace, seen_in
from samestep.parallel.context.attention import AttentionOverAll, Length
from samestep.parallel.context.gathered import (
    Gathered,
    Messages,
    find_gathered,
    give_all_tokens,
    mixing,
    parameters_in,
    whole_and_used,
)
from samestep.parallel.context.messages import (
    gather,
    gradient_shared,
    gradient_summed,
    own_part,
    part_length,
    split,
)
from samestep.parallel.moment import Now, Portion
from samestep.parallel.parts import Parts
from samestep.parallel.tensor.compare import Output, alike_numbers, output_of
from samestep.parallel.tensor.vocabulary import agree
from samestep.parallel.trace import first_line

Key = str | int  # of an argument: its name, or its position


@dataclass(frozen=True, kw_only=True)
class Block:
    """How a block works on one rank's tokens."""

    module: nn.Module
    hidden: Key  # the argument that is the hidden state
    along: tuple[Key, ...]  # others with a row a token, whole on every rank: positions, rotary tables
    gathered: Sequence[Gathered]  # the modules in it that get all tokens
    crossing: tuple[bool, ...]  # of each call of attention in its order: whether it attends to another sequence


def split_tokens(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    trace: Trace,
    mesh: Mesh,
    parts: Parts,
    now: Now,
    *,
    example: Any,
) -> None:
    """Make the blocks work on this rank's tokens. Raises LayoutError for blocks that carry no tokens.

    Embeddings before the blocks, and what stands after them, see all tokens on every rank. So do modules in the
    blocks in which tokens meet otherwise than in PyTorch's attention; which ones is said on standard error.
    """
    layout, group = parts.layout, mesh.group("context")
    blocks = with_forward(blocks)
    if not blocks:
        raise _refused(layout, type(model).__name__, "has no blocks between which it hands on hidden states")
    names = {module: name for name, module in model.named_modules()}
    chains: dict[str, list[nn.Module]] = {}
    for block in blocks:
        chains.setdefault(names[block].rpartition(".")[0], []).append(block)
    listed = [[names[block] for block in chain] for chain in chains.values()]
    found = [_look(model, chain, trace, layout) for chain in listed]
    used_outside = trace.used_outside(model, [names[block] for block in blocks])
    if used_outside is not None:
        raise _refused(layout, used_outside, "is also used outside of its block, on all tokens")
    if len(found) > 1 or any(block.gathered for chain in found for block in chain):
        with torch.no_grad():
            expected = output_of(model, example)
        held = partial(_hold, model, example, expected, group, layout)
        try:
            _split_chains(model, found, group, now, held=held)
        except LayoutError:  # such as attention that makes its own mask or bias of as many tokens as it sees
            found = [_look(model, chain, trace, layout, whole=True) for chain in listed]
            _split_chains(model, found, group, now, held=held)
    else:
        _split_chains(model, found, group, now)
    gathered = [each for chain in found for block in chain for each in block.gathered]
    of_all_tokens = parameters_in(model, gathered)
    for block in blocks:
        for name, parameter in block.named_parameters(prefix=names[block]):
            if parameter not in of_all_tokens:
                parts.add_sum(name, group)
    if gathered and dist.get_rank() == 0:
        which = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", each.name) for each in gathered)
        text = f"every rank computes all tokens of {', '.join(which)}, in which tokens meet"
        print(f'samestep: layout "{layout}": {text}', file=sys.stderr, flush=True)


def _look(
    model: nn.Module, names: Sequence[str], trace: Trace, layout: Layout, *, whole: bool = False
) -> list[Block]:
    """How each block of a list works on some tokens. Raises LayoutError where one can't.

    `whole`: whatever may be attention gets all tokens, and no heads are exchanged.
    """
    calls = [_only_call(trace, name, layout) for name in names]
    carried, hands_more = find_hidden(calls, layout)
    found: list[Block] = []
    for call, hidden in zip(calls, carried, strict=True):
        module = model.get_submodule(call.name)
        along = _along(module, call, hidden)
        tokens = dict(_places(call))[hidden].shape[1]
        cut = [seen for key in along for seen in seen_in(dict(_all(call))[key])]
        gathered = find_gathered(call, trace, tokens, cut, attentions=hands_more or whole, products=whole)
        if gathered is None:
            raise _refused(layout, call.name, f"calls {mixing(call, tokens)} itself, where tokens meet")
        for each in gathered:
            if whole_and_used(trace.of(each.name)[0], call, trace, tokens):
                raise _refused(layout, each.name, "gives more than tokens, which its block goes on with")
        inside = {each.name for each in gathered}
        attends = [each for each in trace.attentions if call.name in each.modules]
        outside = [each for each in attends if not inside & set(each.modules)]
        if not gathered and not attends:
            raise _refused(layout, call.name, "does not call scaled_dot_product_attention")
        crossing = tuple(not _attends_to_itself(each, call, trace) for each in outside)
        found.append(Block(module=module, hidden=hidden, along=along, gathered=gathered, crossing=crossing))
    return found


def _split_chains(
    model: nn.Module,
    chains: Sequence[Sequence[Block]],
    group: dist.ProcessGroup,
    now: Now,
    held: Callable[[], None] = lambda: None,
) -> None:
    """Make the blocks of every list work on this rank's tokens; leave them as they were where `held` raises."""
    with ExitStack() as undo:
        for chain in chains:
            _split_chain(model, chain, group, now, undo)
        held()
        undo.pop_all()


def _split_chain(
    model: nn.Module, chain: Sequence[Block], group: dist.ProcessGroup, now: Now, undo: ExitStack
) -> None:
    length = Length()
    for block in chain:
        mode = AttentionOverAll(group, length, now, block.crossing)
        messages = _messages(group, length, mode)
        for each in block.gathered:
            module = model.get_submodule(each.name)
            undo.callback(_put_back, module, vars(module).get("forward"))
            give_all_tokens(module, each, messages, now)
        undo.callback(_put_back, block.module, vars(block.module).get("forward"))
        block.module.forward = _on_own_tokens(block.module.forward, block, group, length, now, mode)
    for hook in _at_the_edges([block.module for block in chain], chain[0].hidden, group, length):
        undo.callback(hook.remove)


def _put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """The forward that a module had; None: that of its class."""
    if forward is None:
        del module.forward
    else:
        module.forward = forward


def _messages(group: dist.ProcessGroup, length: Length, mode: AttentionOverAll) -> Messages:
    return Messages(
        own=lambda: part_length(length.tokens, group.size()),
        gather=lambda part, dim: gather(part, group, length.tokens, dim),
        split=lambda whole, dim: split(whole, group, dim),
        share=lambda whole, _: gradient_shared(whole, group),
        pause=mode.paused,
    )


def _hold(model: nn.Module, example: Any, expected: Output, group: dist.ProcessGroup, layout: Layout) -> None:
    """Raise LayoutError where the model gives another output than before for the example, or fails."""
    why = "gives another output"
    try:
        with torch.no_grad():
            found = output_of(model, example)
        alike = alike_numbers(found.numbers, expected.numbers)
    except Exception as error:  # whatever a model's own code raises for sizes that it doesn't know
        alike, why = False, f"fails ({type(error).__name__}: {first_line(error)})"
    if not agree(alike, group, next(model.parameters()).device):
        raise LayoutError(
            f'layout "{layout}": {type(model).__name__} {why} where each rank has a part of the tokens; '
            f"use dp{layout.size} or fsdp{layout.size}"
        )


def find_hidden(calls: Sequence[Call], layout: Layout) -> tuple[list[Key], bool]:
    """Which argument of each block is the hidden state [batch, tokens, hidden]: what the block before it gave.

    And whether blocks hand on more than that, such as relative positions, which no tokens are. Raises LayoutError
    where they hand on anything else.
    """
    found: list[Key] = []
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
            raise _refused(layout, call.name, "gets more from the block before it than one hidden state")
        if not handed or len(_first(call.output)) != 3:
            raise _refused(layout, call.name, _other_shapes(places, call))
        _check_same_tokens(call, dict(places)[handed[0]], layout)
        found.append(handed[0])
    return found, hands_more


def _may_carry_tokens(seen: Seen) -> bool:
    """Whether a tensor may be [batch, tokens, hidden]; one that is square is a bias between tokens."""
    return len(seen.shape) == 3 and seen.shape[1] != seen.shape[2]


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


def _at_the_edges(
    blocks: Sequence[nn.Module], hidden: Key, group: dist.ProcessGroup, length: Length
) -> list[RemovableHandle]:
    """Split the hidden state before the first block, and gather it after the last. Return the hooks."""

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        length.tokens = _get(arguments, keywords, hidden).shape[1]
        return _with(arguments, keywords, {hidden: partial(split, group=group)})

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather(output[0], group, length.tokens), *output[1:])
        return gather(output, group, length.tokens)

    return [
        blocks[0].register_forward_pre_hook(before, with_kwargs=True),
        blocks[-1].register_forward_hook(after),
    ]


def _on_own_tokens(
    forward: Callable[..., Any],
    which: Block,
    group: dist.ProcessGroup,
    length: Length,
    now: Now,
    mode: AttentionOverAll,
) -> Callable[..., Any]:
    """A block's forward with its further arguments cut to this rank's tokens, and attention over all tokens."""
    mine = partial(_own_tokens, group=group)
    cut = {which.hidden, *which.along}

    @wraps(forward)
    def on_own_tokens(*arguments: Any, **keywords: Any) -> Any:
        arguments = tuple(v if key in cut else _summed(v, group) for key, v in enumerate(arguments))
        keywords = {key: v if key in cut else _summed(v, group) for key, v in keywords.items()}
        arguments, keywords = _with(arguments, keywords, dict.fromkeys(which.along, mine))
        first = group.rank() * part_length(length.tokens, group.size())
        with now.holding(Portion(activations={1: first})), mode:
            mode.begin()
            return forward(*arguments, **keywords)

    return on_own_tokens


def _summed(value: Any, group: dist.ProcessGroup) -> Any:
    """What all ranks have whole, such as an encoder's output: its gradient sums up each one's tokens."""

    def summed(tensor: Tensor) -> Tensor:
        return gradient_summed(tensor, group) if tensor.requires_grad and torch.is_grad_enabled() else tensor

    return pytree.tree_map_only(Tensor, summed, value)


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
