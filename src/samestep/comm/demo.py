"""Demonstrate a collective: each rank's tensor before and after it, with values that identify their rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep.comm.collectives import COLLECTIVES, Buffers, Collective
from samestep.comm.measure import Channel
from samestep.comm.shared_memory.process_group import KernelGroup

_ELEMENTS = 4  # of a message, or one for each rank where there are more


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """The tensors of all ranks, [ranks][elements]; empty for a rank without an input or an output."""

    collective: str
    transport: str  # as it was chosen
    carrier: str  # what the message went through: gloo where shared memory leaves a collective to it
    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    undefined: frozenset[int]  # ranks whose tensors are undefined afterwards

    @property
    def summary(self) -> str:
        return COLLECTIVES[self.collective].summary


def demonstrate(name: str, channel: Channel, control: dist.ProcessGroup) -> Demonstration | None:
    """Run a collective once on small numbers. Returns the demonstration on rank 0, None on the others.

    The input of rank r is 10 (r + 1), 10 (r + 1) + 1 and so on. `control` is a gloo group of all ranks.
    """
    collective, rank, n = COLLECTIVES[name], control.rank(), control.size()
    buffers = collective.buffers(max(1, _ELEMENTS // n), n, rank, dtype=torch.int32, device=channel.device)
    first = 10 * (rank + 1)
    buffers.given.copy_(torch.arange(first, first + buffers.given.numel(), dtype=torch.int32))
    before = buffers.given.tolist()
    carrier = _carried(collective, channel, buffers)
    everything: list[tuple[list[int], list[int]]] = [([], []) for _ in range(n)]
    own_values = (before, buffers.taken.tolist())
    dist.gather_object(own_values, everything if rank == 0 else None, group_dst=0, group=control)
    if rank != 0:
        return None
    gave = [input_ for input_, _ in everything]
    silent = {
        number for number in range(n) if collective.takes != "none" and collective.expected(gave, number) is None
    }
    return Demonstration(
        collective=name,
        transport=channel.transport,
        carrier=carrier,
        before=gave,
        after=[taken for _, taken in everything],
        undefined=frozenset(number for number in silent if everything[number][1]),
    )


def _carried(collective: Collective, channel: Channel, buffers: Buffers) -> str:
    """Run a collective. Returns the transport that it went through."""
    group = channel.group
    if not isinstance(group, KernelGroup):  # also where the ranks of a host can't share memory
        collective.run(group, buffers)
        return "gloo" if channel.transport == "shared-memory" else channel.transport
    taken_over: list[str] = []  # from gloo

    def count(kind: str, message: int, ranks: int) -> None:
        taken_over.append(kind)

    group.counters.append(count)
    try:
        collective.run(group, buffers)
    finally:
        group.counters.remove(count)
    return channel.transport if taken_over else "gloo"
