"""Horovod: its DistributedOptimizer averages gradients while backward runs; samestep weighs, clips and steps.

Ranks that something else started agree through torch.distributed on the address of Horovod's rendezvous. Settings are
a small YAML file, since Horovod itself has none.
"""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch.distributed as dist
from annotated_types import Gt, Le
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import environment
from samestep.data.loader import StepBatch
from samestep.display.page import Words
from samestep.engines.base import Abilities, Engine, Preparation
from samestep.engines.native.trainer import NativeTrainer
from samestep.engines.precision import Precision
from samestep.engines.setup import TrainerSetup, spread_by_engine
from samestep.errors import UserError
from samestep.field_types import STRICT, Real
from samestep.launch.network import LOOPBACK, agreed_in_group, interface_of, own_name_leads_nowhere
from samestep.launch.script_env.horovod import serving, slots_of, variables_of
from samestep.layout import Layout
from samestep.parallel.exact.batch_norm import global_batch_norm
from samestep.parallel.exact.buffers import keep_no_cache
from samestep.parallel.exact.dropout import same_dropout
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.unused_parameters import UnusedParametersOfReplicas
from samestep.tasks.losses import TaskLoss
from samestep.torch_internals.operators import DisableTorchFunction
from samestep.validation import checked_file


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HorovodSettings:
    """Horovod's settings; None: the value of Horovod's environment variable, or its default."""

    compression: Literal["none", "fp16"] = "none"  # of gradients on their way; fp16 is no longer the same step
    fusion_threshold_mb: Annotated[Real, Gt(0), Le(65536)] | None = None  # gradients are sent together up to this
    cycle_time_ms: Annotated[Real, Gt(0), Le(60000)] | None = None  # how often it looks for gradients to send
    messages: Literal["gloo", "mpi"] = "gloo"  # mpi: in ranks of mpirun, by a Horovod that was built with it

    def variables(self) -> dict[str, str]:
        """The environment variables from which Horovod reads these settings when it starts."""
        variables = {}
        if self.fusion_threshold_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(round(self.fusion_threshold_mb * 2**20))
        if self.cycle_time_ms is not None:
            variables["HOROVOD_CYCLE_TIME"] = str(self.cycle_time_ms)
        if self.messages == "mpi":
            variables |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        return variables

    def bytes_sent(self, parameter: Tensor) -> int:
        """Bytes of the message that carries a parameter's gradient."""
        return parameter.numel() * (2 if self.compression == "fp16" else parameter.element_size())


def read(path: Path | None) -> HorovodSettings:
    """Read a file of settings. Raises UserError that names the file and each mistake."""
    if path is None:
        return HorovodSettings()
    settings = checked_file(HorovodSettings, path, "Horovod's settings")
    if settings.messages == "mpi" and not environment.under_mpirun():
        raise UserError(
            f"{path}: messages is mpi, and no mpirun started this process; use `mpirun -np 2 samestep ...`, "
            "`horovodrun --mpi -np 2 samestep ...`, or messages: gloo"
        )
    return settings


def check_built(settings: HorovodSettings) -> None:
    """Raise UserError where this Horovod can't send as the settings say."""
    if settings.messages == "gloo":
        return
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    if not hvd.mpi_built():
        raise UserError(
            "Horovod's messages are to go by MPI, and it was built without; use `apt-get install libopenmpi-dev` and "
            "`make horovod`, or messages: gloo"
        )


def start(settings: HorovodSettings) -> None:
    """Initialise Horovod, with the same ranks as torch.distributed. Every rank must call it."""
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    if hvd.is_initialized():
        hvd.shutdown()  # it reads its settings only at its start, and may run with another training's
    if settings.messages == "mpi" or environment.horovodrun() is not None:  # Horovod knows its ranks by itself
        with environment.given(settings.variables()):
            hvd.init()
    else:
        with _rendezvous() as variables, environment.given({**variables, **settings.variables()}):
            hvd.init()
            dist.barrier()  # the server must run until every rank has connected
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())


@contextmanager
def _rendezvous() -> Iterator[dict[str, str]]:
    """Start Horovod's rendezvous server on rank 0, and yield the variables that `horovodrun` would have set."""
    ranks = environment.ranks()
    local_rank, local_size = (ranks.local_rank, ranks.local_world_size) if ranks else (0, 1)
    rank, size = dist.get_rank(), dist.get_world_size()
    one_host = local_size == size
    own = LOOPBACK if one_host else agreed_in_group(environment.main_address())
    places: list[Any] = [None] * size
    nowhere = not one_host and own_name_leads_nowhere()
    dist.all_gather_object(places, (local_rank, socket.gethostname() if nowhere else None))
    local_ranks = [number for number, _ in places]
    if (name := next((host for _, host in places if host is not None), None)) is not None:
        raise UserError(
            f"engine horovod: on {name} the name {name} leads to no address that other hosts reach, and Horovod's "
            "gloo goes by it; put its address into /etc/hosts there"
        )
    slots = slots_of(local_ranks)
    with serving(own, slots) if rank == 0 else nullcontext() as served:
        agreed: list[Any] = [served]
        dist.broadcast_object_list(agreed, src=0)
        address, port = agreed[0]
        yield variables_of(slots[rank], address, port, environment.gloo_interface() or interface_of(own))


class Horovod(Engine):
    """Replicas, with gradients averaged by Horovod in fused messages."""

    name = "horovod"
    abilities: ClassVar[Abilities] = Abilities(
        about=Words("Horovod's `DistributedOptimizer`", "Horovod 的 `DistributedOptimizer`"),
        axes=frozenset({"replicate"}),
        precisions=frozenset({"fp64", "fp32", "bf16"}),
        checkpoints=True,
        config="a YAML file with compression, fusion_threshold_mb, cycle_time_ms, messages",
        packages={"horovod": "use make horovod, which builds it against this PyTorch"},
    )

    def check(self, layout: Layout, precision: str, config: Path | None) -> None:
        check_built(read(config))

    def prepare(self, model: nn.Module, how: Preparation) -> "HorovodTrainer":
        """Rank 0's parameters and buffers go to all, as in Horovod's own scripts; the step is native."""
        import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

        settings = read(how.options.engine_config)
        start(settings)
        keep_no_cache(model)
        forward_context = ForwardContext()
        same_dropout(model, forward_context)
        global_batch_norm(model, how.mesh.data_group, forward_context)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = distributed(how.optimizer_of(model.named_parameters()), model, settings)
        in_precision = Precision(how.options.precision, how.device)
        used = _UsedOnceSynchronized(model, how.mesh.data_group, optimizer)
        spread_model = spread_by_engine(model, how, in_precision, forward_context, module=model, used=used)
        setup = TrainerSetup.of(model, how, spread_model, optimizer, in_precision)
        return HorovodTrainer(setup, settings=settings)


def distributed(optimizer: Optimizer, model: nn.Module, settings: HorovodSettings) -> Any:
    """Wrap an optimizer in Horovod's DistributedOptimizer, and broadcast rank 0's state if there is any.

    Nothing is broadcast for an optimizer that has not stepped: `hvd.broadcast_optimizer_state` would create its state
    by a step with zero gradients, in which AdamW counts a step and decays the weights.
    """
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    compression: Any = _Compression(getattr(hvd.Compression, settings.compression))
    made = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
    )
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
        hvd.broadcast_optimizer_state(made, root_rank=0)
    return made


class _Compression:
    """Horovod's compression, outside of fp64's mode, in which casts to lower precision would stay float64."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        with DisableTorchFunction():
            return self._kind.compress(tensor)

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        with DisableTorchFunction():
            return self._kind.decompress(tensor, context)


class HorovodTrainer(NativeTrainer):
    """Takes NativeTrainer's steps with an optimizer of Horovod's."""

    def __init__(self, setup: TrainerSetup, *, settings: HorovodSettings) -> None:
        super().__init__(setup)
        self._horovod: Any = setup.optimizer
        self._settings = settings

    def backward(self, batch: StepBatch, loss: TaskLoss) -> Tensor:
        # Gradients are sent in the last backward of a step. Every rank has as many, some of zero weight.
        self._horovod.set_backward_passes_per_step(len(batch.micro_batches))
        return super().backward(batch, loss)

    def update(self) -> None:
        """Step; DistributedOptimizer would otherwise average the gradients once more."""
        with self._horovod.skip_synchronize():  # it was done before the norm was taken
            super().update()

    def sent(self) -> Mapping[str, int]:
        """Bytes that this rank sends in a step, by kind of collective."""
        ranks = dist.get_world_size()
        sizes = [self._settings.bytes_sent(p) for p in self.model.parameters() if p.requires_grad]
        # A ring all-reduce, as comm.traffic counts those of torch.distributed.
        return {"all-reduce": round(2 * (ranks - 1) / ranks * sum(sizes))}


class _UsedOnceSynchronized(UnusedParametersOfReplicas):
    """Tracks used parameters. Horovod sends zeros for unused ones itself, so backward need not reach all of them."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, optimizer: Any) -> None:
        super().__init__(model, group)
        self._optimizer = optimizer

    def reach(self, loss: Tensor) -> Tensor:
        return loss

    def settle(self) -> None:
        """Wait for Horovod's averages, then ask which parameters any rank used."""
        self._optimizer.synchronize()
        super().settle()
