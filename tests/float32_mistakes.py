"""Mistakes of optimizers that loss and gradient norm hardly show, each planted in engines that compute in float32."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from samestep.data.loader import StepBatch
from samestep.engines.accelerate import Accelerate
from samestep.engines.base import Abilities, Preparation, StepReport
from samestep.engines.data_parallel import DataParallel
from samestep.engines.deepspeed.engine import DeepSpeed
from samestep.engines.deepspeed.trainer import DeepSpeedTrainer
from samestep.engines.horovod import Horovod, HorovodTrainer
from samestep.engines.keras.engine import Mirrored, MultiWorker
from samestep.engines.keras.trainer import Copy, KerasTrainer
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.parameter_server.engine import ParameterServer
from samestep.engines.parameter_server.server import SynchronousServer


def no_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] = 0.0


def tenfold_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] *= 10


def decay_on_biases(group: dict[str, Any]) -> None:
    group["weight_decay"] = 0.01


def wrong_eps(group: dict[str, Any]) -> None:
    group["eps"] = 1e-6


def wrong_beta2(group: dict[str, Any]) -> None:
    group["betas"] = (group["betas"][0], 0.99)


MISTAKES: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "no decay": no_decay,
    "ten times the decay": tenfold_decay,
    "decay on biases": decay_on_biases,
    "wrong eps": wrong_eps,
    "wrong beta2": wrong_beta2,
}
SUMMED = "summed gradients"  # of two ranks, and a norm that says nothing of it


def planted(trainer: Any, mistake: str) -> Any:
    """A trainer with a mistake in the settings of its optimizer."""
    optimizer = trainer.optimizer if isinstance(trainer, NativeTrainer) else trainer.engine.basic_optimizer
    for group in optimizer.param_groups:
        MISTAKES[mistake](group)
    return trainer


class DoubledGradients(NativeTrainer):
    """Updates by gradients that are twice as large, as sums over two ranks are."""

    def update(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        super().update()


class Float32(Native):
    """The native engine as one that has no float64."""

    abilities: ClassVar[Abilities] = replace(Native.abilities, precisions=frozenset({"fp32", "bf16"}))

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake
        if mistake == SUMMED:
            self.trainer_class = DoubledGradients

    def prepare(self, model: Any, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        return planted(trainer, self.mistake) if self.mistake in MISTAKES else trainer


class Planted:
    """Before an engine: the trainer that it prepares makes a mistake."""

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)  # pyright: ignore[reportAttributeAccessIssue]
        if self.mistake == SUMMED:
            trainer.__class__ = DoubledGradients
        return planted(trainer, self.mistake) if self.mistake in MISTAKES else trainer


class PlantedAccelerate(Planted, Accelerate):
    abilities: ClassVar[Abilities] = replace(Accelerate.abilities, precisions=frozenset({"fp32", "bf16"}))


class PlantedDataParallel(Planted, DataParallel):
    abilities: ClassVar[Abilities] = replace(DataParallel.abilities, precisions=frozenset({"fp32", "bf16"}))


class SummingHorovod(DoubledGradients, HorovodTrainer):
    """Horovod's trainer with that mistake."""


class PlantedHorovod(Horovod):
    abilities: ClassVar[Abilities] = replace(Horovod.abilities, precisions=frozenset({"fp32", "bf16"}))

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> HorovodTrainer:
        trainer = super().prepare(model, how)
        if self.mistake == SUMMED:
            trainer.__class__ = SummingHorovod
        return planted(trainer, self.mistake) if self.mistake in MISTAKES else trainer


class SummingServer(SynchronousServer):
    def step_shard(self, used: Sequence[bool]) -> None:
        self.gradient.mul_(2)
        super().step_shard(used)


class PlantedParameterServer(ParameterServer):
    """The mistakes are those of the server: workers have no state and never step."""

    abilities: ClassVar[Abilities] = replace(ParameterServer.abilities, precisions=frozenset({"fp32", "bf16"}))

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        if self.mistake == SUMMED and isinstance(trainer, SynchronousServer):
            trainer.__class__ = SummingServer
        return planted(trainer, self.mistake) if self.mistake in MISTAKES else trainer


class SummingCopy(Copy):
    def scaled(self, gradients: list[Any], count: Any, clip: float | None) -> tuple[Any, list[Any]]:
        norm, mean = super().scaled(gradients, count, clip)
        return norm, [2 * each for each in mean]


def planted_keras(trainer: KerasTrainer, mistake: str) -> KerasTrainer:
    """The settings and the functions of a Keras copy are read when it is compiled, in the first step."""
    if mistake == SUMMED:
        trainer._copy.__class__ = SummingCopy
    for group in trainer._copy.groups.optimizer.param_groups if mistake in MISTAKES else ():
        MISTAKES[mistake](group)
    return trainer


class PlantedMirrored(Mirrored):
    abilities: ClassVar[Abilities] = replace(Mirrored.abilities, precisions=frozenset({"fp32"}))

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> KerasTrainer:
        return planted_keras(super().prepare(model, how), self.mistake)


class PlantedMultiWorker(MultiWorker):
    abilities: ClassVar[Abilities] = replace(MultiWorker.abilities, precisions=frozenset({"fp32"}))

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> KerasTrainer:
        return planted_keras(super().prepare(model, how), self.mistake)


class SummingDeepSpeed(DeepSpeedTrainer):
    def _scale(self, batch: StepBatch) -> float:
        return 2 * super()._scale(batch)

    def _report(self, totals: Any, lr: float) -> StepReport:
        report = super()._report(totals, lr)
        return replace(report, grad_norm=report.grad_norm / 2)


class PlantedDeepSpeed(DeepSpeed):
    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def prepare(self, model: Any, how: Preparation) -> Any:
        trainer = super().prepare(model, how)
        if self.mistake == SUMMED:
            trainer.__class__ = SummingDeepSpeed
        return planted(trainer, self.mistake) if self.mistake in MISTAKES else trainer
