"""The classic mistakes of pipelines, each planted in the native engine."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from samestep.engines.base import Preparation
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.pipeline.p2p import MessageId
from samestep.parallel.pipeline.runner import Pipeline


def pipeline_of(trainer: NativeTrainer) -> Pipeline:
    assert isinstance(trainer._spread, Pipeline)
    return trainer._spread


class TiedNotSummed(Native):
    """Embedding and head share a weight, and each stage steps with its own half of the gradient."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        table = pipeline_of(trainer).parts.table
        for name, part in table.items():
            table[name] = replace(part, sum_over=())
        return trainer


class OtherSamples(Native):
    """The second stage gets the hidden states of other samples than its targets."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        pipeline = pipeline_of(trainer)
        receive = pipeline.receive

        def other(message: MessageId) -> list[Tensor]:
            tensors = receive(message)
            return [tensor.flip(0) for tensor in tensors] if message.kind == "F" else tensors

        pipeline.receive = other
        return trainer


class NothingHandedBack(Native):
    """The first stage learns nothing."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        pipeline = pipeline_of(trainer)
        receive = pipeline.receive

        def nothing(message: MessageId) -> list[Tensor]:
            tensors = receive(message)
            return [torch.zeros_like(tensor) for tensor in tensors] if message.kind == "B" else tensors

        pipeline.receive = nothing
        return trainer


class NotCarriedBack(Native):
    """Of a tensor that a stage takes and carries along, the gradients of later stages are lost."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        pipeline = pipeline_of(trainer)
        receive = pipeline.receive

        def fewer(message: MessageId) -> list[Tensor]:
            tensors = receive(message)
            first, *others = tensors
            return [torch.zeros_like(first), *others] if message.kind == "B" and others else tensors

        pipeline.receive = fewer
        return trainer


PLANTED = (TiedNotSummed, OtherSamples, NothingHandedBack)
