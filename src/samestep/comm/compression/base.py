"""Method: how replicas exchange updates in fewer bytes, and so take another step than one process.

In every step the trainer calls, on all ranks alike:

    backward             leaves this rank's own gradient (or, with a `hook`, the exchanged one)
    method.exchange()    may average it; then norm and clipping
    method.update()      steps the optimizer, and may exchange momenta or parameters

A method that `diverges` lets parameters and optimizer state differ between ranks from one exchange to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from samestep.comm.compression.wire import Wire

Hook = Callable[[Wire, dist.GradBucket], Future[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What a method works on: this rank's copy of the model."""

    parameters: Mapping[str, nn.Parameter]  # those that are trained, by their names, in the model's order
    optimizer: Optimizer
    wire: Wire

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, detached from autograd."""
        return [parameter.detach() for parameter in self.parameters.values()]


@dataclass(frozen=True, kw_only=True)
class Range:
    """This rank's shard of a flat tensor; the ranks' shards cover the tensor without overlap."""

    start: int
    whole: int  # elements of the flat tensor
    values: Tensor


class Method(ABC):
    """One communication-efficient method, constructed on every rank from the options of `samestep.communication`."""

    # Of a method that another distribution adds: the dataclass of its options, whose `kind` is its name.
    options_type: ClassVar[type]
    # Whether ranks' parameters and optimizer state may differ after a step.
    diverges: ClassVar[bool] = False
    # Whether a rank steps with the mean over its own samples; else its gradient is its share of the global batch's:
    # the mean of all ranks' is sum over the global batch / global count, also where ranks' numbers of terms differ.
    own_mean: ClassVar[bool] = False

    def __init__(self, options: Any, replica: Replica) -> None:
        self.replica = replica

    @classmethod
    def hook(cls, options: Any) -> Hook | None:
        """The communication hook for DistributedDataParallel's buckets; None if the method needs none."""
        return None

    def exchange(self) -> bool:
        """Exchange gradients after backward. Returns whether all ranks now have the same gradient."""
        return False

    @abstractmethod
    def update(self, weight: float) -> None:
        """Step, and exchange what this method exchanges. `weight`: terms of this rank's loss in this step."""

    @property
    def alike(self) -> bool:
        """Whether every rank's parameters are the same now."""
        return True

    def averaged(self) -> dict[str, Tensor]:
        """The mean of the ranks' parameters; empty for methods that don't diverge. Every rank must ask."""
        return {}

    # State for checkpoints: tensors that `resume` fills in place.

    def shared(self) -> Mapping[str, Tensor]:
        """State that is the same on every rank."""
        return {}

    def own(self) -> Mapping[str, Tensor]:
        """State that differs between ranks and of which only the mean over the ranks matters, such as residuals.

        When the number of ranks changes, each new rank gets the sum of some old ranks' state, times new ranks / old
        ranks, which keeps the mean.
        """
        return {}

    def ranges(self) -> Mapping[str, Range]:
        """State that is sharded over the ranks."""
        return {}
