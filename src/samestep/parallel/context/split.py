"""Context parallel: each rank has a part of the tokens, and attention exchanges heads for tokens.

From the first block of a list to the last a rank works on its own tokens. Attention needs all of them: see
attention.py. So do other modules in which tokens meet: see gathered.py. Where a list of blocks can't be split, lists
in its blocks may (the layers of a stage, between two of which patches are merged), and modules that take each token
by itself: see token_wise.py. The tokens are put together after each, and whatever lies between has all of them.

On a rank, hidden states are [batch, own tokens, features] between the first block's beginning and the last one's end,
and [batch, tokens, features] elsewhere. Parameters of blocks get gradients of own tokens alone, so they are written
into the table (`add_sum`); those of modules that get all tokens have whole gradients on every rank, and aren't.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError, first_line
from samestep.layout import Layout
from samestep.parallel.attributes import Attributes, wrap_forward
from samestep.parallel.blocks import repeated_layers, with_forward
from samestep.parallel.calls import Trace
from samestep.parallel.collectives import copy_to_region, divide_gradient, gather_from_region, scatter_to_region
from samestep.parallel.context.attention import AttentionOverAll, Length
from samestep.parallel.context.gathered import TokenExchange, give_all_tokens, parameters_in
from samestep.parallel.context.hidden import Block, Key, keeps_tokens, look, refused
from samestep.parallel.context.ring import check_ring
from samestep.parallel.context.shares import Shares, own_part
from samestep.parallel.context.token_wise import Run, find_token_wise, names_of, runs_of, split_run
from samestep.parallel.exact.forward_context import ForwardContext, NotesTokens, Portion
from samestep.parallel.loss.vocabulary import agree
from samestep.parallel.sharding import ShardTable
from samestep.parallel.tensor.compare import Output, alike_numbers, output_of, without_graph
from samestep.parallel.tensor.gradients import Digests, can_compare, differing, digests_of, keeping_graph
from samestep.parallel.variation import varied
from samestep.torch_internals import pytree


def split_tokens(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    trace: Trace,
    mesh: Mesh,
    parts: ShardTable,
    forward_context: ForwardContext,
    *,
    example: Any,
    fill: Callable[[], None],
    precisely: Callable[[], AbstractContextManager[None]],
) -> list[str]:
    """Make what can of a model work on this rank's tokens: which modules. Raises LayoutError where nothing can.

    Embeddings before the blocks, and what stands after them, see all tokens on every rank. So do modules in the
    blocks in which tokens meet otherwise than in PyTorch's attention; which ones is said on standard error. The
    model's output for the example is held against that of before. `fill` gives parameters on the meta device their
    values, without which outputs can't be compared; `precisely` is the mode in which the model is computed, which
    values must not be computed in.
    """
    layout, group = parts.layout, mesh.group("context")
    check_ring(layout, trace)
    shares = Shares(group=group, zigzag=layout.attention == "ring")
    names = {module: name for name, module in model.named_modules()}
    lists: dict[str, list[str]] = {}
    for block in with_forward(blocks):
        lists.setdefault(names[block].rpartition(".")[0], []).append(names[block])
    splitter = _Splitter(
        model=model,
        trace=trace,
        shares=shares,
        layout=layout,
        forward_context=forward_context,
        example=example,
        fill=fill,
        precisely=precisely,
    )
    try:
        # All lists together take one comparison of outputs; the search takes one for each attempt.
        splitter.take(list(lists.values()))
    except LayoutError:
        splitter.search(list(lists.values()))
        if not splitter.names() and not repeated_layers(model):
            raise refused(layout, type(model).__name__, _NOTHING) from None
        if not splitter.names():
            raise
    # Outside of the split modules every rank computes all tokens, so gradients there are whole already: a sum
    # over ranks would count them several times.
    for name in splitter.summed(splitter.names(), splitter.blocks):
        parts.add_sum(name, group)
    told = splitter.said()
    if told and dist.get_rank() == 0:
        print(f'samestep: layout "{layout}": {told}', file=sys.stderr, flush=True)
    return splitter.names()


_LARGE = 2**30  # bytes of parameters that a rank holds for a comparison of outputs
_NOTHING = "has neither layers that hand on hidden states nor modules that take each token by itself"


@dataclass(kw_only=True)
class _Splitter:
    """Splits the tokens of as many modules as possible without changing the model's output.

    Each attempt changes the model, compares its output, and restores the model if it differs (`_held`). All ranks of
    the context axis make the same attempts in the same order, since the compared forwards send messages.
    """

    model: nn.Module
    trace: Trace
    shares: Shares
    layout: Layout
    forward_context: ForwardContext
    example: Any
    fill: Callable[[], None]
    precisely: Callable[[], AbstractContextManager[None]]
    blocks: list[Block] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    partly: bool = False  # whether there are lists of blocks that can't be split

    def names(self) -> list[str]:
        """The modules that work on this rank's tokens."""
        return [*(block.name for block in self.blocks), *names_of(self.runs)]

    @cached_property
    def _expected(self) -> tuple[Output, Digests | None]:
        """What the model gives before anything is split; without gradients if they can't be compared."""
        expected: tuple[Output, Digests | None] | None = None
        if can_compare(self.model):
            # A model's own code may raise anything where it is in evaluation mode and gradients are kept.
            with suppress(Exception):
                expected = self._output(True)
            device = next(self.model.parameters()).device
            expected = expected if agree(expected is not None, self.shares.group, device) else None
        return self._output(False) if expected is None else expected

    @property
    def _recomputed(self) -> list[nn.Module]:
        """The blocks whose activations the layout doesn't keep either."""
        return [] if self.layout.recompute == "none" else with_forward(repeated_layers(self.model))

    def take(self, lists: Sequence[Sequence[str]]) -> None:
        """Split the tokens of some lists of blocks. Raises LayoutError, with the model unchanged, if that fails."""
        outside = self.trace.used_outside(self.model, [*self.names(), *(name for names in lists for name in names)])
        if outside is not None:
            raise refused(self.layout, outside, "is also used outside of its block, on all tokens")
        blocks = [look(self.model, names, self.trace, self.layout) for names in lists]
        if not blocks:
            raise refused(self.layout, type(self.model).__name__, _NOTHING)
        try:
            # A comparison needs all values on every rank: a large model does without, if its tokens meet in PyTorch's
            # attention alone.
            if self._is_usual(blocks) and self._is_large():
                self._split_lists(blocks)
            else:
                self._hold(blocks, lambda: self._split_lists(blocks))
        except LayoutError:  # such as attention that makes its own mask or bias of as many tokens as it sees
            blocks = [look(self.model, names, self.trace, self.layout, whole=True) for names in lists]
            self._hold(blocks, lambda: self._split_lists(blocks))
        self.blocks += [block for chain in blocks for block in chain]

    def search(self, lists: Sequence[Sequence[str]]) -> None:
        """Split single lists, lists within blocks or token-wise modules, if the lists can't be split together."""
        self.partly = True
        lists_of_blocks = [self._search(names) for names in lists]
        if not self.names():
            lists_of_blocks = [[""]]
        self._take_token_wise([name for names in lists_of_blocks for name in names])

    def _search(self, names: Sequence[str]) -> list[str]:
        """Split a list: runs of blocks that keep their tokens, or lists within blocks. Returns unsplit modules."""
        left: list[str] = []
        for keep, row in groupby(names, key=lambda name: keeps_tokens(self.trace, name)):
            some = list(row)
            try:
                if not keep:
                    raise refused(self.layout, some[0], "gives other tokens than it takes")
                self.take([some])
            except LayoutError:
                left += some
        inner: dict[str, list[str]] = {}
        without: list[str] = []
        for name in left:
            modules = {
                module: f"{name}.{inside}" for inside, module in self.model.get_submodule(name).named_modules()
            }
            layers = [modules[layer] for layer in with_forward(repeated_layers(self.model.get_submodule(name)))]
            for layer in layers:
                inner.setdefault(layer.rpartition(".")[0], []).append(layer)
            without += [] if layers else [name]
        return [*without, *(name for names_inside in inner.values() for name in self._search(names_inside))]

    def _take_token_wise(self, under: Sequence[str]) -> None:
        """Split token-wise modules: first in runs of consecutive ones, then each alone."""
        self.fill()
        with self.precisely():
            modules = find_token_wise(self.model, under, self.trace, self.names())
        apart = [[module] for module in modules]
        # In a pipeline, consecutive modules may be in different stages.
        for runs in [apart] if self.layout.pipeline > 1 else [runs_of(modules, self.trace), apart]:
            try:
                self._held(
                    partial(self._split_runs, runs), self.summed([*self.names(), *names_of(runs)], self.blocks)
                )
            except LayoutError:
                continue
            self.runs += runs
            return

    def _is_usual(self, chains: Sequence[Sequence[Block]]) -> bool:
        """Whether there is one list of blocks, in which only PyTorch's attention mixes tokens."""
        return len(chains) == 1 and not any(block.gathered for block in chains[0])

    def _is_large(self) -> bool:
        """Whether the model is on the meta device and too large to be filled on one rank for a comparison."""
        held = [parameter for parameter in self.model.parameters() if parameter.is_meta]
        return sum(parameter.numel() * parameter.element_size() for parameter in held) > _LARGE

    def _split_lists(self, chains: Sequence[Sequence[Block]]) -> None:
        for chain in chains:
            _split_chain(self.model, chain, self.shares, self.forward_context)

    def _split_runs(self, runs: Sequence[Run]) -> None:
        for run in runs:
            split_run(self.model, run, self.shares, self.forward_context)

    def summed(self, names: Sequence[str], blocks: Sequence[Block]) -> list[str]:
        """The parameters of split modules of which a rank's gradient is of its own tokens only."""
        of_all_tokens = parameters_in(self.model, [call for block in blocks for call in block.gathered])
        own = {parameter: name for name, parameter in self.model.named_parameters()}
        held = dict.fromkeys(p for name in names for p in self.model.get_submodule(name).parameters())
        return [own[parameter] for parameter in held if parameter not in of_all_tokens and parameter in own]

    def _hold(self, chains: Sequence[Sequence[Block]], change: Callable[[], None]) -> None:
        blocks = [*self.blocks, *(block for chain in chains for block in chain)]
        self._held(change, self.summed([*(block.name for block in blocks), *names_of(self.runs)], blocks))

    def _held(self, change: Callable[[], None], summed: Sequence[str]) -> None:
        """Change the model. Raises LayoutError, with the change undone, if output or gradients differ or it fails.

        `summed`: the parameters whose gradients will be summed over the ranks.
        """
        self.fill()
        (expected, gradients), before = self._expected, Attributes(self.model)
        why = "gives another output"
        change()
        wrong: list[str] = []
        try:
            output, digests = self._output(gradients is not None)
            alike = alike_numbers(output.numbers, expected.numbers)
        except Exception as error:  # whatever a model's own code raises for sizes that it doesn't know
            alike, digests, why = False, None, f"fails ({type(error).__name__}: {first_line(error)})"
        device = next(self.model.parameters()).device
        alike = agree(alike, self.shares.group, device)
        if alike and gradients is not None and digests is not None:
            wrong = differing(self.model, gradients, digests, self.shares.group, summed=summed)
            why = f"gives another gradient of {', '.join(wrong[:1])}"
        if not alike or wrong:
            before.restore()
            size = self.layout.size
            raise LayoutError(
                f'layout "{self.layout}": {type(self.model).__name__} {why} where each rank has a part of the '
                f"tokens; use dp{size} or fsdp{size}"
            )

    def _output(self, with_gradients: bool) -> tuple[Output, Digests | None]:
        """The model's output and marks for the example, with every constant parameter varied, and its gradients."""
        with self.precisely(), varied(self.model):
            if not with_gradients:
                with torch.no_grad():
                    return output_of(self.model, self.example), None
            with keeping_graph(self.model, self._recomputed):
                output = output_of(self.model, self.example)
                return without_graph(output), digests_of(self.model, output.numbers)

    def said(self) -> str:
        """Describe to the user which modules every rank computes for all tokens."""
        gathered = dict.fromkeys(_pattern(call.name) for block in self.blocks for call in block.gathered)
        lines = [f"every rank computes all tokens of {', '.join(gathered)}, in which tokens meet"] if gathered else []
        if self.partly:
            alone = dict.fromkeys(map(_pattern, self.names()))
            lines.append(f"tokens are split in {', '.join(alone)}, and every rank computes all of them in the rest")
        return "; ".join(lines)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _split_chain(model: nn.Module, chain: Sequence[Block], shares: Shares, forward_context: ForwardContext) -> None:
    """Split the tokens of one list: split before the first block, own tokens in each, gather after the last."""
    length = Length(forward_context, shares)
    for block in chain:
        mode = AttentionOverAll(shares, length, forward_context, block.crossing)
        messages = _messages(shares, length, mode)
        for piece in block.gathered:
            give_all_tokens(model.get_submodule(piece.name), piece, messages, forward_context)
        wrap_forward(block.module, _on_own_tokens(block, shares, length, forward_context, mode))
    _at_the_edges([block.module for block in chain], chain[0].hidden, shares, length)


def _messages(shares: Shares, length: Length, mode: AttentionOverAll) -> TokenExchange:
    """The messages of modules that get all tokens, over the context axis."""
    return TokenExchange(
        own=lambda: shares.length(length.tokens),
        gather=lambda part, dim: gather_from_region(part, shares.of(length.tokens), dim),
        split=lambda whole, dim: scatter_to_region(whole, shares.of(whole.shape[dim]), dim),
        share=lambda whole, _: divide_gradient(whole, shares.group),
        pause=mode.paused,
    )


def _at_the_edges(blocks: Sequence[nn.Module], hidden: Key, shares: Shares, length: Length) -> None:
    """Split the hidden state before the first block, and gather it after the last."""

    def note(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        length.note(_get(arguments, keywords, hidden).shape[1])

    def before(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return _with(arguments, keywords, {hidden: partial(_scatter, shares=shares)})

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return type(output)((gather_from_region(output[0], shares.of(length.tokens), 1), *output[1:]))
        return gather_from_region(output, shares.of(length.tokens), 1)

    blocks[0].register_forward_pre_hook(NotesTokens(note), with_kwargs=True)
    blocks[0].register_forward_pre_hook(before, with_kwargs=True)
    blocks[-1].register_forward_hook(after)


def _on_own_tokens(
    which: Block,
    shares: Shares,
    length: Length,
    forward_context: ForwardContext,
    mode: AttentionOverAll,
) -> Callable[..., Any]:
    """Make the wrapper of a block's forward: further arguments are cut to this rank's tokens, attention spans all."""
    pieces = partial(_own_tokens, shares=shares)
    cut = {which.hidden, *which.along}

    def on_own_tokens(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        arguments = tuple(v if key in cut else _summed(v, shares.group) for key, v in enumerate(arguments))
        keywords = {key: v if key in cut else _summed(v, shares.group) for key, v in keywords.items()}
        arguments, keywords = _with(arguments, keywords, dict.fromkeys(which.along, pieces))
        positions = length.positions((arguments, keywords))
        with forward_context.holding(Portion(activations={1: positions})), mode:
            mode.begin()
            return forward(*arguments, **keywords)

    return on_own_tokens


def _summed(value: Any, group: dist.ProcessGroup) -> Any:
    """Sum the gradients of tensors that all ranks have whole, such as an encoder's output, over the ranks."""

    def summed(tensor: Tensor) -> Tensor:
        return copy_to_region(tensor, group) if tensor.requires_grad and torch.is_grad_enabled() else tensor

    return pytree.tree_map_only(Tensor, summed, value)


def _own_tokens(tokens: Tensor, shares: Shares) -> Tensor:
    """This rank's tokens; the backward of a tensor that needs a gradient gathers all ranks' parts."""
    return _scatter(tokens, shares) if tokens.requires_grad else own_part(tokens, shares)


def _scatter(whole: Tensor, shares: Shares) -> Tensor:
    """This rank's tokens of [batch, tokens, ...]."""
    return scatter_to_region(whole, shares.of(whole.shape[1]), 1)


def _get(arguments: tuple[Any, ...], keywords: Mapping[str, Any], key: Key) -> Any:
    return arguments[key] if isinstance(key, int) else keywords[key]


def _with(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], changes: Mapping[Key, Callable[[Tensor], Tensor]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply a function to some arguments, which are tensors or tuples of tensors."""
    positions, named = list(arguments), dict(keywords)
    for key, change in changes.items():
        holder: Any = positions if isinstance(key, int) else named
        value = holder[key]
        holder[key] = tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
    return tuple(positions), named
