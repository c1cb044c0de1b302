"""Sequence parallel: outside the sliced layers of the blocks, each tensor rank holds a part of the tokens.

Token-wise work there (norms, dropout, residuals) is then computed, and its activations kept, once over the group
instead of on each of its p ranks (Korthikanti et al. 2022, section 4.2).

Hidden states between blocks are [batch, tokens of this rank, features]. At each sliced unit in a block:

    enter   all-gather along the tokens (backward: reduce-scatter, as each rank's gradient is of its own features)
    leave   reduce-scatter along the tokens (backward: all-gather)

which together send as much as the two all-reduces of plain tensor parallel. Parameters that are applied to split
tokens (norms, biases after a row layer) are whole on every rank, and their gradients on a rank come from its tokens
only; `ShardTable.sum_gradients` sums them after backward. An input that enters a block whole (a mask, an encoder's
output) is used by each rank for its own part, so its gradient is summed where the block begins.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.order import bounds
from samestep.errors import LayoutError
from samestep.parallel.attributes import wrap_forward
from samestep.parallel.blocks import repeated_layers, with_forward
from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.collectives import (
    Slices,
    copy_to_region,
    divide_gradient,
    gather_from_region,
    gather_to_region,
    reduce_scatter_to_region,
    scatter_to_region,
)
from samestep.parallel.context.gathered import (
    Gathered,
    TokenExchange,
    find_gathered,
    give_all_tokens,
    mixes_in_training,
)
from samestep.parallel.context.hidden import keeps_tokens, used_between
from samestep.parallel.exact.forward_context import ForwardContext, NotesTokens, Portion
from samestep.torch_internals import pytree

Key = int | str  # position or keyword of an argument


class Stream:
    """The split tokens of one list of blocks, and the hooks that split, count and gather them."""

    def __init__(self, names: Sequence[str], trace: Trace, group: dist.ProcessGroup, dim: int, layout: str) -> None:
        self.names = names
        self.dim = dim  # of the tokens in the hidden states
        self.total = 0  # tokens over all ranks, in the block that is running
        self.gathered: list[Gathered] = []  # modules in the blocks that get all tokens
        self._group = group
        self._layout = layout
        self._calls = [_only_call(name, trace, layout) for name in names]
        # The argument of a block, and the leaf of a block's output, that is the hidden state.
        self._key, self._leaf = _find_hidden(self._calls, layout)
        self._outside = {
            name: {seen.identity for seen in call.inputs()} - {_given(call, self._key).identity}
            for name, call in zip(names, self._calls, strict=True)
        }
        # Tensors that a block returns besides the hidden state, for the next block, such as attention biases.
        self._handed = {seen.identity for call in self._calls for seen in call.outputs()}
        self._summed = [self._places_summed(call) for call in self._calls]
        _check_passed_on(self._calls, self._key, layout)

    def holds(self, name: str) -> bool:
        """Whether a module computes on this rank's tokens only."""
        everything = any(f"{name}.".startswith(f"{call.name}.") for call in self.gathered)
        return self._block_of(name) is not None and not everything

    def find_gathered(self, trace: Trace, slices: Sequence[str]) -> None:
        """Find the modules that combine tokens, other than sliced attentions, which gather all tokens themselves.

        `slices`: the names of the sliced modules.
        """
        if self.dim != 1:
            self._check_training(self._calls)
            return
        for block in self._calls:
            hidden = _given(block, self._key)
            tokens = hidden.shape[self.dim]
            gathered = find_gathered(block, trace, tokens, hidden, (), attentions=True, handed=self._handed)
            if gathered is None:  # a comparison shows what other functions mix
                self._check_training([block])
            self.gathered += [
                call for call in gathered or () if not any(f"{s}.".startswith(f"{call.name}.") for s in slices)
            ]

    def _check_training(self, blocks: Sequence[Call]) -> None:
        """Raise LayoutError for blocks in which tokens meet in training alone, and that can't get all of them."""
        for block in blocks:
            if mixes_in_training(block):
                raise LayoutError(
                    f'layout "{self._layout}": {block.name} takes statistics of all tokens, of which a rank has '
                    "some; use sequence=whole"
                )

    def is_outside(self, name: str, identity: int | None) -> bool:
        """Whether a module's input entered the block whole (a mask, an encoder's output)."""
        block = self._block_of(name)
        return block is None or identity in self._outside[block]

    def is_summed(self, name: str, identity: int | None) -> bool:
        """Whether the gradient of an input is summed over the ranks where its block begins, for all of its uses."""
        return self._block_of(name) is not None and self.is_outside(name, identity) and identity not in self._handed

    def summed(self) -> list[Seen]:
        """What blocks are given, the hidden states as well, whose gradients are summed where it enters a block."""
        hidden = {_given(call, self._key).identity for call in self._calls}
        return [
            seen
            for call in self._calls
            for seen in call.inputs()
            if seen.identity in hidden or seen.identity not in self._handed
        ]

    def _places_summed(self, call: Call) -> frozenset[Any]:
        """The pytree paths in a block's arguments of tensors from before the blocks, which are whole: masks, say."""
        hidden = _given(call, self._key).identity
        leaves = pytree.tree_leaves_with_path(
            (call.arguments, dict(call.keywords)), is_leaf=lambda value: isinstance(value, Seen)
        )
        return frozenset(
            path
            for path, seen in leaves
            if isinstance(seen, Seen) and seen.identity != hidden and seen.identity not in self._handed
        )

    def gather(self, x: Tensor) -> Tensor:
        return gather_to_region(x, Slices.even(self.total, self._group), self.dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return reduce_scatter_to_region(x, Slices.even(x.shape[self.dim], self._group), self.dim)

    def attach(self, model: nn.Module, forward_context: ForwardContext) -> None:
        """Add the hooks that split the tokens before the first block and gather them after the last one."""
        blocks = [model.get_submodule(name) for name in self.names]
        blocks[0].register_forward_pre_hook(NotesTokens(self._note), with_kwargs=True)
        blocks[0].register_forward_pre_hook(self._split, with_kwargs=True)
        for block, summed in zip(blocks, self._summed, strict=True):
            block.register_forward_pre_hook(self._tell_total, with_kwargs=True)
            self._wrap(block, summed, forward_context)
        messages = TokenExchange(
            own=self._own,
            gather=self._gather_tokens,
            split=self._split_tokens,
            # Gradients of the block's parameters and of tensors from before the blocks are summed over the ranks
            # afterwards, so each rank takes a share of the gradient.
            share=lambda whole, handed: whole if handed else divide_gradient(whole, self._group),
        )
        for call in self.gathered:
            give_all_tokens(model.get_submodule(call.name), call, messages, forward_context)
        # The split is the last pre-hook of the first block, so the gather is the first hook of the last block: other
        # hooks that split the hidden state before this one gather it after.
        blocks[-1].register_forward_hook(self._gather_output, prepend=True)

    def _wrap(self, block: nn.Module, summed: frozenset[Any], forward_context: ForwardContext) -> None:
        """Wrap a block's forward: sets the number of tokens, and the position of this rank's for random draws."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)

        # The number is passed as an argument, so that a block that is recomputed in backward gets its own.
        def forward(inner: Callable[..., Any], *arguments: Any, samestep_tokens: int, **keywords: Any) -> Any:
            self.total = samestep_tokens
            arguments, keywords = self._sum_gradients(arguments, keywords, summed)
            if not block.training:
                return inner(*arguments, **keywords)
            # The position of this rank's first token, for draws that depend on the position.
            first, _ = bounds(samestep_tokens, rank, ranks)
            with forward_context.holding(Portion(activations={self.dim: first})):
                return inner(*arguments, **keywords)

        wrap_forward(block, forward)

    def _sum_gradients(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], places: frozenset[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Sum, in backward, the gradients of the tensors at `places` over the ranks.

        Every rank has these tensors whole and uses them for its own tokens, heads or features, so its gradient is a
        part of the sum.
        """
        if not torch.is_grad_enabled():
            return arguments, keywords
        done: dict[int, Tensor] = {}

        def summed(path: Any, leaf: Any) -> Any:
            if path not in places or not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            # One all-reduce per tensor, also where it is passed several times.
            return done.setdefault(id(leaf), copy_to_region(leaf, self._group))

        return pytree.tree_map_with_path(summed, (arguments, keywords))

    def _gather_tokens(self, part: Tensor, dim: int) -> Tensor:
        """All tokens of the block that runs, for replicated computation."""
        return gather_from_region(part, Slices.even(self.total, self._group), dim)

    def _split_tokens(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that every rank has."""
        return scatter_to_region(whole, Slices.even(whole.shape[dim], self._group), dim)

    def _own(self) -> int:
        """The number of this rank's tokens in the block that is running."""
        first, last = bounds(self.total, dist.get_rank(self._group), dist.get_world_size(self._group))
        return last - first

    def _note(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.total = argument(arguments, keywords, self._key).shape[self.dim]

    def _split(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Forward pre-hook of the first block: replaces the hidden state by this rank's tokens of it."""
        hidden = argument(arguments, keywords, self._key)
        return replaced(arguments, keywords, self._key, self._split_tokens(hidden, self.dim))

    def _tell_total(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Forward pre-hook of every block: passes the total number of tokens as an argument."""
        return arguments, {**keywords, "samestep_tokens": self.total}

    def _gather_output(self, block: nn.Module, arguments: Any, output: Any) -> Any:
        """Forward hook of the last block: gathers the hidden state of all tokens."""
        leaves, form = pytree.tree_flatten(output)
        leaves[self._leaf] = self._gather_tokens(leaves[self._leaf], self.dim)
        return pytree.tree_unflatten(leaves, form)

    def _block_of(self, name: str) -> str | None:
        return next((block for block in self.names if f"{name}.".startswith(f"{block}.")), None)


def find_lists(model: nn.Module, blocks: Sequence[str], trace: Trace, layout: str) -> list[list[str]]:
    """Find the lists of blocks that pass on hidden states [batch, tokens, features]; returns the blocks' names.

    If the blocks of a list pass on something else, the lists inside its blocks are tried, such as the layers of a
    stage. Raises LayoutError if no list qualifies.
    """
    names = {module: name for name, module in model.named_modules()}
    callable_blocks = [names[block] for block in with_forward([model.get_submodule(name) for name in blocks])]
    lists: dict[str, list[str]] = {}
    for name in callable_blocks:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    if not lists:
        raise LayoutError(
            f'layout "{layout}": {type(model).__name__} has neither a list of blocks to split tokens in nor modules '
            "outside of the slices that take each token by itself; use sequence=whole"
        )
    streams: list[list[str]] = []
    refused: LayoutError | None = None
    for members in lists.values():
        try:
            _check_list(model, members, callable_blocks, trace, layout)
            streams.append(members)
        except LayoutError as error:
            # The first refusal is told: it is about a list that stands in the model, not about one inside its blocks.
            refused = refused or error
            inner = [layer for name in members for layer in repeated_layers(model.get_submodule(name))]
            if inner:
                with suppress(LayoutError):
                    streams += find_lists(model, [names[layer] for layer in inner], trace, layout)
    if not streams:
        assert refused is not None
        raise refused
    return streams


def _check_list(model: nn.Module, names: Sequence[str], blocks: Sequence[str], trace: Trace, layout: str) -> None:
    """Raise LayoutError if the tokens of a list of blocks can't be split."""
    used_outside = trace.used_outside(model, [*names, *blocks])
    if used_outside is not None:
        raise LayoutError(
            f'layout "{layout}": {used_outside} is also used outside of its block, on all tokens, and in it on some; '
            "use sequence=whole"
        )
    if len(names) < 2:
        raise LayoutError(f'layout "{layout}": {names[0]} is alone in its list; use sequence=whole')
    calls = [_only_call(name, trace, layout) for name in names]
    _find_hidden(calls, layout)
    giving = used_between(calls, trace)
    if giving is not None:
        raise LayoutError(
            f'layout "{layout}": {giving} gives more than a hidden state, which is used outside of the blocks; use '
            "sequence=whole"
        )
    changing = next((name for name in names if not keeps_tokens(trace, name)), None)
    if changing is not None:
        raise LayoutError(f'layout "{layout}": {changing} gives other tokens than it takes; use sequence=whole')


def argument(arguments: Sequence[Any], keywords: Mapping[str, Any], key: Key) -> Any:
    """An argument of a call by its position or keyword; None if the call doesn't have it."""
    if isinstance(key, str):
        return keywords.get(key)
    return arguments[key] if key < len(arguments) else None


def replaced(arguments: tuple[Any, ...], keywords: Mapping[str, Any], key: Key, value: Any) -> Any:
    """The arguments of a call with the one at `key` replaced by `value`."""
    if isinstance(key, str):
        return arguments, {**keywords, key: value}
    return (*arguments[:key], value, *arguments[key + 1 :]), dict(keywords)


def keys_of(call: Call, identity: int | None) -> list[Key]:
    """The positions and keywords at which a call was given a tensor."""
    arguments: list[tuple[Key, Any]] = [*enumerate(call.arguments), *call.keywords.items()]
    return [key for key, value in arguments if isinstance(value, Seen) and value.identity == identity]


def _only_call(name: str, trace: Trace, layout: str) -> Call:
    """The only call of a block in the trace. Raises LayoutError if it has none or several."""
    calls = trace.of(name)
    if len(calls) != 1:
        raise LayoutError(
            f'layout "{layout}": {name} is called {len(calls)} times in a forward, and sequence=split is for blocks '
            "that are called once; use sequence=whole"
        )
    return calls[0]


def _find_hidden(calls: Sequence[Call], layout: str) -> tuple[Key, int]:
    """Find the block argument that is the hidden state, and the leaf of the previous block's output that it is.

    Raises LayoutError if the blocks do not pass on a tensor [batch, tokens, features].
    """
    before, block = calls[0], calls[1]
    leaves = pytree.tree_leaves(before.output, is_leaf=lambda value: isinstance(value, Seen))
    for index, seen in enumerate(leaves):
        if isinstance(seen, Seen) and len(seen.shape) == 3:
            for key in keys_of(block, seen.identity):
                first = _given(before, key)
                if isinstance(first, Seen) and all(_hands_on(*pair, key, index) for pair in pairwise(calls)):
                    return key, index
    raise LayoutError(
        f'layout "{layout}": {before.name} gives no [batch, tokens, features] that {block.name} takes as it is, '
        "so there are no tokens to split between them; use sequence=whole"
    )


def _hands_on(before: Call, block: Call, key: Key, index: int) -> bool:
    """Whether a block's argument `key` is the very tensor that is leaf `index` of the previous block's output."""
    leaves = pytree.tree_leaves(before.output, is_leaf=lambda value: isinstance(value, Seen))
    taken = _given(block, key)
    made = leaves[index] if index < len(leaves) else None
    return isinstance(taken, Seen) and isinstance(made, Seen) and taken.identity == made.identity


def _check_passed_on(calls: Sequence[Call], key: Key, layout: str) -> None:
    """Raise LayoutError if blocks return, unchanged, an input from before the blocks that has a gradient."""
    inputs = {seen.identity for seen in calls[0].inputs() if seen.source is not None} - {
        _given(calls[0], key).identity
    }
    passed = next((call for call in calls[:-1] if inputs & {seen.identity for seen in call.outputs()}), None)
    if passed is not None:
        raise LayoutError(
            f'layout "{layout}": {passed.name} passes on more than the hidden state that it was given, so gradients '
            "of that would be added up twice; use sequence=whole"
        )


def _given(call: Call, key: Key) -> Any:
    return argument(call.arguments, call.keywords, key)


def token_dim(model: nn.Module, names: Sequence[str]) -> int:
    """The dimension of tokens: 0 if the blocks have an nn.MultiheadAttention without `batch_first`, else 1."""
    attentions = [
        m for name in names for m in model.get_submodule(name).modules() if isinstance(m, nn.MultiheadAttention)
    ]
    return 0 if attentions and not attentions[0].batch_first else 1
