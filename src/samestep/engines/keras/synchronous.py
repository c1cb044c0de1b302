"""Engines on TensorFlow's synchronous strategies: replicas of one process, and replicas of many."""

from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from samestep import environment
from samestep.cluster.device import accelerators
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.keras import cluster, convert, losses
from samestep.engines.keras.copy import Copy
from samestep.engines.keras.layers import Tools
from samestep.engines.keras.start import PACKAGES, start
from samestep.engines.keras.trainer import KerasTrainer
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.parallel.spread import Details
from samestep.tasks.base import Task


class KerasEngine(Engine):
    """A Keras model with a PyTorch model's weights, trained under one of TensorFlow's strategies."""

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        losses.counterpart(task.loss)
        convert.check(task.model())

    def prepare(self, model: nn.Module, how: Preparation) -> KerasTrainer:
        check_loop(self.name, how.details)
        tools, strategy = self._start(how.precision, how.device)
        copy = Copy(model, how.details.example, tools=tools, strategy=strategy, optimizer_of=how.optimizer_of)
        return KerasTrainer(
            copy,
            schedule=how.schedule_of(copy.groups.optimizer),
            clip=how.clip,
            ranks=how.mesh.data_place.of,
            device=how.device,
        )

    @abstractmethod
    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        """TensorFlow, started on this rank, and the strategy."""


def check_loop(engine: str, details: Details) -> None:
    """Refuse a loop of one's own: its model and optimizer are PyTorch's, and these steps change Keras's."""
    if details.batch is None:
        raise UserError(
            f"engine {engine} trains a recipe's task and not a model in a loop of one's own, which would not see it "
            "change; samestep.train, or engine native, would do"
        )


class Mirrored(KerasEngine):
    """tf.distribute.MirroredStrategy: one process, a replica on each accelerator, or on each thread of a CPU.

    The layout is that of one process, since a layout says how processes share the work; what the replicas do is
    inside of it, as with engine data-parallel.
    """

    name = "keras-mirrored"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset(), precisions=frozenset({"fp64", "fp32"}), packages=PACKAGES
    )

    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        replicas = torch.get_num_threads() if device.type == "cpu" else accelerators()
        tools = start(precision, device, replicas=replicas)
        kind = "CPU" if device.type == "cpu" else "GPU"
        names = [each.name for each in tools.tf.config.list_logical_devices(kind)]
        if len(names) < replicas:
            raise UserError(
                f"engine {self.name}: TensorFlow was started in this process with {len(names)} devices, and can't "
                f"get {replicas} any more; a process of its own, or --threads {len(names)}, would do"
            )
        return tools, _mirrored(tools.tf, tuple(names[:replicas]))


class MultiWorker(KerasEngine):
    """tf.distribute.MultiWorkerMirroredStrategy: a worker a rank."""

    name = "keras-multi-worker"
    abilities: ClassVar[Abilities] = Abilities(
        dimensions=frozenset({"replicate"}), precisions=frozenset({"fp64", "fp32"}), packages=PACKAGES
    )

    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        tools = start(precision, device)
        return tools, _join(tools.tf)


@cache  # two strategies on the same devices would give their collective operations the same keys
def _mirrored(tf: Any, names: tuple[str, ...]) -> Any:
    return tf.distribute.MirroredStrategy(names)


@cache  # TensorFlow lets a process join one cluster, before it has done anything else
def _join(tf: Any) -> Any:
    ranks = dist.get_world_size()
    task = cluster.agree(["worker"] * ranks).to_json() if ranks > 1 else None
    with environment.tensorflow_settings(task):
        return tf.distribute.MultiWorkerMirroredStrategy()
