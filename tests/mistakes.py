"""The classic mistakes of distributed training, each planted in the native engine."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.data.loader import StepBatch
from samestep.data.types import Batch
from samestep.engines.base import Loss, Preparation, StepReport
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer


class SummedTrainer(NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return super().gradient_scale(batch) * dist.get_world_size()


class MeanOfMeansTrainer(NativeTrainer):
    def gradient_scale(self, batch: StepBatch) -> float:
        return 1 / batch.local_samples


class PaddedTrainer(NativeTrainer):
    """Ranks with a sample less than others repeat one of theirs, as a padded sampler does."""

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        ranks = dist.get_world_size()
        padded = -(-batch.global_samples // ranks)
        (micro_batch,) = batch.micro_batches
        if batch.local_samples < padded:
            repeated = Batch(*(torch.cat([part, part[:1]]) for part in micro_batch.batch))
            moment = micro_batch.moment
            moment = replace(moment, samples=torch.cat([moment.samples, moment.samples[:1]]))
            micro_batch = replace(micro_batch, batch=repeated, moment=moment)
        return super().step(replace(batch, micro_batches=[micro_batch], global_samples=padded * ranks), loss)


class ForgottenScheduleTrainer(NativeTrainer):
    def update(self) -> None:
        self.optimizer.step()


class Summed(Native):
    """Gradients summed over ranks instead of averaged."""

    trainer_class = SummedTrainer


class MeanOfMeans(Native):
    """Each rank's mean loss, averaged over ranks with unequal slices."""

    trainer_class = MeanOfMeansTrainer


class Padded(Native):
    trainer_class = PaddedTrainer


class ForgottenSchedule(Native):
    trainer_class = ForgottenScheduleTrainer


class OtherWeights(Native):
    """Rank 1 goes on from other weights than rank 0."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).add_(1e-6)
        return trainer


CLASSIC = (Summed, MeanOfMeans, Padded, ForgottenSchedule, OtherWeights)


def _more(_: nn.Module, given: Any, result: Any) -> Any:
    return result * 1.001


class OtherForward(Native):
    """A module of rank 1 gives other results for the same rows."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        if dist.get_rank() == 1:
            model.get_submodule("1").register_forward_hook(_more)
        return trainer


class OtherGradient(Native):
    """The gradient of one parameter is a tenth too large on every rank."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        model.get_parameter("4.weight").register_hook(lambda gradient: gradient * 1.1)
        return trainer


class OtherBetas(Native):
    """The averages of gradients are longer under a layout."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        for group in trainer.optimizer.param_groups:
            group["betas"] = (0.95, 0.999)
        return trainer


class RateOfOneRank(Native):
    """Rank 1 has a learning rate of its own."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 1 + dist.get_rank()
        return trainer


class OtherDecay(Native):
    """Norms and biases are decayed as matrices are."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = 0.1
        return trainer
