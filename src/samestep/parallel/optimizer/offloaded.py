"""Offload of the optimizer: its state and its step are on the CPU, parameters and gradients stay on the device.

State and copies of the parameters lie in the host's memory, or in a mapped file of which a parameter at a time is
in use. (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity.)

A step: gradients to the CPU, step there, parameters back. With pinned memory both copies are asynchronous: those to
the CPU are waited for before the step, those back are in the device's stream before its next kernel. With a mapped
file one parameter at a time goes through all of it, and its pages are let go afterwards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.errors import LayoutError
from samestep.layout import Layout
from samestep.parallel.offload.memory import HostMemory, MappedFile, address
from samestep.parallel.optimizer.joined import loss_of
from samestep.parallel.optimizer.lots import Lot
from samestep.parallel.sharding import local
from samestep.torch_internals.tensors import version_of

# Elementwise optimizers, which can step a shard like a whole parameter.
BY_NUMBER = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


class OffloadedOptimizer(Optimizer):
    """Steps copies of the parameters on the CPU, with an optimizer of the given kind.

    Its groups hold the device's parameters, so gradients are zeroed, unscaled and clipped, and learning rates set, as
    with any optimizer. `state` is that of the copies.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        kind: Callable[..., Optimizer],
        memory: HostMemory | MappedFile,
        by_number: bool = False,
        **settings: Any,
    ) -> None:
        """`by_number`: whether the kind is known to be elementwise."""
        super().__init__(params, settings)
        self._memory = memory
        for group in self.param_groups:
            if not by_number:
                _check_shards(group["params"], kind)
        copies = [[_Copy(p, memory) for p in group["params"]] for group in self.param_groups]
        if isinstance(memory, MappedFile):  # one parameter at a time is in memory
            lots = [{number: [copy]} for number, of_group in enumerate(copies) for copy in of_group]
        else:
            lots = [dict(enumerate(copies))]
        self._lots = [_OffloadedLot(kind, settings, self.param_groups, lot) for lot in lots]
        for own_lot in self._lots:
            own_lot.lot.complete(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fetch gradients, step, and copy parameters back: all at once, or with a file one parameter at a time."""
        loss = loss_of(closure)
        for lot in self._lots:
            lot.step(self.param_groups)
            for copy in lot.copies:
                if copy.host in lot.optimizer.state:
                    self.state[copy.parameter] = lot.optimizer.state[copy.host]
                    self._move(lot.optimizer.state[copy.host])
            if isinstance(self._memory, MappedFile):
                self._memory.let_go()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the copies' optimizers, onto the CPU or into the file."""
        super().load_state_dict(state_dict)
        for lot in self._lots:
            for copy in lot.copies:
                if copy.parameter in self.state:
                    state = lot.optimizer.state[copy.host] = dict(self.state[copy.parameter])
                    for name, value in state.items():
                        state[name] = value.cpu() if isinstance(value, Tensor) else value
                    self.state[copy.parameter] = state
                    self._move(state)

    def stepping(self) -> Iterator[Optimizer]:
        """The optimizers that step the copies."""
        for lot in self._lots:
            yield lot.optimizer

    def host_tensors(self) -> Iterator[Tensor]:
        """Its tensors in host memory, except step counts."""
        if isinstance(self._memory, HostMemory):
            yield from self._tensors()

    def disk_tensors(self) -> Iterator[Tensor]:
        """Its tensors in the file."""
        if isinstance(self._memory, MappedFile):
            yield from self._tensors()

    def _tensors(self) -> Iterator[Tensor]:
        for lot in self._lots:
            for copy in lot.copies:
                yield copy.host.detach()
                if copy.gradient is not None:
                    yield copy.gradient
                for value in lot.optimizer.state.get(copy.host, {}).values():
                    if isinstance(value, Tensor) and value.ndim:
                        yield value

    def _move(self, state: dict[str, Any]) -> None:
        """Move state that an optimizer has allocated itself into the file, if there is one."""
        if not isinstance(self._memory, MappedFile):
            return
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.numel() and not self._memory.holds(value):
                mapped = self._memory.empty(value.shape, value.dtype)
                mapped.copy_(value)
                state[name] = mapped


def offloaded_kind(
    kind: type[Optimizer], layout: Layout, device: torch.device, folder: Path | None
) -> Callable[..., Optimizer]:
    """Make the constructor of an optimizer kind, offloaded if the layout says so."""
    if layout.offloads("optimizer"):
        return partial(OffloadedOptimizer, kind=kind, memory=HostMemory(device))
    if layout.offloads("optimizer-disk"):
        return partial(OffloadedOptimizer, kind=kind, memory=MappedFile(folder))
    return kind


class _Copy:
    """A parameter (or local shard) on the device, and its copy and gradient on the CPU."""

    def __init__(self, parameter: nn.Parameter, memory: HostMemory | MappedFile) -> None:
        value = local(parameter.detach())
        self.parameter = parameter
        self.host = nn.Parameter(memory.empty(value.shape, value.dtype))
        self.gradient: Tensor | None = None  # kept, since allocating pinned memory is slow
        if isinstance(memory, HostMemory):
            self.gradient = memory.empty(value.shape, value.dtype)
        self._asynchronous = isinstance(memory, HostMemory) and memory.pinned
        self._seen: tuple[int, int, int] | None = None  # address, offset and version of the device's value

    def fetch(self) -> None:
        """Copy the gradient to the CPU, and the value if anything but `put` has written it."""
        value = local(self.parameter.detach())
        # Written since `put`, by loading a checkpoint or swapping in a weight average.
        if self._seen != _state_of(value):
            self.host.copy_(value, non_blocking=self._asynchronous)
        if self.parameter.grad is None:
            self.host.grad = None
        elif self.gradient is None:
            self.host.grad = local(self.parameter.grad).to(self.host.device)
        else:
            self.host.grad = self.gradient.copy_(local(self.parameter.grad), non_blocking=self._asynchronous)

    def put(self) -> None:
        """Copy the updated value to the device."""
        value = local(self.parameter.detach())
        value.copy_(self.host, non_blocking=self._asynchronous)
        self._seen = _state_of(value)
        self.host.grad = None


def _state_of(value: Tensor) -> tuple[int, int, int]:
    return address(value), int(value.storage_offset()), version_of(value)


class _OffloadedLot:
    """Copies that are stepped together."""

    def __init__(
        self,
        kind: Callable[..., Optimizer],
        settings: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        copies: Mapping[int, Sequence[_Copy]],  # by the number of their group
    ) -> None:
        self.copies = [copy for of_group in copies.values() for copy in of_group]
        parameters = {number: [copy.parameter for copy in of_group] for number, of_group in copies.items()}
        hosts = {copy.parameter: copy.host for copy in self.copies}
        self.lot = Lot(kind, settings, groups, parameters, hosts)

    @property
    def optimizer(self) -> Optimizer:
        return self.lot.optimizer

    def step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for copy in self.copies:
            copy.fetch()
        device = self.copies[0].parameter.device
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # until the copies have arrived
        self.lot.step(groups)
        for copy in self.copies:
            copy.put()


def _check_shards(parameters: Sequence[Tensor], kind: Any) -> None:
    """Raise LayoutError for shards of parameters with an optimizer that isn't elementwise."""
    if kind not in BY_NUMBER and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise LayoutError(
            f"offload of optimizer {getattr(kind, '__name__', kind)}: of shards of parameters only "
            f"{', '.join(kind.__name__ for kind in BY_NUMBER)} can be offloaded; use dp or zero1"
        )
