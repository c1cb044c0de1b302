"""Overlap ZeRO-1's broadcasts of updated parameters with the next forward.

Parameters are sent in lots, in the order of the next forward: first the parameters outside of all units, then those
of the units. The forward of the first unit of a lot waits for the lot; the model's forward waits for the parameters
outside of units. Code that reads parameters elsewhere (an evaluation, a checkpoint, a proof) must call `settle`
first. Meanwhile a rank holds the messages: at most the bytes of its parameters once more, at a time when it holds no
activations yet.

Why lots, and not one wait: the first units can run as soon as their own parameters have arrived. Back ends begin the
broadcasts of a group in the order of the calls, so sending in the order of use makes each wait as short as it can be.
A lot has about one message from each owner, so that all owners' links are busy at the same time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BESIDE = 0  # the lot of what is in no unit


@dataclass(frozen=True, kw_only=True)
class Message:
    """A broadcast of parameters from their owner to the other ranks of its group."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor  # their values, flattened; for a single parameter its own memory
    work: dist.Work | None
    own: bool  # whether this rank is the owner

    @classmethod
    def send(cls, parameters: Sequence[nn.Parameter], owner: int, group: dist.ProcessGroup) -> "Message":
        """Start to broadcast parameters of one dtype; `owner`: the owner's rank in the group."""
        values = [parameter.data for parameter in parameters]
        own = dist.get_rank(group) == owner
        if len(values) == 1:
            flat = values[0]
        elif own:
            flat = torch.cat([value.reshape(-1) for value in values])
        else:
            flat = values[0].new_empty(sum(value.numel() for value in values))
        work = dist.broadcast(flat, group_src=owner, group=group, async_op=True)
        return cls(parameters=parameters, flat=flat, work=work, own=own)

    def put(self) -> None:
        """Wait for the values, and copy them into the parameters.

        Autograd's version counters are incremented, so that a forward that used the old values fails in backward.
        """
        if self.work is not None:
            self.work.wait()
        if self.own:
            return
        if len(self.parameters) == 1:
            # The broadcast has written into the parameter's own memory, unnoticed by autograd.
            torch.autograd.graph.increment_version(self.parameters[0])
            return
        parts = self.flat.split([parameter.numel() for parameter in self.parameters])
        with torch.no_grad():
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))


class LateParameters:
    """The pending broadcasts of a model's parameters, and the forward hooks that wait for them."""

    def __init__(self, units: Sequence[nn.Module], lot_bytes: int, *, compiled: bool) -> None:
        """`units`: in the order in which they run, the same on every rank; no other module uses their parameters.

        `lot_bytes`: minimum bytes of a lot. `compiled`: whether blocks are compiled, which units may be parts of.
        """
        self._lot_of: dict[nn.Parameter, int] = {}
        self._on_their_way: dict[int, list[Message]] = {}
        # Consecutive units share a lot until it has `lot_bytes`.
        lot, size = _BESIDE + 1, 0
        for unit in units:
            parameters = list(unit.parameters())
            self._lot_of.update(dict.fromkeys(parameters, lot))
            unit.register_forward_pre_hook(self._waiting(lot, compiled))
            size += sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            if size >= lot_bytes:
                lot, size = lot + 1, 0

    def lots(self, parameters: Sequence[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
        """Parameters by their lot."""
        by_lot: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_lot.setdefault(self._lot_of.get(parameter, _BESIDE), []).append(parameter)
        return by_lot

    def add(self, lot: int, message: Message) -> None:
        self._on_their_way.setdefault(lot, []).append(message)

    def begin(self) -> None:
        """Wait for the parameters outside of all units, before the model's forward."""
        self.wait(_BESIDE)

    def wait(self, lot: int) -> None:
        """Wait for the pending broadcasts of a lot."""
        for message in self._on_their_way.pop(lot, ()):
            message.put()

    def settle(self) -> None:
        """Wait for all pending broadcasts."""
        for lot in sorted(self._on_their_way):
            self.wait(lot)

    def _waiting(self, lot: int, compiled: bool) -> Callable[[nn.Module, Any], None]:
        """Make a forward pre-hook of a unit that waits for its lot; the block around the unit may be compiled."""

        def wait(module: nn.Module, arguments: Any) -> None:
            self.wait(lot)

        # The import of the compiler, which disable() needs, takes seconds: only where something is compiled.
        uncompiled: Any = torch.compiler.disable(wait) if compiled else wait
        return uncompiled
