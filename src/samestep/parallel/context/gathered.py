"""Modules of a block that get all tokens, since they mix tokens in other ways than PyTorch's attention.

Examples are attentions that compute their scores themselves, nn.MultiheadAttention, convolutions over tokens, and
mixers of state-space models. Every rank gathers the tokens before such a module, computes it for all tokens, and
continues with its own: the rest of the block is distributed, these modules are not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.parallel.attributes import wrap_forward
from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.exact.forward_context import ForwardContext, Portion
from samestep.parallel.recorder import along
from samestep.torch_internals import pytree

# Functions other than attention that may mix tokens.
MIXES_TOKENS = (
    "batch_norm",
    "multi_head_attention_forward",
    "conv1d",
    "conv2d",
    "flip",
    "group_norm",
    "gru",
    "instance_norm",
    "lstm",
    "pad",
    "roll",
)

# Those of them that mix tokens in training alone, which a comparison in evaluation mode would not show.
IN_TRAINING = ("batch_norm", "instance_norm")

# Products that may mix tokens in blocks that call none of the above, such as attention with sinks.
_PRODUCTS = ("__matmul__", "baddbmm", "bmm", "einsum", "matmul")


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A module that gets all tokens, and the leaves of its arguments and output with tokens -> their dimension.

    Indices are those of `pytree.tree_leaves` of (arguments, keywords) and of the output.
    """

    name: str
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    handed: frozenset[int]  # leaves of its arguments that an earlier block computed, whole on every rank


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """A layout's functions to gather and split the tokens of the running block."""

    own: Callable[[], int]  # the number of this rank's tokens
    gather: Callable[[Tensor, int], Tensor]  # gathers all tokens along a dimension, for replicated computation
    split: Callable[[Tensor, int], Tensor]  # takes this rank's tokens
    # For other inputs, whole on every rank, whose gradients are summed over the ranks afterwards: scales the gradient
    # to this rank's share. True: an earlier block computed the tensor.
    share: Callable[[Tensor, bool], Tensor]
    pause: Callable[[], AbstractContextManager[Any]] = nullcontext  # while a module has all tokens


def mixing(call: Call, tokens: int) -> str | None:
    """The name of a function in a call that may mix tokens; None if there is none."""
    names = (*MIXES_TOKENS, along("softmax", tokens), along("cumsum", tokens))
    transforms = (name for name in call.functions if name.startswith("fft_"))
    return next((name for name in (*names, *transforms) if call.functions.get(name)), None)


def mixes_in_training(call: Call) -> bool:
    return any(call.functions.get(name) for name in IN_TRAINING)


def _mixes(call: Call, tokens: int) -> bool:
    """Whether a module may mix tokens: by such a function, or because it takes tokens as features."""
    return mixing(call, tokens) is not None or any(_token_dim(seen, tokens) == 2 for seen in call.inputs())


def find_gathered(
    block: Call,
    trace: Trace,
    tokens: int,
    hidden: Seen,
    along: Sequence[Seen],
    *,
    attentions: bool,
    products: bool = False,
    handed: Collection[int] = (),
) -> list[Gathered] | None:
    """The modules directly in a block in which tokens meet; None where they meet in the block's own forward.

    `hidden` is the block's hidden state, and `along` are those of its further arguments that have a row a token, of
    which a rank gets its own. `attentions`:
    also those that PyTorch's attention is called in. `products`: also those that multiply matrices themselves, in
    which tokens may meet; these are taken in any case where a block has nothing else.
    """
    children = children_of(block, trace)
    gathered = [
        child
        for child in children
        if _mixes(child, tokens) or (attentions and _attends(child)) or (products and _multiplies(child))
    ]
    if mixing(block, tokens) and not any(mixing(child, tokens) for child in children):
        return None
    if not gathered and not _attends(block):
        gathered = [child for child in children if _multiplies(child)]
    # Of an input without a dimension of tokens, such as [batch * tokens, features], they can't get all.
    if any(mixes_in_training(child) and not any(_token_dim(s, tokens) for s in child.inputs()) for child in gathered):
        return None
    cut = {seen.identity for seen in along}
    whole = {seen.identity for seen in block.inputs()} - cut
    batch = block.outputs()[0].shape[0] if block.outputs() and block.outputs()[0].shape else 1
    return [
        Gathered(
            name=call.name,
            inputs=_carrying((call.arguments, dict(call.keywords)), tokens, batch, cut, whole - {hidden.identity}),
            outputs=_carrying(call.output, tokens, batch, set(), set()),
            handed=_places_of((call.arguments, dict(call.keywords)), handed),
        )
        for call in gathered
    ]


def children_of(call: Call, trace: Trace) -> list[Call]:
    """The direct child calls of a call."""
    inside = [inner for inner in trace.calls if call.began < inner.began and inner.ended < call.ended]
    children: list[Call] = []
    for inner in inside:  # in the order in which they began
        if not children or inner.began > children[-1].ended:
            children.append(inner)
    return children


def whole_and_used(call: Call, block: Call, trace: Trace, tokens: int) -> bool:
    """Whether a module has an output other than tokens that needs a gradient and is used later in the block.

    Such an output is whole on every rank, and its use for a rank's own tokens would give a part of its gradient.
    """
    others = [seen for seen in call.outputs() if seen.source is not None and _token_dim(seen, tokens) is None]
    return any(call.ended < trace.last_uses.get(seen.identity, 0) < block.ended for seen in others)


def _multiplies(call: Call) -> bool:
    return any(call.functions.get(name) for name in _PRODUCTS)


def _attends(call: Call) -> bool:
    return bool(call.functions.get("scaled_dot_product_attention"))


def _carrying(nest: Any, tokens: int, batch: int, cut: set[int], whole: set[int]) -> dict[int, int]:
    """The leaves of a nest that have this rank's tokens -> their dimension of tokens.

    A tensor with more rows than the batch has samples, such as [batch * heads, tokens, tokens], is a bias.
    """
    leaves = pytree.tree_leaves(nest, is_leaf=lambda value: isinstance(value, Seen))
    sources: dict[int, int] = {}
    for index, seen in enumerate(leaves):
        if isinstance(seen, Seen) and seen.identity not in whole:
            dim = 1 if seen.identity in cut else _token_dim(seen, tokens)
            if dim is not None and (seen.identity in cut or seen.shape[0] in (1, batch)):
                sources[index] = dim
    return sources


def _places_of(nest: Any, identities: Collection[int]) -> frozenset[int]:
    """The indices of the leaves of a nest that are tensors with one of these identities."""
    leaves = pytree.tree_leaves(nest, is_leaf=lambda value: isinstance(value, Seen))
    return frozenset(i for i, seen in enumerate(leaves) if isinstance(seen, Seen) and seen.identity in identities)


def _token_dim(seen: Seen, tokens: int) -> int | None:
    """The dimension of tokens in [batch, tokens, features] or [batch, channels, tokens]; None for other shapes."""
    if len(seen.shape) != 3:
        return None
    return next((dim for dim in (1, 2) if seen.shape[dim] == tokens), None)


def give_all_tokens(
    module: nn.Module, which: Gathered, messages: TokenExchange, forward_context: ForwardContext
) -> None:
    """Make a module work on all tokens. Every rank computes the same in it, with the same gradients."""

    def on_all_tokens(inner: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        leaves, form = pytree.tree_flatten((arguments, keywords))
        # A tensor that is given twice is gathered once. It is compared with `is`: the compiler guards the value of
        # id(), and would recompile the block for every tensor.
        taken: list[tuple[Tensor, Tensor]] = []
        for index, leaf in enumerate(leaves):
            if index in which.inputs:
                whole = next((whole for part, whole in taken if part is leaf), None)
                if whole is None:
                    whole = _gathered(leaf, messages, which.inputs[index])
                    taken.append((leaf, whole))
                leaves[index] = whole
            elif isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
                leaves[index] = messages.share(leaf, index in which.handed)
        arguments, keywords = pytree.tree_unflatten(leaves, form)
        with forward_context.holding(Portion()), messages.pause():
            # Whole tokens inside, so draws are those of all tokens and attention is PyTorch's own.
            output = inner(*arguments, **keywords)
        results, form = pytree.tree_flatten(output)  # of all tokens
        for index, dim in which.outputs.items():
            results[index] = messages.split(results[index], dim)
        return pytree.tree_unflatten(results, form)

    wrap_forward(module, on_all_tokens)


def _gathered(tensor: Tensor, messages: TokenExchange, dim: int) -> Tensor:
    """Gather all tokens of a tensor. Raises RuntimeError if it has another length than this rank's tokens."""
    own = messages.own()
    if tensor.shape[dim] != own:  # something that every rank has whole
        raise RuntimeError(f"a module that wants all tokens is given {list(tensor.shape)}, not a rank's {own} tokens")
    return messages.gather(tensor, dim)


def parameters_in(model: nn.Module, gathered: Sequence[Gathered]) -> set[nn.Parameter]:
    """The parameters of gathered modules, whose gradients are whole on every rank."""
    return {parameter for call in gathered for parameter in model.get_submodule(call.name).parameters()}
