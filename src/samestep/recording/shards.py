"""Which part of which parameter a rank holds, by the parameter's name in the user's model.

Needs no messages: the offsets are in DTensors (FSDP2, tensor parallel) and in FSDP1's flat parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.torch_internals.modules import WRAPPERS, own_buffers, own_children, own_parameters, unsaved_buffers
from samestep.torch_internals.sharded import (
    DTensor,
    FSDPModule,
    Partial,
    flat_handle,
    flat_parts,
    local_part,
    offset_of,
    shard_counts,
    unflattened,
)

# Wrapper modules by class name, and the attribute with the wrapped module.
_WRAPPERS: Mapping[str, str] = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    **WRAPPERS,
    "_FabricModule": "_forward_module",
}

_HOLDERS = set(_WRAPPERS.values()) - {"module"}


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module in what DDP, FSDP1, torch.compile and others put around it."""
    while (inside := _inside(module)) is not None:
        module = inside
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    """The user's module inside a wrapper (DDP, FSDP, DeepSpeed, ...); None for what is no wrapper."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and not kind.__module__.startswith("__main__"):
            inner = own_children(module).get(_WRAPPERS[kind.__name__])
            return inner if isinstance(inner, nn.Module) else None
    return None


def named_modules(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module by its name without wrappers; a wrapper by the name of what it stands around, before it."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    inside = _inside(module)
    if inside is not None:
        yield from named_modules(inside, name, seen)
        return
    for key, child in own_children(module).items():
        if child is not None:
            yield from named_modules(child, f"{name}.{key}" if name else key, seen)


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A rank's tensor, or a stretch of it, as part of one parameter.

    `start`: offset of a stretch in the flattened parameter. `offset`: offset of a block. Neither: the whole
    parameter.
    """

    name: str
    shape: tuple[int, ...]  # of the whole
    start: int | None = None
    offset: tuple[int, ...] | None = None
    stretch: tuple[int, int] | None = None  # range in the rank's flattened tensor; None: all of it

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's numbers of a parameter, or of a tensor of its shape such as its gradient."""
        local = local_part(tensor)
        local = local.detach()
        return local if self.stretch is None else local.reshape(-1)[self.stretch[0] : self.stretch[1]]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "whole": list(self.shape), "start": self.start, "offset": self.offset}


def parts_of(roots: Mapping[str, nn.Module]) -> dict[int, list[TensorPart]]:
    """Return the parts in each parameter, by its id; `roots`: prefix of names -> model."""
    parts: dict[int, list[TensorPart]] = {}
    for root_name, root in roots.items():
        for name, module in named_modules(root, root_name):
            if (handle := flat_handle(module)) is not None:
                parts.update(_flat_parts(handle, name))
            if type(module).__name__ == "DeepSpeedEngine":
                parts.update(_deepspeed_parts(module, root_name))
            for key, parameter in own_parameters(module).items():
                if parameter is not None and id(parameter) not in parts:
                    parts[id(parameter)] = [_part(f"{name}.{key}" if name else key, parameter)]
    return parts


def _part(name: str, parameter: Tensor) -> TensorPart:
    """The part that a parameter is: all of it, or a DTensor's shard by its offsets."""
    if not isinstance(parameter, DTensor):
        return TensorPart(name=name, shape=tuple(parameter.shape))
    return TensorPart(name=name, shape=tuple(parameter.shape), offset=offset_of(parameter))


def _flat_parts(handle: Any, name: str) -> Iterator[tuple[int, list[TensorPart]]]:
    """The parts of one of FSDP1's flat parameters; with `use_orig_params` each parameter is a stretch by itself."""
    flat = handle.flat_param
    parts: list[TensorPart] = []
    for part in flat_parts(flat):
        fqn = ".".join(word for word in part.name.split(".") if word not in _HOLDERS)
        parts.append(
            TensorPart(
                name=f"{name}.{fqn}" if name else fqn,
                shape=part.shape,
                start=part.start,
                stretch=(part.place, part.place + part.count),
            )
        )
    # An optimizer may have been given the flat parameter, or under `use_orig_params` the views into it that carry the
    # model's names; whichever it steps is found by its id. Without them there are no views: hence not `strict`.
    yield id(flat), parts
    for parameter, part in zip(unflattened(flat), parts, strict=False):
        assert part.stretch is not None
        count = part.stretch[1] - part.stretch[0]
        full = count == math.prod(part.shape)
        yield (
            id(parameter),
            [
                TensorPart(name=part.name, shape=part.shape)
                if full and handle.uses_sharded_strategy is False
                else TensorPart(name=part.name, shape=part.shape, start=part.start, stretch=(0, count))
            ],
        )


def _deepspeed_parts(engine: Any, root_name: str) -> Iterator[tuple[int, list[TensorPart]]]:
    """The parts of the flat tensors that the optimizer of DeepSpeed's ZeRO 1 to 3 steps, in their order.

    ZeRO 1 and 2 cut the parameters of a group, laid end to end, into one piece a rank; ZeRO 3 cuts each parameter.
    """
    optimizer = engine.optimizer
    flat_parts: dict[int, dict[int, TensorPart]] = {}  # by the flat tensor, and where a part begins in it
    named = [
        (f"{name}.{key}" if name else key, parameter)
        for name, module in named_modules(engine, root_name)
        for key, parameter in own_parameters(module).items()
        if parameter is not None
    ]
    for name, parameter in named:
        for flat, at, start, count, shape in _fragments(optimizer, parameter):
            part = TensorPart(name=name, shape=shape, start=start, stretch=(at, at + count))
            flat_parts.setdefault(id(flat), {}).setdefault(at, part)
    for flat, parts in flat_parts.items():
        yield flat, [parts[at] for at in sorted(parts)]


def _fragments(optimizer: Any, parameter: Any) -> Iterator[tuple[Tensor, int, int, int, tuple[int, ...]]]:
    """Of one parameter: the flat tensor, where its part begins there and in the whole, how long it is, its shape."""
    mapping = getattr(parameter, "_hp_mapping", None)
    flats = getattr(optimizer, "single_partition_of_fp32_groups", ())
    if mapping is not None:
        where = mapping.hp_fragment.untyped_storage().data_ptr()
        for flat in flats:
            if flat.untyped_storage().data_ptr() == where:
                high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield flat, high.start, low.start, low.numel, tuple(parameter.shape)
    positions = getattr(optimizer, "grad_position", None)
    if positions is not None and hasattr(parameter, "ds_id"):
        group, at, _ = positions[optimizer.get_param_id(parameter)]
        size = parameter.ds_tensor.ds_numel
        start = size * torch.distributed.get_rank(parameter.ds_process_group)
        count = max(0, min(size, parameter.ds_numel - start))
        yield optimizer.fp32_partitioned_groups_flat[group], at, start, count, tuple(parameter.ds_shape)


def still_to_be_reduced(tensor: Tensor) -> dict[str, str]:
    """Return the pending reduction (sum or mean) of a DTensor, if it has one."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    partial = [placement for placement in placements if isinstance(placement, Partial)]
    return {"partial": partial[0].reduce_op} if partial else {}


def ranks_of_a_sample(module: nn.Module) -> int:
    """Count the ranks that hold one model's tensor-parallel slices, and so get the same samples.

    A parameter's mesh includes the shards if FSDP2 shards it as well.
    """
    mesh = max(
        (parameter.device_mesh.size() for parameter in module.parameters() if isinstance(parameter, DTensor)),
        default=1,
    )
    shards = 1
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            shards = max([shards, *shard_counts(submodule)])
    return max(1, mesh // shards)


def buffers_of(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every buffer that a checkpoint would hold, by its name."""
    for root_name, root in roots.items():
        for name, module in named_modules(root, root_name):
            for key, buffer in own_buffers(module).items():
                if buffer is not None and key not in unsaved_buffers(module):
                    yield f"{name}.{key}" if name else key, buffer


def moved_by_one_unit(parameters: Sequence[Tensor]) -> None:
    """Move each number of the parameters to its neighbour in their precision: up and down in turn."""
    with torch.no_grad():
        for parameter in parameters:
            local = local_part(parameter)
            if local.is_floating_point() and local.numel():
                flat = torch.arange(local.numel(), device=local.device).reshape(local.shape) % 2
                towards = torch.where(flat == 0, math.inf, -math.inf).to(local.dtype)
                local.copy_(torch.nextafter(local, towards) if local.dtype.itemsize > 2 else local)
