"""Engines on TensorFlow's synchronous strategies: replicas of one process, and replicas of many.

The ranks are TensorFlow's cluster; TensorFlow starts quietly, with as many threads and the devices that PyTorch has.
"""

import importlib
import os
import socket
import sys
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from samestep import environment
from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.keras import from_torch
from samestep.engines.keras.layers import Tools
from samestep.engines.keras.trainer import Copy, KerasTrainer
from samestep.engines.precision import parameter_dtype
from samestep.errors import UserError
from samestep.launch.device import accelerators
from samestep.launch.network import agreed_in_group, held_port
from samestep.layout import Layout
from samestep.options import Options
from samestep.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class ClusterTask:
    """A rank's task in a TensorFlow cluster."""

    cluster: Mapping[str, Sequence[str]]  # addresses of each kind of task
    kind: str
    index: int

    def to_json(self) -> dict[str, Any]:
        """The contents of TF_CONFIG."""
        return {"cluster": dict(self.cluster), "task": {"type": self.kind, "index": self.index}}


def agree(kinds: Sequence[str]) -> ClusterTask:
    """Assign each rank its task in the cluster, of the kind `kinds[rank]`, with an address; every rank must ask.

    Ranks of a single host use its loopback address. Each rank keeps its port bound until all have one, so that no two
    get the same.
    """
    address = agreed_in_group(environment.main_address())
    with held_port() as held:
        own = (socket.gethostname(), address, held.getsockname()[1])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        dist.barrier()
    local = len({host for host, _, _ in ranks}) == 1
    cluster: dict[str, list[str]] = {}
    place = 0
    for rank, (kind, (_, address, port)) in enumerate(zip(kinds, ranks, strict=True)):
        tasks = cluster.setdefault(kind, [])
        if rank == dist.get_rank():
            place = len(tasks)
        tasks.append(f"{'127.0.0.1' if local else address}:{port}")
    return ClusterTask(cluster=cluster, kind=kinds[dist.get_rank()], index=place)


# What the engines need, and what installs it.
PACKAGES: Mapping[str, str] = dict.fromkeys(("tensorflow", "tf_keras"), 'use pip install "samestep[tensorflow]"')


def start(precision: str, device: torch.device, *, replicas: int = 1) -> Tools:
    """Import TensorFlow and set it up, unless this process has done so; its devices then stay as they are.

    A CPU becomes `replicas` logical devices. Of the accelerators the process gets the one of `device`, or all where
    several replicas are asked for, and takes their memory as it is needed, since PyTorch is there too. Raises
    UserError where TensorFlow sees no accelerator and PyTorch does.
    """
    with _quiet(), environment.tensorflow_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's modules warn about each other while they are imported
        tf = importlib.import_module("tensorflow")
        keras = importlib.import_module("tf_keras")
        there = tf.config.list_physical_devices("GPU")
        if device.type != "cpu" and not there:
            raise UserError(
                "PyTorch has accelerators here and TensorFlow sees none; use a TensorFlow that is built for them "
                "in place of tensorflow-cpu, or --device cpu"
            )
        visible = [] if device.type == "cpu" else there if replicas > 1 else there[device.index or 0 :][:1]
        with suppress(RuntimeError):  # TensorFlow is already initialized
            threads = torch.get_num_threads()
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            tf.config.set_visible_devices(visible, "GPU")
            for gpu in visible:
                tf.config.experimental.set_memory_growth(gpu, True)
            parts = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas if not visible else 1)]
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    tf.get_logger().setLevel("ERROR")
    return Tools(tf=tf, keras=keras, dtype=str(parameter_dtype(precision)).removeprefix("torch."))


@contextmanager
def _quiet() -> Iterator[None]:
    """Capture stderr, which C++ libraries write to during import, and show it only if the import fails."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


class KerasEngine(Engine):
    """A Keras model with a PyTorch model's weights, trained under one of TensorFlow's strategies."""

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        """Raise UserError for a model or loss without a Keras counterpart."""
        from_torch.counterpart(task.loss)
        from_torch.check(task.model())

    def prepare(self, model: nn.Module, how: Preparation) -> KerasTrainer:
        """Start TensorFlow with the strategy, copy the model's weights into Keras, make the trainer."""
        check_loop(self.name, how.options)
        tools, strategy = self._start(how.options.precision, how.device)
        copy = Copy(model, how.details.example, tools=tools, strategy=strategy, optimizer_of=how.optimizer_of)
        return KerasTrainer(
            copy,
            schedule=how.schedule_of(copy.groups.optimizer),
            clip=how.options.clip,
            ranks=how.mesh.data_place.of,
            device=how.device,
        )

    @abstractmethod
    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        """TensorFlow, started on this rank, and the strategy."""


def check_loop(engine: str, options: Options) -> None:
    """Raise UserError for a custom training loop: these engines train a Keras model, not the loop's PyTorch model."""
    if options.batch is None:
        raise UserError(
            f"engine {engine} trains a recipe's task and not a model in a loop of one's own, which would not see it "
            "change; use samestep.train, or engine native"
        )


class Mirrored(KerasEngine):
    """tf.distribute.MirroredStrategy: one process, a replica on each accelerator, or on each thread of a CPU.

    The layout is that of one process, as for engine data-parallel: a layout describes processes, and these replicas
    are within one.
    """

    name = "keras-mirrored"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("TensorFlow's `MirroredStrategy`", "TensorFlow 的 `MirroredStrategy`"),
        axes=frozenset(),
        precisions=frozenset({"fp64", "fp32"}),
        packages=PACKAGES,
        float32_matmul=False,
    )

    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        """Start a replica for each thread on CPUs, otherwise one for each accelerator."""
        replicas = torch.get_num_threads() if device.type == "cpu" else accelerators()
        tools = start(precision, device, replicas=replicas)
        kind = "CPU" if device.type == "cpu" else "GPU"
        names = [device.name for device in tools.tf.config.list_logical_devices(kind)]
        if len(names) < replicas:
            raise UserError(
                f"engine {self.name}: TensorFlow was started in this process with {len(names)} devices, and can't "
                f"get {replicas} any more; use a process of its own, or --threads {len(names)}"
            )
        return tools, _mirrored(tools.tf, tuple(names[:replicas]))


class MultiWorker(KerasEngine):
    """tf.distribute.MultiWorkerMirroredStrategy: a worker a rank."""

    name = "keras-multi-worker"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("TensorFlow's `MultiWorkerMirroredStrategy`", "TensorFlow 的 `MultiWorkerMirroredStrategy`"),
        axes=frozenset({"replicate"}),
        precisions=frozenset({"fp64", "fp32"}),
        packages=PACKAGES,
        float32_matmul=False,
    )

    def _start(self, precision: str, device: torch.device) -> tuple[Tools, Any]:
        tools = start(precision, device)
        return tools, _join(tools.tf)


@cache  # two strategies on the same devices would give their collective operations the same keys
def _mirrored(tf: Any, names: tuple[str, ...]) -> Any:
    return tf.distribute.MirroredStrategy(names)


@cache  # TensorFlow lets a process join one cluster, before it has done anything else
def _join(tf: Any) -> Any:
    """The strategy over many processes, which find one another by TF_CONFIG; ranks agree on the addresses."""
    ranks = dist.get_world_size()
    task = agree(["worker"] * ranks).to_json() if ranks > 1 else None
    with environment.tensorflow_settings(task):
        return tf.distribute.MultiWorkerMirroredStrategy()
