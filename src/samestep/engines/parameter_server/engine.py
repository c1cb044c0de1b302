"""The engine: refuses what a parameter server doesn't support, and makes each rank a server or a worker."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from samestep.comm.mesh import new_group
from samestep.data.order import DataPlace
from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.parameter_server import settings as reading
from samestep.engines.parameter_server.member import ServerSetup
from samestep.engines.parameter_server.messages import PointToPoint
from samestep.engines.parameter_server.restarting_worker import RestartingWorker
from samestep.engines.parameter_server.server import AsynchronousServer, SynchronousServer
from samestep.engines.parameter_server.settings import ParameterServerSettings, Roles
from samestep.engines.parameter_server.shards import FlatParameters, bounds_of, spans_of
from samestep.engines.parameter_server.worker import Worker
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_as
from samestep.errors import UserError
from samestep.job import Job
from samestep.layout import Layout
from samestep.tasks.base import Task
from samestep.torch_internals.modules import AnyBatchNorm


class ParameterServer(Engine):
    """The first ranks hold the parameters in shards, the others push gradients and pull parameters."""

    name = "parameter-server"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words(
            "samestep: servers hold shards, workers push and pull; synchronous, or asynchronous (another step)",
            "samestep：服务器持有分片，worker 推送和拉取；同步，或异步（不是同一步）",
        ),
        axes=frozenset({"replicate"}),
        precisions=frozenset({"fp64", "fp32", "bf16"}),
        recompute=frozenset({"none", "selective", "full"}),
        config="a YAML file with servers, staleness, delay_compensation, sparse_rows, worker_restarts",
        checkpoints=True,
        batch_buffers=True,
        compiles=True,
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        settings = reading.read(config)
        reading.check_ranks(settings, layout)
        reading.check_place(settings, sys.platform, "cpu")

    def check_task(self, task: Task, layout: Layout, config: Path | None) -> None:
        settings = reading.read(config)
        if settings.servers == 1 and settings.synchronous:
            return
        with torch.random.fork_rng(devices=[]):
            check_model(task.model(), settings, batch_buffers=bool(task.batch_buffers()))

    def check_proof(self, job: Job) -> None:
        settings = reading.read(job.run.engine_config)
        if not settings.synchronous:
            raise UserError(
                f'engine "parameter-server" with staleness {settings.staleness} does not take the same step as one '
                f"process: {how_far(settings)}, so there is nothing to prove; use staleness: 0, or samestep train, "
                "which shows what it reaches"
            )

    def training_place(self, place: DataPlace, layout: Layout, rank: int, config: Path | None) -> DataPlace:
        return Roles.of(reading.read(config), layout.size).place(rank)

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        settings = reading.read(how.options.engine_config)
        check_model(model, settings, batch_buffers=bool(how.details.batch_buffers))
        reading.check_place(settings, sys.platform, how.device.type, torch.accelerator.device_count())
        rank, ranks = dist.get_rank(), how.layout.size
        roles = Roles.of(settings, ranks)
        wire = PointToPoint(new_group(range(ranks), backend="gloo"))
        worker_group = new_group(roles.workers)
        server_group = new_group(roles.servers, backend="gloo")
        # Batch norm and buffers filled from samples join the workers alone.
        mesh = replace(how.mesh, data_group=worker_group, loss_group=worker_group, data_place=roles.place(rank))
        precision = Precision(how.options.precision, how.device)
        how = replace(how, mesh=mesh)
        spread_model = spread_as(model, replace(how, layout=replace(how.layout, replicate=1)), precision)
        restarts = rank in roles.workers and settings.worker_restarts is not None
        flat = FlatParameters(model, settings.servers, shared=restarts)
        shared = ServerSetup(flat=flat, roles=roles, settings=settings, wire=wire)

        def setup(optimizer: Optimizer) -> TrainerSetup:
            return TrainerSetup.of(model, how, spread_model, optimizer, precision)

        if rank in roles.workers:
            kind = RestartingWorker if restarts else Worker
            return kind(setup(how.optimizer_of(model.named_parameters())), shared)
        shard = flat.shard(rank)
        chunks = {nn.Parameter(shard[chunk.at].view(chunk.shape)): chunk for chunk in flat.chunks[rank]}
        optimizer = how.optimizer_of((chunk.span.name, parameter) for parameter, chunk in chunks.items())
        if settings.synchronous:
            return SynchronousServer(setup(optimizer), shared, chunks, number=rank, server_group=server_group)
        return AsynchronousServer(setup(optimizer), shared, chunks, number=rank)


def check_model(model: nn.Module, settings: ParameterServerSettings, *, batch_buffers: bool) -> None:
    """Raise UserError for a model that these servers can't share, or whose workers would wait for each other."""
    bounds_of(spans_of(model), settings.servers)
    if settings.synchronous:
        return
    if batch_buffers:
        raise UserError(
            f"staleness is {settings.staleness}, and batch_buffers() are joined over all workers in every step; "
            "use staleness: 0"
        )
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm):
            raise UserError(
                f"staleness is {settings.staleness}, and {name or 'the model'} ({type(module).__name__}) takes its "
                "statistics over all workers in every step; use group norm, or staleness: 0"
            )


def how_far(settings: ParameterServerSettings) -> str:
    """In words, by how many updates a gradient may be late."""
    if settings.staleness == "infinite":
        return "a gradient may be any number of updates late"
    # While a worker computes, another may go from `bound` steps behind it to the end of the step `bound` ahead.
    return f"a gradient may be {2 * int(settings.staleness) + 1} updates of every other worker late"
