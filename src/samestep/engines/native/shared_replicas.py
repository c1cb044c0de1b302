"""The native step of replicas that share one copy of their parameters on a host: `run.share_replicas`."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.base import Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_as
from samestep.errors import UserError
from samestep.parallel.ddp import GradientExchange
from samestep.parallel.holdings import Holdings, state_tensors
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.optimizer.shared import SharedReplicas
from samestep.parallel.optimizer.spread import check_by_number
from samestep.parallel.sharding import ShardTable
from samestep.tasks.losses import TaskLoss


def prepare(model: nn.Module, how: Preparation, failures: LayoutFailures) -> "SharedReplicasTrainer":
    """Share a model between the ranks of this host. Raises UserError for devices and models that it can't take."""
    if how.device.type != "cpu":
        raise UserError(
            f"run.share_replicas is true, and the ranks compute on {how.device.type}; use device: cpu, or "
            "share_replicas: false"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise UserError(f"run.share_replicas is true, and the parameter {name} is complex; leave it out")
    in_precision = Precision(how.options.precision, how.device)
    spread_model = spread_as(model, how, in_precision, exchange=GradientExchange())
    shared = SharedReplicas(model, how.layout, spread_model.parts, how.mesh.data_group)
    optimizer = how.optimizer_of(shared.held.named_parameters())
    check_by_number(optimizer, how.layout, "run.share_replicas is true, with which ranks step rows of a parameter")
    setup = TrainerSetup.of(model, how, spread_model, optimizer, in_precision, failures=failures)
    return SharedReplicasTrainer(setup, shared=shared)


class SharedReplicasTrainer(NativeTrainer):
    """Trainer of replicas in shared memory: each rank averages the gradients of its rows and updates them for all."""

    def __init__(self, setup: TrainerSetup, *, shared: SharedReplicas) -> None:
        super().__init__(setup)
        self._shared = shared

    def backward(self, batch: StepBatch, loss: TaskLoss) -> Tensor:
        """Run backward into this rank's gradients, then average its rows of the gradient over all ranks."""
        totals = super().backward(batch, loss)
        self._shared.sum()
        return totals

    def stepped(self) -> Iterator[nn.Parameter]:
        """The rows that this rank scales, clips and steps."""
        for _, rows in self._shared.held.named_parameters():
            yield rows

    def _gradient_norm(self) -> Tensor:
        return self._shared.norm()

    def update(self) -> None:
        """Update this rank's rows of the shared parameters, and wait until all ranks have updated theirs."""
        super().update()
        self._shared.wait()

    def _optimized(self) -> tuple[nn.Module, ShardTable]:
        return self._shared.held, self._shared.held_parts

    def restore(self, *arguments: Any, **keywords: Any) -> None:
        """Load a checkpoint, and wait until all ranks have written the shared parameters."""
        super().restore(*arguments, **keywords)  # every rank writes the same parameters
        self._shared.wait()

    def holdings(self) -> Holdings:
        """This rank's holdings: of the shared memory, which counts once a host, its own rows and gradients."""
        return Holdings(
            parameters=self._shared.parameters,
            gradients=self._shared.gradients,
            optimizer_state=list(state_tensors(self.optimizer)),
            host=list(self._spread.host.buffers()),
        )
