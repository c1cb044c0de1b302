"""Find the experts of a model, from one forward of a few samples or from the user's plan."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.attributes import in_mode
from samestep.parallel.blocks import caller_of, has_forward, is_list_of_like
from samestep.parallel.experts.listed import Form, rows_of
from samestep.parallel.experts.stacked import Arguments, is_output
from samestep.tasks.base import call
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import AnyDropout

SPLIT, WHOLE = "split", "whole"


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """A module's first call in the observed forward."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """A module with the weights of all experts, each with the experts as its first dimension."""

    name: str
    experts: int
    arguments: Arguments
    seen: FirstCall

    @property
    def caller(self) -> str:
        """The module whose output is compared with that of the unchanged model."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A list of equal modules, of which `caller` calls some with some of its tokens."""

    name: str
    experts: int
    caller: str
    form: Form
    seen: FirstCall  # of the caller


Experts = Stacked | Listed


@dataclass(kw_only=True)
class _Watched:
    """Observations of one forward."""

    first: dict[str, FirstCall] = field(default_factory=dict)  # by name, of modules that may be experts or call them
    # For each expert of a list its calls' input and output shapes, or None for other than single tensors.
    calls: dict[str, list[tuple[torch.Size, torch.Size] | None]] = field(default_factory=dict)


def find_experts(
    model: nn.Module, example: Any, layout: Layout, roles: Mapping[str, str] | None = None
) -> list[Experts]:
    """Find the experts that can be distributed over ranks, in the order of the model's modules.

    `roles` is a user's plan: name or pattern of modules -> "split" or "whole". Raises LayoutError for a wrong plan,
    if there are no experts, or if their number does not divide by the expert axis.
    """
    experts_found = _find(model, example, roles)
    if not experts_found:
        unlike = _unlike_sizes(model)
        if unlike is not None:
            raise LayoutError(
                f'layout "{layout}": the modules in {unlike} have parameters of unlike shapes, and ranks share out '
                f"experts of one shape; use dp{layout.size} or fsdp{layout.size}"
            )
        raise LayoutError(
            f'layout "{layout}": {type(model).__name__} has no experts that ranks could share out: {_KINDS}; use '
            f'dp{layout.size}, or name them by run.expert_plan, such as {{"layers.*.experts": split}}'
        )
    for experts in experts_found:
        _check(model, experts, layout)
    return experts_found


def has_experts(model: nn.Module, example: Any, roles: Mapping[str, str] | None = None) -> bool:
    """Whether a model has experts that could be distributed over ranks; `roles`: see `find_experts`."""
    return bool(_find(model, example, roles))


def _find(model: nn.Module, example: Any, roles: Mapping[str, str] | None) -> list[Experts]:
    """All experts of a model, in the order of its modules, except experts within experts."""
    named = _named(model, roles or {})
    lists = {name: module for name, module in model.named_modules() if is_list_of_like(module)}
    stacks = {name: module for name, module in model.named_modules() if _stack_of(module)}
    callers = {name: caller_of(model, name) for name in lists}
    watched = _watch(model, example, [*stacks, *callers.values()], lists)
    listed: list[Experts] = []
    for name in dict(model.named_modules()):
        role = named.get(name)
        if role == WHOLE or any(name.startswith(f"{experts_before.name}.") for experts_before in listed):
            continue
        experts = None
        if name in stacks:
            experts = _stacked(name, stacks[name], watched)
        elif name in lists:
            experts = _listed(name, callers[name], lists[name], watched, forced=role == SPLIT)
        if experts is not None:
            listed.append(experts)
        elif role == SPLIT:
            raise LayoutError(
                f'run.expert_plan: {name} ({type(model.get_submodule(name)).__name__}) can\'t be "split": {_KINDS}'
            )
    return listed


def _unlike_sizes(model: nn.Module) -> str | None:
    """The name of a list or dictionary whose modules differ only in sizes; None if there is none."""
    return next(
        (
            name
            for name, module in model.named_modules()
            if is_list_of_like(module, of_any_size=True) and not is_list_of_like(module)
        ),
        None,
    )


_KINDS = (
    "experts are modules alike in an nn.ModuleList that are called with some of the tokens each, or one module with "
    "the weights of all of them that is called with tokens, chosen experts and their weights"
)


def _named(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """The roles of a user's plan by module name.

    Raises LayoutError for a wrong role or a pattern without a module.
    """
    roles: dict[str, str] = {}
    for pattern, role in patterns.items():
        if role not in (SPLIT, WHOLE):
            raise LayoutError(f'run.expert_plan: {pattern} is "{role}"; it can be {SPLIT}, {WHOLE}')
        names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
        if not names:
            raise LayoutError(
                f'run.expert_plan: the model has no module "{pattern}"; use the name of a list of experts'
            )
        roles |= dict.fromkeys(names, role)
    return roles


def _stack_of(module: nn.Module) -> int:
    """The number of experts whose weights a module holds as stacks; 0 if it holds none."""
    own = list(module.parameters(recurse=False))
    counts = {p.shape[0] if p.ndim else 0 for p in own}
    # All parameters are the module's own, all with one first dimension, and at least one is a stack of matrices.
    alone = len(own) == len(list(module.parameters()))
    stacked = alone and len(counts) == 1 and any(p.ndim == 3 for p in own)
    return counts.pop() if stacked and has_forward(module) else 0


def _watch(model: nn.Module, example: Any, names: Sequence[str], lists: Mapping[str, nn.Module]) -> _Watched:
    """Run one forward of the example in evaluation mode, and record inputs and outputs of possible experts.

    Inputs are copied before the forward, since a caller may change them in place, and outputs after it.
    """
    watched = _Watched()
    before: dict[str, Any] = {}

    def begin(name: str, module: nn.Module, arguments: Any, keywords: Any) -> None:
        before.setdefault(name, _copied((arguments, keywords)))

    def end(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        first = before[name]
        watched.first.setdefault(name, FirstCall(arguments=first[0], keywords=first[1], output=_copied(output)))

    def note(name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        all_given = (*arguments, *keywords.values())
        one = len(all_given) == 1 and isinstance(all_given[0], Tensor) and isinstance(output, Tensor)
        shapes = (all_given[0].shape, output.shape) if one and all_given[0].is_floating_point() else None
        watched.calls.setdefault(name, []).append(shapes)

    with ExitStack() as stack, torch.no_grad():
        for name in dict.fromkeys(names):
            module = model.get_submodule(name)
            begin_it, end_it = partial(begin, name), partial(end, name)
            stack.callback(module.register_forward_pre_hook(begin_it, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(end_it, with_kwargs=True).remove)
        for name, container in lists.items():
            for key, child in container.named_children():
                hook = child.register_forward_hook(partial(note, f"{name}.{key}"), with_kwargs=True)
                stack.callback(hook.remove)
        with in_mode(model, training=False):
            call(model, example)
    return watched


def _copied(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), nest)


def _stacked(name: str, module: nn.Module, watched: _Watched) -> Stacked | None:
    """The experts that a module holds as stacks [experts, ...]; None if its call does not have their signature."""
    seen = watched.first.get(name)
    if seen is None:
        return None
    experts = _stack_of(module)
    arguments = Arguments.of(seen.arguments, seen.keywords, experts)
    if arguments is None:
        return None
    tokens = {**dict(enumerate(seen.arguments)), **seen.keywords}[arguments.tokens]
    if not is_output(seen.output, tokens):
        return None
    return Stacked(name=name, experts=experts, arguments=arguments, seen=seen)


def _listed(name: str, caller: str, container: nn.Module, watched: _Watched, *, forced: bool) -> Listed | None:
    """The experts of a list, each called for some of the tokens; None if all of them get all tokens."""
    children = dict(container.named_children())
    calls = [watched.calls.get(f"{name}.{key}", []) for key in children]
    all_calls = [shapes for call in calls for shapes in call if shapes is not None]
    if not all_calls or any(shapes is None for call in calls for shapes in call) or caller not in watched.first:
        return None
    expert = next(iter(children.values()))
    # A convolution, say, works on more dimensions than the last.
    flat = all(parameter.ndim <= 2 for parameter in expert.parameters())
    rows, seen = [_rows(inputs, flat=flat) for inputs, _ in all_calls], watched.first[caller]
    inputs, made = all_calls[0]
    leading = len(inputs) - 1 if flat else 1
    if any(len(shape) < leading + 1 or shape[:-1] != out[: len(shape) - 1] for shape, out in all_calls if flat):
        return None
    if not forced and not _by_value(calls, rows, seen):
        return None
    twin = deepcopy(expert).to("meta").eval()
    form = Form(flat=flat, features=inputs[leading:], output=made[leading:], twin=twin)
    return Listed(name=name, experts=len(children), caller=caller, form=form, seen=seen)


def _rows(shape: torch.Size, *, flat: bool) -> int:
    return rows_of(torch.empty(shape, device="meta"), flat=flat)[0].shape[0]


def _by_value(calls: Sequence[Sequence[Any]], rows: Sequence[int], seen: FirstCall) -> bool:
    """Whether the numbers of rows of the experts depend on values: they differ, or are less than the caller's."""
    tensors = [leaf for leaf in pytree.tree_leaves((seen.arguments, seen.keywords)) if isinstance(leaf, Tensor)]
    most = max(
        (tensor.numel() // tensor.shape[-1] for tensor in tensors if tensor.is_floating_point() and tensor.ndim),
        default=0,
    )
    return len(set(rows)) > 1 or not all(calls) or max(rows) < most


def _check(model: nn.Module, experts: Experts, layout: Layout) -> None:
    """Raise LayoutError for experts that can't be shared out."""
    what = f'layout "{layout}": {experts.name} ({type(model.get_submodule(experts.name)).__name__})'
    if experts.experts % layout.expert:
        sizes = [f"ep{n}" for n in range(2, experts.experts + 1) if experts.experts % n == 0]
        raise LayoutError(
            f"{what} has {experts.experts} experts, which are not divisible by {layout.expert}; use "
            f"{' or '.join(sizes)}, or dp{layout.expert}"
        )
    module = model.get_submodule(experts.name)
    dropping = next((m for m in module.modules() if isinstance(m, AnyDropout) and m.p), None)
    if dropping is not None:
        raise LayoutError(
            f"{what} has dropout in its experts, which don't know whose tokens they are given; use dropout after "
            f"them, recipe.dropout: false, or dp{layout.size}"
        )
    own_parameters = {id(parameter) for parameter in module.parameters()}
    inside = {id(module) for module in module.modules()}
    for name, other in model.named_modules():
        shared = [p for p in other.parameters(recurse=False) if id(p) in own_parameters]
        if id(other) not in inside and shared:
            raise LayoutError(f"{what} shares a parameter with {name or 'the model'}; use dp{layout.size}")
    twice = _shared_by_experts(module) if isinstance(experts, Listed) else None
    if twice is not None:
        raise LayoutError(
            f"{what} has experts that share a parameter ({twice}), of which each rank would have another gradient; "
            f"use dp{layout.size}"
        )
    if layout.pipeline > 1 and not experts.caller:
        raise LayoutError(
            f"{what} is called by the model's own forward, of which every stage runs a part; use a layout without "
            "pp, or a module that holds the router and the experts"
        )


def _shared_by_experts(container: nn.Module) -> str | None:
    """The first parameter that several experts of a list hold; None if there is none."""
    holders = Counter(parameter for expert in container.children() for parameter in {*expert.parameters()})
    return next((name for name, parameter in container.named_parameters() if holders[parameter] > 1), None)


def containers(model: nn.Module, all_experts: Sequence[Experts]) -> Iterator[nn.Module]:
    """The modules that hold the experts."""
    for experts in all_experts:
        yield model.get_submodule(experts.name)
