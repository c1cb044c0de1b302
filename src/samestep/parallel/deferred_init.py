"""Deferred initialization: every layout gets the initial weights of one process, one parameter in memory at a time.

A model is built on the meta device, then spread, and then each rank fills the parameters that it holds: it computes a
whole parameter with the random numbers of the construction, takes its part, and frees the whole before the next one.

Why parameters are not seeded by name: the initial weights would differ from those of the plain model, which the proof
uses as its reference, and which a user gets without samestep. So the construction's draws are recorded
(`init_recorder`) and repeated for one parameter at a time.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from samestep.data.loader import in_kind
from samestep.parallel.init_recorder import Record, Recording, StorageRegion, Unrecordable, recorded
from samestep.parallel.valueless import has_values
from samestep.torch_internals.modules import apply_to_tensors
from samestep.torch_internals.tensors import takes_over_memory

_CPU = torch.device("cpu")
_MANY_OBJECTS = 100_000  # what PyTorch alone has made once it is imported is three times as many


@dataclass(frozen=True, kw_only=True)
class InitialValues:
    """The initial values of parameters on the meta device, computed on demand."""

    record: Record
    regions: Mapping[str, StorageRegion]  # by the parameter's name in the model; a tied one has several

    def value(self, name: str) -> Tensor:
        """Compute a whole parameter on the CPU, in the dtype in which it was built."""
        region = self.regions[name]
        return self.record.compute({region.storage}).tensor(region)

    def fill(
        self,
        model: nn.Module,
        device: torch.device,
        parts: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        empty_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Allocate a model's meta parameters on `device`, and fill in their initial values.

        A DTensor gets its shard. `parts`: for parameters that were sliced, a function by name from the whole
        parameter to the slice; a DTensor is then a shard of the slice. Parameters must have the names under which
        they were recorded. `empty_like`: allocates a parameter, if it is not to be on `device`.
        """
        empty_like = empty_like or partial(torch.empty_like, device=device)
        filled: dict[int, nn.Parameter] = {}  # by the id of the one before: a tied one stays one
        before = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if not parameter.is_meta:
                continue
            if id(parameter) not in filled:
                empty = empty_like(parameter.detach())
                self._fill_one(name, empty, (parts or {}).get(name))
                filled[id(parameter)] = like(parameter, empty)
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, filled[id(parameter)])
        look_again(model)

    def _fill_one(self, name: str, parameter: Tensor, take: Callable[[Tensor], Tensor] | None) -> None:
        """Compute a whole parameter on the CPU, and copy this rank's part of it into `parameter`.

        The whole parameter is freed on return. Raises ValueError if the part doesn't have the parameter's shape.
        """
        values = self.value(name).to(parameter.dtype)
        if take is not None:
            values = take(values)
        if parameter.shape != values.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; its values have {tuple(values.shape)}")
        if isinstance(parameter, DTensor):
            # Every rank has computed the whole parameter, so nothing is sent.
            shard = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter, values = parameter.to_local(), shard.to_local()
        parameter.copy_(values)


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A newly built model."""

    model: nn.Module
    values: InitialValues | None  # of the parameters on the meta device; None if there are none
    whole_because: str | None = None  # why the construction could not be recorded


def build_recorded(make: Callable[[], nn.Module]) -> InitialModel:
    """Build a model with its parameters on the meta device, or with values if its construction can't be recorded.

    `make` must seed the generators, since it is called again in the second case. Buffers and other tensors have
    values, and so do parameters that were not made by PyTorch's operators, such as those read from a file.
    """
    try:
        return _record(make)
    except Exception as error:  # an error of the model itself is raised again by `make` below
        reason = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
    return InitialModel(model=make(), values=None, whole_because=reason)


def _record(make: Callable[[], nn.Module]) -> InitialModel:
    """Build under the recorder. Raises Unrecordable if the values of a tensor can't be recomputed."""
    with new_objects_alone():
        with recorded() as recording:
            model = make()
        if recording.trouble:
            raise Unrecordable(recording.trouble)
        regions = _regions(model, recording)
        own = {id(parameter) for parameter in model.parameters()}
        # Tensors in plain attributes, such as tables of positions, are computed now, since `fill` does not find them.
        others = [tensor for tensor in _living_tensors() if id(tensor) not in own and recording.knows(tensor)]
    _compute_now(others, recording, {region.storage for region in regions.values()})
    values = InitialValues(record=recording.record, regions=regions)
    return InitialModel(model=model, values=values if regions else None)


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """`model.to(device, dtype)`, except that meta tensors stay on the meta device, and complex ones stay complex.

    `dtype` is a real dtype; complex tensors get the complex dtype of the same precision.
    """

    if not all(map(has_values, model.parameters())):
        return  # tensors without values are already on their device

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(tensor.device if tensor.is_meta else device, in_kind(tensor, dtype))

    with tied_stay_tied(device):
        apply_to_tensors(model, moved)


def tied_stay_tied(device: torch.device) -> AbstractContextManager[None]:
    """Context in which moving a module to a device keeps tied parameters tied.

    On devices that PyTorch knows by name, a parameter object takes over the new memory. On others PyTorch would make
    a new parameter at each place, which would untie them; swapping keeps the objects.
    """
    return nullcontext() if takes_over_memory(device) else _swapping(True)


def look_again(model: nn.Module) -> None:
    """Let FSDP2 and recurrent layers update their references to parameters, some of which were replaced."""
    with _swapping(False):  # with swapping, FSDP2 treats replaced parameters as an error
        apply_to_tensors(model, lambda tensor: tensor)


@contextmanager
def _swapping(on: bool) -> Iterator[None]:
    """Set whether `Module._apply` swaps the contents of parameters instead of making new ones."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def forget_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all parameters and buffers by ones of `dtype` without values; call it in a mode without values."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            empty = torch.empty(parameter.shape, dtype=in_kind(parameter, dtype), device=_CPU)
            made[id(parameter)] = like(parameter, empty)
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, made[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, buffer.to(_CPU, in_kind(buffer, dtype)))


def _regions(model: nn.Module, recording: Recording) -> dict[str, StorageRegion]:
    """The region of each recorded parameter, by name. Raises Unrecordable for parameters that can't be deferred."""
    regions: dict[str, StorageRegion] = {}
    owners: dict[int, nn.Parameter] = {}  # by storage
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Nothing can be replayed for it: what it will draw depends on the first input's shape.
        if is_lazy(parameter):
            raise Unrecordable(f"{name} gets its shape in the first forward")
        if recording.knows(parameter):
            regions[name] = recording.region(parameter)
            if owners.setdefault(regions[name].storage, parameter) is not parameter:
                raise Unrecordable(f"{name} shares memory with another parameter")
        elif parameter.is_meta:
            raise Unrecordable(f"{name} was made on the meta device")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and not recording.knows(buffer):
            raise Unrecordable(f"{name} was made on the meta device")
    return regions


@contextmanager
def new_objects_alone() -> Iterator[None]:
    """Freeze existing objects, so that Python's garbage collector only traverses new ones, to save time.

    Objects that other code has frozen stay frozen. `gc.get_freeze_count` is slow, so it is only called if there are
    many unfrozen objects.
    """
    if len(gc.get_objects()) < _MANY_OBJECTS or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _living_tensors() -> Iterable[Tensor]:
    """All tensors that Python's garbage collector tracks, in attributes, lists or caches."""
    gc.collect()
    # Not isinstance, which asks an object for its __class__: that runs code of the many proxies among them.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _compute_now(tensors: list[Tensor], recording: Recording, taken: set[int]) -> None:
    """Compute tensors now. Raises Unrecordable if one shares memory with a parameter or has a graph."""
    regions = [recording.region(tensor) for tensor in tensors]
    if any(region.storage in taken for region in regions):
        raise Unrecordable("a tensor that shares memory with a parameter and isn't one")
    memory = recording.record.compute({region.storage for region in regions})
    for tensor, region in zip(tensors, regions, strict=True):
        if tensor.grad_fn is not None:
            raise Unrecordable("a tensor with a gradient to come")
        _become(tensor, memory.tensor(region))


def _become(tensor: Tensor, values: Tensor) -> None:
    """Swap a meta tensor for one with values, for all references to it."""
    try:
        swap_tensors(tensor, like(tensor, values))
    except RuntimeError as error:
        raise Unrecordable("a tensor with views or weak references that live on") from error


def like(tensor: Tensor, values: Tensor) -> Any:
    """Wrap values as a parameter or a plain tensor like `tensor`, with its attributes."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    elif type(tensor) is not Tensor:
        raise Unrecordable(f"a {type(tensor).__name__}")
    vars(values).update(vars(tensor))
    return values
