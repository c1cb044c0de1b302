"""Usage: what a rank held and sent in one step, counted while the step is taken."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from samestep.comm.traffic import Traffic
from samestep.parallel.holdings import Holdings
from samestep.training.allocations import Allocations

Report = TypeVar("Report")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes of one rank. The first three are counted from the tensors that it holds when the step is over.

    Where a layout moves something to the host's memory or to disk, it counts there and nowhere else, also on a
    CPU, whose own memory is the host's.
    """

    parameters: int  # of a sharded parameter the rank's shard
    gradients: int
    optimizer_state: int  # Adam's two averages, SGD's momentum, and each parameter's count of steps
    # Most bytes at one moment from the step's begin to its update, of everything that it made besides gradients and
    # gathered parameters: activations kept for backward, what operators work on, gradients on their way.
    activations: int
    gathered: int  # the same of parameters gathered from shards, with the messages that gather them
    host: int  # moved to the host's memory
    disk: int  # moved to files
    sent: Mapping[str, int]  # in one step, by kind of collective; see samestep.comm.traffic.Traffic

    @property
    def sent_in_all(self) -> int:
        return sum(self.sent.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "sent": dict(self.sent)}


class Holder(Protocol):
    """Who keeps a model and its optimizer: a trainer."""

    def holdings(self) -> Holdings: ...

    def sent(self) -> Mapping[str, int]: ...


def measured(trainer: Holder, step: Callable[[], Report]) -> tuple[Report, Usage]:
    """Take a step, slower than others, and say what this rank held and sent in it."""
    traffic, allocations = Traffic(), Allocations()
    with allocations.follow(), traffic:
        report = step()
    held = trainer.holdings()
    sent = Counter({kind: round(count) for kind, count in traffic.sent.items()}) + Counter(trainer.sent())
    usage = Usage(
        parameters=_bytes(held.parameters),
        gradients=_bytes(held.gradients),
        optimizer_state=_bytes(held.optimizer_state),
        activations=allocations.peak(without=[*held.gradients, *held.host]),
        gathered=allocations.peak_gathered(),
        host=_bytes(held.host),
        disk=_bytes(held.disk),
        sent=dict(sent),
    )
    return report, usage


def gather(usage: Usage | None) -> Sequence[Usage]:
    """Every rank's usage, in the order of the ranks; every rank must ask. Nothing where no step was measured."""
    if usage is None:
        return ()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, usage)
    return tuple(ranks)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
