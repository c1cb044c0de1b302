"""Token-wise modules: modules that work on each token separately, in models whose layers can't be split as a whole.

Layers whose own code moves tokens about (windows, pooling, recurrences) still have feed-forward parts, projections
and heads that take each token by itself. Of these a rank computes its own tokens: they are split where the first of
modules called one after the other begins, and put together where the last one ends. All the rest is computed with
all tokens on every rank.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from samestep.parallel.attributes import Attributes, in_mode, modules_in, wrap_forward
from samestep.parallel.blocks import has_forward
from samestep.parallel.calls import Call, Seen, Trace
from samestep.parallel.collectives import copy_to_region, gather_from_region, scatter_to_region
from samestep.parallel.context.attention import Length
from samestep.parallel.context.gathered import mixing
from samestep.parallel.context.shares import Shares, own_part
from samestep.parallel.exact.forward_context import ForwardContext, Portion
from samestep.parallel.loss.vocabulary import near
from samestep.parallel.valueless import with_values
from samestep.torch_internals import pytree

_DRAWS_NOTHING = (nn.Linear, nn.LayerNorm, nn.RMSNorm)  # no random numbers, for which positions would count


@dataclass(frozen=True, kw_only=True)
class TokenWise:
    """A module whose output for a part of the tokens is that part of its output for all tokens."""

    name: str
    dim: int  # of the tokens: 1 in [samples, tokens, features], 0 in [tokens, samples, features]
    inputs: frozenset[int]  # leaves of its arguments that have tokens; all leaves of its output have
    handed: frozenset[int] = frozenset()  # leaves that come from the module before it in a run, already split


Run = Sequence[TokenWise]  # modules that pass their tokens from one to the next and to no other


Able = Callable[[str, Sequence[Call]], bool]  # (a module's name, its calls) -> whether its tokens may be split


def multiplies(_: str, calls: Sequence[Call]) -> bool:
    """Whether a module multiplies matrices in every call, so that computing fewer tokens saves time."""
    return all(call.flops_after > call.flops_before for call in calls)


def find_token_wise(
    model: nn.Module,
    under: Sequence[str],
    trace: Trace,
    apart: Collection[str],
    able: Able = multiplies,
) -> list[TokenWise]:
    """The outermost token-wise modules in some modules, of those that are `able`, in the order of the model.

    `apart`: modules whose tokens are split already.
    """
    (whole, *_) = trace.of("")
    samples = next((seen.shape[0] for seen in whole.inputs() if seen.shape), 0)
    modules: dict[str, TokenWise] = {}
    for name in under:
        for module in _outermost(model.get_submodule(name), name, trace, samples, apart, able):
            modules[module.name] = module
    while modules:  # a parameter that all tokens meet as well would get the gradients of both
        outside = trace.used_outside(model, list(modules))
        if outside is None:
            break
        parameter = model.get_parameter(outside)
        holding = [name for name in modules if any(p is parameter for p in model.get_submodule(name).parameters())]
        for name in holding:
            del modules[name]
    return list(modules.values())


def _outermost(
    module: nn.Module, name: str, trace: Trace, samples: int, apart: Collection[str], able: Able
) -> Iterator[TokenWise]:
    """Yield the outermost token-wise modules of a module: itself, or recursively those of its children."""
    if name in apart:
        return
    calls = trace.of(name)
    fit = name and calls and has_forward(module) and able(name, calls)
    token_wise = _look(module, calls, samples) if fit else None
    if token_wise is not None:
        yield token_wise
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, trace, samples, apart, able)


def _look(module: nn.Module, calls: Sequence[Call], samples: int) -> TokenWise | None:
    """Describe a module's tokens if it is token-wise in every call; otherwise None."""
    places = {_places(call, samples) for call in calls}
    if len(places) != 1 or None in places:
        return None
    dim, inputs = next(iter(places)) or (1, frozenset[int]())
    token_wise = TokenWise(name=calls[0].name, dim=dim, inputs=inputs)
    return token_wise if type(module) is nn.Linear or _works_on_each(module, calls[0], token_wise) else None


def _places(call: Call, samples: int) -> tuple[int, frozenset[int]] | None:
    """The dimension of tokens in a call, and the leaves of its arguments that have it; None without one."""
    outputs, inputs = _leaves(call.output), _leaves((call.arguments, dict(call.keywords)))
    first = next((leaf for leaf in inputs.values() if len(leaf.shape) == 3), None)
    if first is None or not outputs or samples not in first.shape[:2]:
        return None
    dim = 1 if first.shape[0] == samples else 0
    tokens = first.shape[dim]
    if tokens < 2 or mixing(call, tokens) is not None:
        return None
    if any(len(leaf.shape) != 3 or leaf.shape[:2] != first.shape[:2] for leaf in outputs.values()):
        return None
    return dim, frozenset(i for i, leaf in inputs.items() if leaf.shape[:2] == first.shape[:2])


def _leaves(nest: Any) -> dict[int, Seen]:
    """The tensors of a nest, by their index among all of its leaves."""
    leaves = pytree.tree_leaves(nest, is_leaf=lambda value: isinstance(value, Seen))
    return {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Seen)}


def _works_on_each(module: nn.Module, call: Call, which: TokenWise) -> bool:
    """Whether half of the tokens give half of the output, with random values for all parameters.

    The initial parameters would not do, as a branch that is initialized as zero would hide mixed tokens.
    """
    leaves, form = pytree.tree_flatten(
        (call.arguments, dict(call.keywords)), is_leaf=lambda value: isinstance(value, Seen)
    )
    tokens = next(leaves[index].shape[which.dim] for index in which.inputs)
    half = tokens // 2
    made: dict[int, Tensor] = {}
    before = Attributes(module, *modules_in(leaves))
    try:
        with with_values(), torch.no_grad(), torch.random.fork_rng(devices=[]), in_mode(module, training=False):
            torch.manual_seed(0)
            named = [*module.named_parameters(), *module.named_buffers()]
            # In float64 on the CPU, whatever the model has: `near` can then tell a mixed token from rounding.
            state = {name: _random(tensor.shape, tensor.dtype) for name, tensor in named}
            for leaf in leaves:
                if isinstance(leaf, Seen):
                    made.setdefault(leaf.identity, _random(leaf.shape, leaf.dtype))

            def output(first: int, last: int) -> list[Tensor]:
                inputs = [made[leaf.identity] if isinstance(leaf, Seen) else leaf for leaf in leaves]
                for index in which.inputs:
                    inputs[index] = inputs[index].narrow(which.dim, first, last - first)
                arguments, keywords = pytree.tree_unflatten(inputs, form)
                result = functional_call(module, state, arguments, keywords, tie_weights=True)
                return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]

            whole = output(0, tokens)
            return not _keeps_tensors(module, before) and all(
                piece.shape == (expected := other.narrow(which.dim, first, last - first)).shape
                and near(piece.to(expected.dtype), expected)
                for first, last in ((0, half), (half, tokens))
                for piece, other in zip(output(first, last), whole, strict=True)
            )
    except Exception:  # whatever a module's own code raises for numbers that it doesn't know
        return False
    finally:
        before.restore()


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Random values for a parameter or an input: normal with the usual scale, or 0 and 1 for integers."""
    if dtype.is_floating_point:
        return torch.randn(*shape, dtype=torch.float64) / (shape[-1] if len(shape) > 1 else 1) ** 0.5
    return torch.randint(0, 2, tuple(shape)).to(dtype)


def _keeps_tensors(module: nn.Module, before: Attributes) -> bool:
    """Whether a forward stores tensors in the module, such as an auxiliary loss, which would be that of a part."""
    return any(isinstance(value, Tensor) for value in before.changed())


def runs_of(modules: Sequence[TokenWise], trace: Trace) -> list[Run]:
    """Group consecutive modules whose tokens pass only from one to the next, so that they stay split between them."""
    once = sorted(
        (module for module in modules if len(trace.of(module.name)) == 1), key=lambda e: trace.of(e.name)[0].began
    )
    runs: list[list[TokenWise]] = []
    for before, module in pairwise([None, *once]):
        assert module is not None
        handed = _handed(before, module, trace) if before is not None else frozenset[int]()
        if handed:
            runs[-1].append(replace(module, handed=handed))
        else:
            runs.append([module])
    return [*runs, *([module] for module in modules if module not in once)]


def _handed(before: TokenWise, after: TokenWise, trace: Trace) -> frozenset[int]:
    """The leaves of a module's arguments that are all outputs of the module before, if no other module uses these."""
    (sender,), (call,) = trace.of(before.name), trace.of(after.name)
    outputs = {seen.identity for seen in sender.outputs()}
    inputs = _leaves((call.arguments, dict(call.keywords)))
    handed = frozenset(index for index in after.inputs if inputs[index].identity in outputs)
    alone = all(trace.last_uses.get(identity, call.began) <= call.ended for identity in outputs)
    taken = {inputs[index].identity for index in handed} == outputs
    siblings = before.name.rpartition(".")[0] == after.name.rpartition(".")[0]
    return handed if before.dim == after.dim and siblings and alone and taken else frozenset()


def split_run(model: nn.Module, run: Run, shares: Shares, forward_context: ForwardContext) -> None:
    """Split the tokens before the first module of a run, and put them together after the last."""
    length = Length(forward_context, shares)
    modules = [model.get_submodule(token_wise.name) for token_wise in run]
    for module, token_wise in zip(modules, run, strict=True):
        module.register_forward_pre_hook(_splitting(token_wise, shares, length), with_kwargs=True)
        if type(module) not in _DRAWS_NOTHING:
            wrap_forward(module, _on_own_tokens(token_wise.dim, length, forward_context))
    modules[-1].register_forward_hook(_gathering(run[-1].dim, shares, length))


def _splitting(which: TokenWise, shares: Shares, length: Length) -> Callable[..., Any]:
    """A hook before a module of a run: its token inputs cut to this rank's, gradients of its others summed."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        leaves, form = pytree.tree_flatten((arguments, keywords))
        for index, leaf in enumerate(leaves):
            if index in which.inputs - which.handed:
                tokens = leaf.shape[which.dim]
                length.note(tokens)
                if leaf.requires_grad:
                    leaves[index] = scatter_to_region(leaf, shares.of(tokens), which.dim)
                else:
                    leaves[index] = own_part(leaf, shares, which.dim)
            elif index not in which.handed and isinstance(leaf, Tensor) and leaf.requires_grad:
                leaves[index] = copy_to_region(leaf, shares.group)
        return pytree.tree_unflatten(leaves, form)

    return hook


def _gathering(dim: int, shares: Shares, length: Length) -> Callable[..., Any]:
    """A hook after the last module of a run: all tokens of each tensor that it gives."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        tokens = shares.of(length.tokens)
        return pytree.tree_map_only(Tensor, lambda part: gather_from_region(part, tokens, dim), output)

    return hook


def _on_own_tokens(dim: int, length: Length, forward_context: ForwardContext) -> Callable[..., Any]:
    """Make a wrapper that sets the token positions for random draws inside of the module."""

    def on_own_tokens(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        with forward_context.holding(Portion(activations={dim: length.positions((arguments, keywords))})):
            return forward(*arguments, **keywords)

    return on_own_tokens


def names_of(runs: Sequence[Run]) -> list[str]:
    return [module.name for run in runs for module in run]
