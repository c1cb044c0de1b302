"""The classic mistakes of pipelines, each planted in the native engine."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from samestep.engines.base import Preparation
from samestep.engines.native import Native, NativeTrainer
from samestep.parallel.pipeline.messages import Letter
from samestep.parallel.pipeline.pipeline import Pipeline


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

        def other(letter: Letter) -> Tensor:
            tensor = receive(letter)
            return tensor.flip(0) if letter.kind == "F" else tensor

        pipeline.receive = other
        return trainer


class NothingHandedBack(Native):
    """The first stage learns nothing."""

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        pipeline = pipeline_of(trainer)
        receive = pipeline.receive

        def nothing(letter: Letter) -> Tensor:
            tensor = receive(letter)
            return torch.zeros_like(tensor) if letter.kind == "B" else tensor

        pipeline.receive = nothing
        return trainer


PLANTED = (TiedNotSummed, OtherSamples, NothingHandedBack)
