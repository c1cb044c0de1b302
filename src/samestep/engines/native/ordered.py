"""The native step with gradients summed in one order whatever the layout: `run.reduction: ordered`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.loader import MicroBatch, StepBatch
from samestep.engines.base import Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_as
from samestep.errors import UserError, index_errors_explained
from samestep.parallel.ddp import GradientExchange
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.optimizer.spread import spread_optimizer
from samestep.parallel.ordered import OrderedModel, total_of_halves
from samestep.parallel.parallel_model import WholeModel
from samestep.tasks.base import sum_and_count
from samestep.tasks.losses import TaskLoss
from samestep.torch_internals.modules import AnyBatchNorm


def check_model(model: nn.Module) -> None:
    """Raise UserError for a layer whose training forward depends on more than a virtual rank's samples."""
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm) and module.training:
            raise UserError(
                f"run.reduction is ordered, and {name or 'the model'} ({type(module).__name__}) takes its statistics "
                "from the whole batch, which no virtual rank sees; use group norm or layer norm, or reduction: fast"
            )


def prepare(model: nn.Module, how: Preparation, failures: LayoutFailures) -> "OrderedTrainer":
    """Spread a model without gradient averaging, and make the trainer that sums virtual ranks' gradients in order."""
    assert how.options.virtual_ranks is not None
    check_model(model)
    in_precision = Precision(how.options.precision, how.device)
    whole = spread_as(model, how, in_precision, exchange=GradientExchange())
    assert isinstance(whole, WholeModel)  # of the layouts that were not refused
    ordered = OrderedModel(whole, how.options.virtual_ranks)
    optimizer = spread_optimizer(
        how.optimizer_of(model.named_parameters()), how.layout, how.mesh, how.device, spread_model=ordered
    )
    setup = TrainerSetup.of(model, how, ordered, optimizer, in_precision, failures=failures)
    return OrderedTrainer(setup, ordered=ordered)


class OrderedTrainer(NativeTrainer):
    """Steps whose losses, gradients and norms are sums over virtual ranks, in an order that no layout changes."""

    def __init__(self, setup: TrainerSetup, *, ordered: OrderedModel) -> None:
        super().__init__(setup)
        self._ordered = ordered

    def backward(self, batch: StepBatch, loss: TaskLoss) -> Tensor:
        """Leave sum over the global batch / its samples in the gradients; returns [loss sum, count]."""
        sums = self._ordered.sums
        facts = torch.zeros(sums.virtual_ranks, 2, dtype=torch.float64, device=self._device)
        number = {id(micro_batch): place for place, micro_batch in enumerate(batch.micro_batches, sums.first)}

        def term(output: Any, micro_batch: MicroBatch) -> Tensor:
            """The scaled loss sum of a micro-batch; keeps each virtual rank's sum and count for the ordered sum."""
            loss_sum, count = sum_and_count(loss(output, micro_batch.batch))
            if not micro_batch.moment.zero_weight:
                leaf = facts[number[id(micro_batch)]]
                leaf[0], leaf[1] = loss_sum.detach(), count
            return self._precision.scaled(loss_sum * (1 / batch.global_samples))

        checking = nullcontext() if self._draws_checked else self._no_other_draws()
        with index_errors_explained(f"step {batch.step}", batch.samples), checking, self._precision.throughout():
            self._ordered.forward_backward(
                batch.micro_batches, term=term, backward=self._precision.backward, forwards_done=lambda: None
            )
            complete = sums.complete(facts)
        return total_of_halves(complete.T)

    def _gradient_norm(self) -> Tensor:
        return self._ordered.sums.squares().sqrt()
