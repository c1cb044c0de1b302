"""What modules carry from step to step beside weights and saved buffers: queues, centres, running means.

They explain gradients that differ. By themselves they are no finding: a module may keep what it likes of its rows.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from samestep.recording import shards
from samestep.recording.differences import RoundingLimits, TensorDifference, common_module
from samestep.script_proof.kinds import Finding
from samestep.torch_internals.modules import REGISTRIES, own_buffers, unsaved_buffers

_MOST_NUMBERS = 1 << 18  # of a tensor
_ALIKE = 1e-5  # relative: copies of ranks that differ by less are those of sums in another order


def states_of(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the models' modules that no checkpoint has, and all that modules beside the models hold."""
    names = {id(module): name for root, model in models.items() for name, module in shards.named_modules(model, root)}
    taken: set[str] = set()
    for module in [object_ for object_ in gc.get_objects() if issubclass(type(object_), nn.Module)]:
        attributes = vars(module)
        if REGISTRIES[0] not in attributes or (
            id(module) not in names and next(module.parameters(), None) is not None
        ):
            continue
        place = names.get(id(module), type(module).__name__)
        for key, value in _tensors(module, attributes, inside=id(module) in names):
            name = f"{place}.{key}" if place else key
            if name not in taken and isinstance(value, Tensor) and _is_state(value):
                taken.add(name)
                yield name, value


def _tensors(module: nn.Module, attributes: Mapping[str, object], *, inside: bool) -> Iterator[tuple[str, object]]:
    unsaved = unsaved_buffers(module)
    for key, value in own_buffers(module).items():
        if not inside or key in unsaved:
            yield key, value
    yield from ((key, value) for key, value in attributes.items() if key not in REGISTRIES)


def _is_state(value: Tensor) -> bool:
    plain = type(value) is Tensor and not value.is_meta and not value.requires_grad
    return plain and 0 < value.numel() <= _MOST_NUMBERS


def state_finding(
    number: int, tensors: Sequence[TensorDifference], limits: RoundingLimits, finding: Finding
) -> Finding | None:
    """Name what a module carries that is another on ranks or than alone, of a finding that it may explain."""
    there = [tensor for tensor in tensors if not tensor.missing]
    # The order of rows, by which noise is measured, is in a queue as well: not a limit of what ranks have.
    own = [tensor for tensor in there if tensor.ranks_apart > _ALIKE]
    departing = own or [tensor for tensor in there if limits.exceeded(tensor)]
    if not departing or finding.kind not in _EXPLAINED:
        return None
    relative = max(tensor.ranks_apart if own else tensor.apart for tensor in departing)
    return Finding(
        kind="buffers-differ" if own else "buffer",
        step=number + 1,
        what="buffers",
        relative=relative,
        module=common_module([tensor.name for tensor in departing]),
    )


_EXPLAINED = frozenset({"gradients-differ", "loss-of-own-rows", "backward-differs", "forward-differs"})
