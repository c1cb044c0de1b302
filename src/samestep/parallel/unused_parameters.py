"""Tracks which parameters received a gradient on any rank, and restores `grad=None` for those that did not.

Samples may decide which branch of a model runs. Then a rank has no gradient for parameters that its samples didn't
use, while its peers wait for its part of the average; and parameters that no sample used would get a zero gradient,
with which AdamW still decays and moves them.

Three ways, by how gradients travel: `UnusedParametersAlone` (one process: autograd leaves None),
`UnusedParametersOfReplicas` (DDP waits for every parameter, so each is reached, with zeros) and
`UnusedParametersOfShards` (FSDP2 waits for every unit). Each rank notes with a hook what it really used, the ranks
take the maximum, and what no rank used gets None again. AdamW passes over None, while with zeros it would decay the
weight and move it by its first moment (Loshchilov & Hutter 2019).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from samestep.comm.messages import largest
from samestep.errors import UserError
from samestep.parallel.sharding import local
from samestep.parallel.valueless import has_values


class UnusedParameters(ABC):
    """Tracks which parameters get a gradient on this rank, and restores `grad=None` for those that no rank used."""

    @abstractmethod
    def reach(self, loss: Tensor) -> Tensor:
        """Make the loss of a step's last backward depend on every parameter, if all gradients must be sent."""

    def sum_along(self, totals: Tensor) -> bool:
        """Ask `settle` to sum a tensor over the ranks in place, as part of its message. False if it can't."""
        return False

    @abstractmethod
    def settle(self) -> None:
        """After the last backward of a step, finish the exchange, and set gradients of unused parameters to None.

        Called once a step, before gradients are scaled to the mean, clipped and used. An engine that exchanges
        gradients itself does it here, or waits here for messages from backward: each parameter's gradient becomes the
        average over the ranks, where ranks without a gradient count as zero. It subclasses
        `UnusedParametersOfReplicas`, averages, and then calls `super().settle()`. Its `reach` returns the loss as it
        is, if no message waits for backward. See `engines/horovod.py`.
        """

    def noted(self) -> list[bool]:
        """Flags of the parameters that this rank used, for another message; call `forget` then, not `settle`."""
        return []

    def forget(self, used: Sequence[int]) -> None:
        """Set the gradients of parameters that no rank used to None. `used`: whether any rank did, as in `noted`."""
        assert not used


class UnusedParametersAlone(UnusedParameters):
    """One process, where autograd itself leaves unused parameters without a gradient."""

    def reach(self, loss: Tensor) -> Tensor:
        return loss

    def settle(self) -> None:
        pass


class UnusedParametersOfRanks(UnusedParameters):
    """Tracks used parameters over all ranks. `numbers`: parameter name -> index in `noted`.

    It registers no hooks: an engine that exchanges gradients itself subclasses `UnusedParametersOfReplicas`.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, names: Iterable[str] | None = None) -> None:
        """`names`: of the whole model's parameters, if ranks hold different ones."""
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.numbers = {name: number for number, name in enumerate(names or self._parameters)}
        self._group = group
        self._device_type = local(next(iter(model.parameters())).detach()).device.type
        self._used = [False] * len(self.numbers)

    def _note(self, name: str, parameter: Tensor) -> Any:
        """Register a hook on the tensor that accumulates a parameter's gradient."""
        number = self.numbers[name]

        def note(reached: Tensor) -> None:
            # The hook is also called for parameters that were only reached, whose gradient is None.
            self._used[number] |= reached.grad is not None

        return parameter.register_post_accumulate_grad_hook(note)

    def by_any(self, *also: int) -> list[int]:
        """Whether any rank used each parameter, and the maxima of further numbers over the ranks. Every rank asks."""
        return largest([*self.noted(), *also], self._group, self._device_type)

    def noted(self) -> list[bool]:
        noted, self._used = self._used, [False] * len(self._used)
        return noted

    def forget(self, used: Sequence[int]) -> None:
        for name, parameter in self._parameters.items():
            if not used[self.numbers[name]]:
                parameter.grad = None


class UnusedParametersOfReplicas(UnusedParametersOfRanks):
    """For DistributedDataParallel, which waits for every parameter's gradient, so `reach` includes all of them."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, names: Iterable[str] | None = None) -> None:
        super().__init__(model, group, names)
        self._totals: Tensor | None = None
        for name, parameter in self._parameters.items():
            self._note(name, parameter)

    def reach(self, loss: Tensor) -> Tensor:
        return depending(loss, self._parameters.values())

    def sum_along(self, totals: Tensor) -> bool:
        """On a CPU, the message of flags includes the totals."""
        # On an accelerator they would have to be copied to the host, where the flags are.
        if totals.device.type != "cpu" or not has_values(totals):
            return False
        self._totals = totals
        return True

    def settle(self) -> None:
        """All-reduce the flags, with the totals if there are any. DDP has already averaged the gradients."""
        totals, self._totals = self._totals, None
        if totals is None:
            self.forget(self.by_any())
            return
        # [loss sum, count, ...] and a flag for each parameter, whose sum says how many ranks used it. In float64, so
        # that counts are exact.
        message = torch.cat([totals, torch.tensor(self.noted(), dtype=totals.dtype)])
        dist.all_reduce(message, group=self._group)
        totals.copy_(message[: len(totals)])
        self.forget([int(count) for count in message[len(totals) :].tolist()])


class UnusedParametersOfShards(UnusedParametersOfRanks):
    """For FSDP2, which gathers and reduces by units: ranks must run the same units, with zeros for unused ones."""

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, *, may_differ: bool, names: Iterable[str] | None = None
    ) -> None:
        """`may_differ`: samples may decide which units run, so the ranks compare before each unit."""
        super().__init__(model, group, names)
        self._watched: dict[int, Tensor] = {}
        self._calls = 0  # a hash of the units that ran, in their order
        units = list(sharded_units(model))
        if may_differ and len(units) > 1:
            self._agree_before_each(model, [module for module, _ in units])
        for number, (module, parameters) in enumerate(units):
            # FSDP's own hook, which gathers the parameters, runs before this one.
            module.register_forward_pre_hook(self._watch(number, parameters))
        if isinstance(model, FSDPModule) and hasattr(model, "set_reduce_scatter_unused_params"):  # PyTorch 2.13
            model.set_reduce_scatter_unused_params(True)

    def _watch(self, number: int, parameters: Sequence[tuple[nn.Module, str, str]]) -> Any:
        """A hook before a unit's forward: watches the gathered parameters, in which gradients come."""

        def watch(module: nn.Module, arguments: Any) -> None:
            if not torch.is_grad_enabled():
                return
            # Ranks that ran the same units in another order must differ; 31 bits, so that its negative fits as well.
            self._calls = hash((self._calls, number)) & 0x7FFFFFFF
            for owner, attribute, name in parameters:
                gathered = getattr(owner, attribute)
                if id(gathered) not in self._watched:
                    self._watched[id(gathered)] = gathered  # kept, so that no other gets its identity
                    self._note(name, gathered)

        return watch

    def _agree_before_each(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        """Add hooks that check that all ranks run the same unit, before its all-gather."""
        names = {module: name for name, module in model.named_modules()}
        before = [names[unit] or "the end of the forward" for unit in units]

        def agree(number: int) -> None:
            """Raise UserError on all ranks if they are about to run different units."""
            # The maximum and the negated minimum in one message.
            high, low = largest([number, -number], self._group, self._device_type)
            if high != -low:
                raise UserError(_OTHER_BLOCKS.format(f"at {before[-low]} and at {before[high]}"))

        for number, unit in enumerate(units[1:], start=1):
            # Before FSDP's own hook, which gathers the parameters.
            unit.register_forward_pre_hook(lambda *_, number=number: agree(number), prepend=True)
        model.register_forward_hook(lambda *_: agree(0))

    def reach(self, loss: Tensor) -> Tensor:
        return loss

    def settle(self) -> None:
        """All-reduce the flags, and check that all ranks ran the same units in the same order."""
        *used, most, least = self.by_any(self._calls, -self._calls)
        self._calls = 0
        if most != -least:
            raise UserError(_OTHER_BLOCKS.format("in another order"))
        self.forget(used)


_OTHER_BLOCKS = (
    "the ranks of one step run other blocks of the model, each for its own samples (they are {}), and sharded "
    "parameters are gathered block by block, which wants the same of all; use dp or zero1x, which need no such order"
)


def sharded_units(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[nn.Module, str, str]]]]:
    """Yield each FSDP unit with its trained parameters: (module, attribute, name in the model)."""
    units: dict[str, tuple[nn.Module, list[tuple[nn.Module, str, str]]]] = {}
    seen: set[int] = set()
    sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for name, module in model.named_modules():
        if name in sharded:
            units[name] = module, []
        # The innermost enclosing unit has the longest name.
        unit = max((other for other in units if _inside(name, other)), key=len)
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:  # tied parameters go by their first name
                seen.add(id(parameter))
                units[unit][1].append((module, attribute, f"{name}.{attribute}" if name else attribute))
    yield from units.values()


def _inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def depending(tensor: Tensor, on: Iterable[Tensor]) -> Tensor:
    """Make a tensor depend on others, to which it passes no gradient.

    Backward reaches each of them once, after all real uses, and also if there are none.
    """
    return _Reach.apply(tensor, *on)  # pyright: ignore[reportReturnType]


class _Reach(torch.autograd.Function):
    """Forward: identity of the first argument. Backward: None for all others.

    As an input of this function every parameter has an edge, by which backward reaches its AccumulateGrad node; None
    adds nothing there, but runs its hooks.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:  # pyright: ignore
        ctx.parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return gradient, *(None for _ in range(ctx.parameters))
