"""Distribute experts: each rank keeps its part of them, and the layer's output is compared with the whole's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.comm.mesh import Mesh
from samestep.data.order import bounds
from samestep.errors import LayoutError
from samestep.parallel.attributes import in_mode
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.experts.find import Experts, Listed, Stacked
from samestep.parallel.experts.listed import ListedExperts
from samestep.parallel.experts.stacked import StackedExperts, shrink
from samestep.parallel.loss.vocabulary import agree, near
from samestep.parallel.pipeline.blanks import placeholder_module
from samestep.parallel.sharding import ShardTable, Slice
from samestep.torch_internals import pytree
from samestep.torch_internals.modules import own_children


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """The experts of a rank."""

    units: Sequence[nn.Module]  # each is called in every forward that runs its layer, on every rank
    parameters: Sequence[nn.Parameter]


def share_experts(
    model: nn.Module,
    all_experts: Sequence[Experts],
    parts: ShardTable,
    mesh: Mesh,
    forward_context: ForwardContext,
    device: torch.device,
) -> SharedExperts:
    """Keep only this rank's experts in a model, and record in `parts` which rank holds which.

    `model` may lack the layers of other pipeline stages. Raises LayoutError if a layer's output changes.

    Stacked experts are sliced along the first dimension over the expert axis; of listed experts a rank holds whole
    modules (`Part.holder`). Ranks along the expert axis are data ranks for everything else in the model.
    """
    units: list[nn.Module] = []
    for experts in all_experts:
        here = _is_here(model, experts)
        # Also for layers of other stages: checkpoints and messages need to know on every rank who holds what.
        _note(experts, parts, mesh)
        if not here:
            continue
        caller = model.get_submodule(experts.caller)
        if isinstance(experts, Stacked):
            _share_stacked(caller, experts, parts, mesh)
        else:
            _share_listed(model, experts, mesh, forward_context, device)
        units.append(model.get_submodule(experts.name))
        _compare(caller, experts, parts, mesh)
    return SharedExperts(units=units, parameters=[p for unit in units for p in unit.parameters()])


def _is_here(model: nn.Module, experts: Experts) -> bool:
    """Whether this rank's pipeline stages have the layer; layers of other stages are placeholder modules."""
    return any(True for _ in model.get_submodule(experts.name).parameters())


def _note(experts: Experts, parts: ShardTable, mesh: Mesh) -> None:
    """Record which rank holds which experts; the same on every rank."""
    per_rank = experts.experts // mesh.size("expert")
    keys = list(dict.fromkeys(_key(name, experts) for name in parts.parameters if _is_of(name, experts)))
    for name in parts.parameters:
        if not _is_of(name, experts):
            continue
        if isinstance(experts, Stacked):
            ranges = [[bounds(experts.experts, rank, mesh.size("expert"))] for rank in range(mesh.size("expert"))]
            cut = Slice(group=mesh.group("expert"), dim=0, ranges=ranges, axis="expert")
            parts.table[name] = replace(parts.part(name), slice=cut)
        else:
            parts.table[name] = replace(parts.part(name), holder=keys.index(_key(name, experts)) // per_rank)


def _is_of(name: str, experts: Experts) -> bool:
    return not experts.name or name.startswith(f"{experts.name}.")


def _key(name: str, experts: Experts) -> str:
    """The key in its list of the expert to which a parameter belongs."""
    return name.removeprefix(f"{experts.name}.").partition(".")[0]


def _share_stacked(module: nn.Module, experts: Stacked, parts: ShardTable, mesh: Mesh) -> None:
    """Keep this rank's [experts / ranks, ...] of each stack, and put the exchange around the module's forward."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        cut = parts.part(f"{experts.name}.{key}" if experts.name else key).slice
        assert cut is not None
        setattr(module, key, nn.Parameter(cut.take(parameter.detach()).contiguous(), parameter.requires_grad))
    local = experts.experts // mesh.size("expert")
    shrink(module, experts.experts, local)
    StackedExperts(module, experts.arguments, local=local, group=mesh.group("expert"))


def _share_listed(
    model: nn.Module, experts: Listed, mesh: Mesh, forward_context: ForwardContext, device: torch.device
) -> None:
    """Keep this rank's modules of the list, with placeholders that answer for the others."""
    container = model.get_submodule(experts.name)
    listed = ListedExperts(
        experts.name,
        model.get_submodule(experts.caller),
        container,
        form=experts.form,
        group=mesh.group("expert"),
        forward_context=forward_context,
    )
    for number, (key, expert) in enumerate(list(container.named_children())):
        if number not in listed.mine:
            own_children(container)[key] = placeholder_module(expert, device, listed.answer(number))


def _compare(caller: nn.Module, experts: Experts, parts: ShardTable, mesh: Mesh) -> None:
    """Raise LayoutError if the caller's output for the recorded inputs has changed."""
    layout = parts.layout
    if layout.sequence == "split":  # the layer expects a part of the tokens, and the recorded inputs have all
        return
    failed = ""
    try:
        with torch.no_grad(), in_mode(caller, training=False):
            seen = experts.seen
            arguments, keywords = pytree.tree_map_only(Tensor, Tensor.clone, (seen.arguments, seen.keywords))
            output = caller.forward(*arguments, **keywords)
    except Exception as error:  # whatever a model's own code raises where an expert is not what it was
        output, failed = None, f" ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    alike = not failed and _alike(output, experts.seen.output)
    # One rank's difference refuses the layout on all: a rank that went on alone would wait for the others.
    if not agree(alike, mesh.group("expert"), next(caller.parameters()).device):
        where = f"{experts.caller or 'the model'} ({type(caller).__name__})"
        raise LayoutError(
            f'layout "{layout}": with its experts shared out, {where} '
            f"{'fails' + failed if failed else 'gives another output than whole'}; use run.expert_plan: "
            f'{{"{experts.name}": whole}}, or dp{dist.get_world_size()}'
        )


def _alike(output: Any, expected: Any) -> bool:
    """Whether two outputs have the same tensors up to rounding."""
    own, other = (
        [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for nest in (output, expected)
    )
    return len(own) == len(other) and all(a.shape == b.shape and near(a, b) for a, b in zip(own, other, strict=True))
