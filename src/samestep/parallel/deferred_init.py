"""Initial weights: those of one process under every layout, and no rank computes more of them at once than it must.

A model is built without memory for its parameters, then spread, and then each rank fills what it holds: it
computes a parameter whole, with the very random numbers that the construction drew, takes its part, and frees
the whole before the next one.

Why not seed each parameter by its name: the initial weights would be others than those of the plain model, which the
proof is held against, and which a user gets without samestep. So the construction's own draws are recorded
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
from samestep.parallel.init_recorder import Record, Recording, Region, Unrecordable, recorded
from samestep.parallel.valueless import has_values

_CPU = torch.device("cpu")
_MANY_OBJECTS = 100_000  # what PyTorch alone has made once it is imported is three times as many


@dataclass(frozen=True, kw_only=True)
class InitialValues:
    """The initial values of the parameters that lie on the meta device, each computed when it is asked for."""

    record: Record
    regions: Mapping[str, Region]  # by the parameter's name in the model; a tied one has several

    def value(self, name: str) -> Tensor:
        """A parameter's values as one process has them, whole, on the CPU, in the dtype it was built in."""
        region = self.regions[name]
        return self.record.compute({region.storage}).tensor(region)

    def fill(
        self,
        model: nn.Module,
        device: torch.device,
        parts: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        empty_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Give the parameters of a model that are on the meta device memory on `device`, and their values.

        A DTensor gets its shard of the whole. `parts` says by name which part of the whole a parameter is, where
        the model was sliced by hand: whole -> part; a DTensor is then a shard of that part. Parameters must have
        the names under which they were recorded. `empty_like` gives memory for one, where that is not the device's.
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
        """Compute a parameter whole, on the CPU, take this rank's part of it, and copy that into `parameter`.

        The whole is freed when this returns. Raises ValueError where the part hasn't the parameter's shape.
        """
        values = self.value(name).to(parameter.dtype)
        if take is not None:
            values = take(values)
        if parameter.shape != values.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; its values have {tuple(values.shape)}")
        if isinstance(parameter, DTensor):
            # Every rank has computed the whole, so nothing is sent.
            shard = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter, values = parameter.to_local(), shard.to_local()
        parameter.copy_(values)


@dataclass(frozen=True, kw_only=True)
class InitialModel:
    """A model as it was built."""

    model: nn.Module
    values: InitialValues | None  # of the parameters on the meta device; None where all are there
    whole_because: str | None = None  # what stood in the way of recording it


def build_recorded(make: Callable[[], nn.Module]) -> InitialModel:
    """Build a model with its parameters on the meta device, or whole where its construction can't be recorded.

    `make` must seed what it draws from: it is called again in the second case. All that isn't a parameter, such as
    buffers, has its values; so has a parameter that was not made by torch's operators, such as one from a file.
    """
    try:
        return _record(make)
    except Exception as error:  # the model's own mistakes show again when it is built whole
        reason = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
    return InitialModel(model=make(), values=None, whole_because=reason)


def _record(make: Callable[[], nn.Module]) -> InitialModel:
    """Build under the recorder. Raises Unrecordable where a tensor's values can't be repeated."""
    with new_objects_alone():
        with recorded() as recording:
            model = make()
        if recording.trouble:
            raise Unrecordable(recording.trouble)
        regions = _regions(model, recording)
        own = {id(parameter) for parameter in model.parameters()}
        # Tensors that a model keeps in plain attributes, tables of positions say: computed now, since nobody asks for
        # them later.
        others = [tensor for tensor in _living_tensors() if id(tensor) not in own and recording.knows(tensor)]
    _compute_now(others, recording, {region.storage for region in regions.values()})
    values = InitialValues(record=recording.record, regions=regions)
    return InitialModel(model=model, values=values if regions else None)


def move(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """`model.to(device, dtype)`, but what is on the meta device stays there, and what is complex stays complex.

    `dtype` is a real one; complex numbers become pairs of it.
    """

    if not all(map(has_values, model.parameters())):
        return  # they are where they are to be

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(tensor.device if tensor.is_meta else device, in_kind(tensor, dtype))

    with tied_stay_tied(device):
        model._apply(moved)


def tied_stay_tied(device: torch.device) -> AbstractContextManager[None]:
    """In which a module may be moved to a device.

    A parameter takes over memory on an accelerator of those that PyTorch knows by name. On another PyTorch would make
    one more parameter in each place, and those that are tied would come apart; swapping keeps the objects.
    """
    takes_memory = torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
    return nullcontext() if takes_memory else _swapping(True)


def look_again(model: nn.Module) -> None:
    """Have FSDP2 and recurrent layers look for their parameters, of which some are other objects than before."""
    with _swapping(False):  # FSDP2 takes other objects for a mistake where it is on
        model._apply(lambda tensor: tensor)


@contextmanager
def _swapping(on: bool) -> Iterator[None]:
    """Whether functions applied to a module's parameters swap what is in them, or make others where they must."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def forget_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter and buffer of `dtype` the shape that it has and nothing else, in a mode without values."""
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


def _regions(model: nn.Module, recording: Recording) -> dict[str, Region]:
    """Where the record holds each parameter that was recorded."""
    regions: dict[str, Region] = {}
    owners: dict[int, nn.Parameter] = {}  # by storage
    for name, parameter in model.named_parameters(remove_duplicate=False):
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
    """Freeze all that was there before: Python's garbage collector takes tenths of a second to walk through it.

    What somebody else has frozen stays so. `gc.get_freeze_count` counts object by object, so it comes second: where
    few are left to walk through, there is nothing to gain.
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
    """Every tensor that Python can reach, wherever a construction has left it: attributes, lists, caches."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def _compute_now(tensors: list[Tensor], recording: Recording, taken: set[int]) -> None:
    """Give tensors their values now, together. Raises Unrecordable for what shares memory or waits for a gradient."""
    regions = [recording.region(tensor) for tensor in tensors]
    if any(region.storage in taken for region in regions):
        raise Unrecordable("a tensor that shares memory with a parameter and isn't one")
    memory = recording.record.compute({region.storage for region in regions})
    for tensor, region in zip(tensors, regions, strict=True):
        if tensor.grad_fn is not None:
            raise Unrecordable("a tensor with a gradient to come")
        _become(tensor, memory.tensor(region))


def _become(tensor: Tensor, values: Tensor) -> None:
    """Make a tensor on the meta device the one that holds these values, for all who refer to it."""
    try:
        swap_tensors(tensor, like(tensor, values))
    except RuntimeError as error:
        raise Unrecordable("a tensor with views or weak references that live on") from error


def like(tensor: Tensor, values: Tensor) -> Any:
    """These values as what a tensor is: a parameter or a plain tensor, with the attributes that it was given."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    elif type(tensor) is not Tensor:
        raise Unrecordable(f"a {type(tensor).__name__}")
    vars(values).update(vars(tensor))
    return values
