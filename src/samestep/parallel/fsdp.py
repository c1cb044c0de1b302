"""FSDP2: each data rank keeps a shard of every parameter, gradient and optimizer state.

Parameters of a unit are gathered when the unit's forward is called; `shard_units` finds the units. FSDP2 must also
see the tensors in a module's output.

What a rank does for each unit (Zhao et al. 2023, PyTorch FSDP, section 3): all-gather the unit's parameters before
its forward, free them after it (ZeRO-3) or keep them (ZeRO-2); gather them again before its backward; reduce-scatter
the gradients after it. All ranks of the shard axis take part in each of these, in the order of the units; replicas
along `replicate` then all-reduce their shards' gradients. Two ranks that gathered different units would deadlock, so
`agreed_units` and `UnusedParametersOfShards` compare them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from samestep.comm.mesh import Mesh
from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.blocks import has_forward, is_list_of_like
from samestep.parallel.calls import Trace
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.torch_internals import pytree
from samestep.torch_internals.fakes import FakeTensor
from samestep.torch_internals.tensors import is_view


def shard_units(
    model: nn.Module, blocks: Sequence[nn.Module], seen: Trace | None, writing: list[str] | None = None
) -> list[nn.Module]:
    """The blocks, or parts of them, that can be gathered by themselves, in the order in which they run.

    What is in none of them is gathered with the model. `seen` is what the model's forward does: a unit must be
    called, and its parameters must be used in its forward alone. Where the forward was followed to a module that
    decides by values what it calls, its parts are gathered with it, since another rank's samples may want others.
    Without a trace every block with a forward is taken. `writing`: gets the names of modules that can't be units
    because they change what they are given in place.
    """
    finder = _Finder(model, seen)
    units = dict.fromkeys(chain.from_iterable(finder.within(block) for block in blocks))
    if writing is not None:
        writing += dict.fromkeys(finder.writing)
    return sorted(units, key=finder.began)


@dataclass(frozen=True, kw_only=True)
class Units:
    """The FSDP units of a model, the same on all ranks."""

    modules: Sequence[nn.Module]
    may_differ: bool  # whether samples may decide which of them run
    writing: Sequence[str] = ()  # modules that can't be units, since they change what they are given in place


def agreed_units(
    model: nn.Module, blocks: Sequence[nn.Module], seen: Trace | None, group: dist.ProcessGroup
) -> Units:
    """The units that all ranks of a group have found; every rank asks."""
    writing: list[str] = []
    units = shard_units(model, blocks, seen, writing)
    names = {module: name for name, module in model.named_modules()}
    followed = seen is not None and seen.stop is None
    answers: list[tuple[list[str], bool] | None] = [None] * dist.get_world_size(group)
    # Ranks trace the forward with their own example, so with data-dependent control flow they may find different
    # units.
    dist.all_gather_object(answers, ([names[unit] for unit in units], followed), group=group)
    everyone = [answer for answer in answers if answer is not None]
    modules = [model.get_submodule(name) for name in everyone[0][0] if all(name in theirs for theirs, _ in everyone)]
    return Units(modules=modules, may_differ=not all(whole for _, whole in everyone), writing=writing)


def kept_whole(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that FSDP2 can't shard: scalars, empty ones, and trained ones of another dtype than most."""
    numbers: dict[object, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim:
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
    # A unit's trained parameters go in one flat message, so they must be of one dtype: that of most elements.
    usual = max(numbers, key=lambda dtype: numbers[dtype], default=None)
    return {p for p in model.parameters() if not p.ndim or not p.numel() or (p.requires_grad and p.dtype != usual)}


class _Finder:
    """Finds the modules of a model that can be units, from the trace of its forward."""

    def __init__(self, model: nn.Module, seen: Trace | None) -> None:
        self._model = model
        self._seen = seen
        self._followed = seen is not None and seen.stop is None
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {parameter: name for name, parameter in model.named_parameters()}
        self.writing: list[str] = []  # modules that aren't units because they change what they are given
        self._began: dict[str, int] = {}
        for call in seen.calls if seen is not None else ():
            self._began.setdefault(call.name, call.began)

    def began(self, unit: nn.Module) -> int:
        """The position of a unit's first call; units that were not traced come last."""
        return self._began.get(self._names[unit], len(self._began) * 2)

    def within(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the module if it can be a unit, otherwise the largest submodules that can."""
        if self._fits(module):
            yield module
        # A list or a dict of modules has no forward, so its modules are candidates.
        elif self._followed or not has_forward(module):  # otherwise it is unknown whether every rank calls them
            for child in module.children():
                yield from self.within(child)

    def _fits(self, module: nn.Module) -> bool:
        """Whether a module can be a unit: it can be called, has parameters, and nothing else uses them."""
        if not has_forward(module) or not any(True for _ in module.parameters()) or _shares(self._model, module):
            return False
        if self._seen is None:
            return True
        name, stop = self._names[module], self._seen.stop
        if stop is not None:
            if not stop.module or name.startswith(f"{stop.module}."):
                return False
            if name not in self._began and name not in stop.modules:
                return self._is_like_a_followed_one(module)
        elif name not in self._began:
            return False
        if self._may_be_chosen(module):
            return False
        if any(call.writes for call in self._seen.of(name)):
            self.writing.append(name)  # FSDP2 gives its units views, which autograd lets nobody change in place
            return False
        # All uses of each parameter must be within the module's own calls, as it is only gathered there.
        return all(
            name in running
            for parameter in module.parameters()
            for running in self._seen.uses.get(self._parameters[parameter], ())
        )

    def _may_be_chosen(self, module: nn.Module) -> bool:
        """Whether samples may decide that a module is called, such as the adapter of a language or a part of it.

        It is if inputs decide something, and it is in a dictionary, or in a list of which some modules were called.
        Ranks whose samples want different ones would gather different units.
        """
        if self._seen is None or not self._seen.decided:
            return False
        parts = self._names[module].split(".")
        holders = (self._model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
        return any(map(self._holds_choices, holders))

    def _holds_choices(self, holder: nn.Module) -> bool:
        """Whether a module is a dictionary of like modules, or a list of which the forward called some."""
        if isinstance(holder, nn.ModuleDict):
            return is_list_of_like(holder)
        if not isinstance(holder, nn.ModuleList) or not self._followed:
            return False
        choices = [child for child in holder.children() if has_forward(child)]
        called = [self._names[child] in self._began for child in choices if any(True for _ in child.parameters())]
        return any(called) and not all(called)

    def _is_like_a_followed_one(self, module: nn.Module) -> bool:
        """Whether another module of the same class was traced and can be a unit, for modules after a trace's stop."""
        return any(
            type(other) is type(module) and name in self._began and self._fits(other)
            for other, name in self._names.items()
        )


def _shares(model: nn.Module, block: nn.Module) -> bool:
    """Whether a block shares a parameter with a module outside; tied parameters are sharded with the root module."""
    own_parameters = {id(parameter) for parameter in block.parameters()}
    inside = {id(module) for module in block.modules()}
    return any(
        id(parameter) in own_parameters
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    )


@dataclass(frozen=True)
class _Output:
    """A module's output object, appended to the tensors found in it."""

    value: Any


class _Alias(torch.autograd.Function):
    """Forward and backward: identity. The result shares memory, but is no view for autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def no_view(tensor: Tensor) -> Tensor:
    """Make an output safe for in-place changes, such as `hidden += positions`.

    An in-place change of a view would bypass the hook by which FSDP2 gathers a module's parameters for backward.
    """
    return _Alias.apply(tensor) if tensor.requires_grad and is_view(tensor) else tensor


def show_tensors(module: nn.Module) -> None:
    """Make a module return the tensors in an output object of a custom class, followed by the object."""
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def shown(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            return pytree.tree_map_only(Tensor, no_view, output)
        inside = [leaf for leaf in pytree.tree_leaves(getattr(output, "__dict__", None)) if isinstance(leaf, Tensor)]
        return (*inside, _Output(output)) if inside else output

    module.forward = shown


def hide_tensors(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Forward hook after FSDP2's, which returns only the output object again."""
    hidden = type(output) is tuple and bool(output) and isinstance(output[-1], _Output)
    return output[-1].value if hidden else output


def refuse_gradients_in_forward(
    module: nn.Module, described: str, layout: Layout, forward_context: ForwardContext
) -> None:
    """Add a hook that raises LayoutError if the forward itself computes gradients through the module.

    FSDP2 frees the gathered parameters after the module's backward, so a second backward through these gradients
    would read freed memory.
    """

    def refuse(gradient: Tensor) -> None:
        if forward_context.moment is not None and not forward_context.recomputing:
            raise LayoutError(
                f'layout "{layout}": the forward takes gradients through {described}, whose '
                "parameters are sharded and freed after one backward, while a gradient of these gradients needs them "
                f"again; use dp{layout.size}, or zero1x{layout.size}"
            )

    def watch(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and forward_context.moment is not None:
                tensor.register_hook(refuse)

    module.register_forward_hook(watch)


def _gathered_with(parts: Sequence[nn.Module], whole: Collection[nn.Parameter]) -> list[list[str]]:
    """The names of the parameters that each part gathers: those that no part before it has."""
    taken = {id(parameter) for parameter in whole}
    names: list[list[str]] = []
    for part in parts:
        own = {name: parameter for name, parameter in part.named_parameters() if id(parameter) not in taken}
        taken |= {id(parameter) for parameter in own.values()}
        names.append([*own])
    return names


def refuse_replaced_values(part: nn.Module, described: str, layout: Layout, names: Sequence[str]) -> None:
    """Add hooks that raise LayoutError if the first forward gives parameters of its unit other memory.

    `module.to(dtype)` within a forward does so, unless they have that dtype. FSDP2 gathers later values into the
    memory that it knows, and the forward would compute with the first ones for ever. `names`: of the parameters that
    are gathered with the unit.
    """
    places: dict[str, int] = {}

    def values() -> Iterator[tuple[str, Tensor]]:
        parameters = ((name, part.get_parameter(name).data) for name in names)
        return ((name, value) for name, value in parameters if not isinstance(value, FakeTensor))

    def note(module: nn.Module, arguments: Any) -> None:
        places.update((name, value.untyped_storage().data_ptr()) for name, value in values())

    def compare(module: nn.Module, arguments: Any, output: Any) -> None:
        for handle in handles:
            handle.remove()
        for name, value in values():
            if value.untyped_storage().data_ptr() != places[name]:
                raise LayoutError(
                    f'layout "{layout}": the forward of {described} replaces the values of its parameter {name}, as '
                    "module.to(another dtype) does, while its parameters are sharded and gathered into other "
                    f"memory; cast inputs and outputs, or use dp{layout.size} or zero1x{layout.size}"
                )

    # After FSDP2 has gathered the parameters, and before it frees them.
    handles = (part.register_forward_pre_hook(note), part.register_forward_hook(compare, prepend=True))


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    layout: Layout,
    mesh: Mesh,
    precision: str,
    forward_context: ForwardContext,
    *,
    experts: Sequence[nn.Module] = (),
    compiled: bool = False,
) -> None:
    """Shard a model in place, unit by unit and then what is left.

    `experts`: units of which the ranks of the expert axis hold different parts, each sharded over the ranks that hold
    the same. Replicas have the same shards. What can't be sharded stays whole on every rank; its gradients are to be
    averaged by `average_gradients`.
    """
    units = [unit for unit in units if unit not in experts]
    for part in [*experts, *units, model]:
        # FSDP2 hangs its backward hooks on the tensors that pytree finds in an output, such as in tuples and lists.
        show_tensors(part)
    # Before FSDP2 changes their classes.
    described = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    described[id(model)] = type(model).__name__
    whole = kept_whole(model)
    gathered = _gathered_with([*experts, *units, model], whole)
    mixed = MixedPrecisionPolicy()
    if precision == "bf16":
        # Half the bytes to gather; gradients are summed over ranks in float32, where bf16 would lose digits.
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if layout.offloads_parameters:
        pinned = mesh.grid.device_type != "cpu" and not layout.offloads("parameters-disk")
        offload = CPUOffloadPolicy(pin_memory=pinned)
    of_experts = mesh.shards(of_experts=True) if mesh.size("expert") > 1 else None
    # [shard], or [replicate, shard] where shards have replicas: then FSDP2 is HSDP.
    grid = mesh.shards(of_experts=False)
    # Inner units first: `fully_shard` takes every parameter that no unit within it has taken yet.
    for part in [*experts, *units, model]:
        fully_shard(
            part,
            mesh=of_experts if part in experts else grid,
            # What the model has outside its units is wanted again as soon as backward begins.
            reshard_after_forward=layout.zero == 3 and part is not model,
            mp_policy=mixed,
            offload_policy=offload,
            ignored_params=whole,
        )
    for part, names in zip([*experts, *units, model], gathered, strict=True):
        if not compiled:  # its hooks would be compiled as well
            refuse_replaced_values(part, described[id(part)], layout, names)
        part.register_forward_hook(hide_tensors)
    for unit in units:
        refuse_gradients_in_forward(unit, described[id(unit)], layout, forward_context)
    _prefetch([unit for unit in units if isinstance(unit, FSDPModule)])


def put_back(root: nn.Module) -> None:
    """Reshard a model's parameters after a forward without a backward.

    Otherwise gradients would be cleared, measured and saved for the gathered parameters that the forward leaves.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _prefetch(blocks: Sequence[FSDPModule]) -> None:
    """Gather the next block's parameters while this one computes, in forward and in backward.

    Where it is not told what to gather in a block's backward, PyTorch gathers what ran before the block: of the first
    one, after an evaluation, that forward's last block, in vain. So the first one is told to gather itself.
    """
    for first in blocks[:1]:
        first.set_modules_to_backward_prefetch([first])
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


@contextmanager
def without_messages(model: FSDPModule, *, keep_gathered: bool) -> Iterator[None]:
    """Context in which backward accumulates gradients on this rank without reducing them.

    `keep_gathered`: also keep parameters gathered for the next forward, for layouts that hold all of them anyway.
    """
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not keep_gathered)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
