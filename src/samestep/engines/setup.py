"""The arguments of native trainers, and the two ways to make their model: by samestep or by another package."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.engines.base import Preparation
from samestep.engines.precision import Precision
from samestep.parallel.apply import spread
from samestep.parallel.ddp import GradientExchange
from samestep.parallel.exact.forward_context import ForwardContext
from samestep.parallel.layout_failure import LayoutFailures
from samestep.parallel.offload.memory import HostMemory
from samestep.parallel.parallel_model import Context, ParallelModel, WholeModel
from samestep.parallel.sharding import ShardTable
from samestep.parallel.unused_parameters import UnusedParameters


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """Arguments of a NativeTrainer on this rank."""

    how: Preparation  # layout, mesh, device and options
    model: nn.Module  # with the parameters that this rank holds
    spread_model: ParallelModel  # runs the model's forward and backward
    optimizer: Optimizer
    schedule: LRScheduler | None
    precision: Precision
    failures: LayoutFailures | None = None  # explains errors of the first step and of the first prediction
    answers_draws: bool = True  # all random numbers are drawn by sample number, so no generator's state may change

    @classmethod
    def of(
        cls,
        model: nn.Module,
        how: Preparation,
        spread_model: ParallelModel,
        optimizer: Optimizer,
        precision: Precision,
        *,
        failures: LayoutFailures | None = None,
        answers_draws: bool = True,
    ) -> Self:
        """Return the setup in which the job's schedule is that of the optimizer that steps."""
        return cls(
            how=how,
            model=model,
            spread_model=spread_model,
            optimizer=optimizer,
            schedule=how.schedule_of(optimizer),
            precision=precision,
            failures=failures,
            answers_draws=answers_draws,
        )


def spread_as(
    model: nn.Module, how: Preparation, precision: Precision, *, exchange: GradientExchange | None = None
) -> ParallelModel:
    """Spread a model by samestep's own code; `exchange` as for `parallel.apply.spread`."""
    return spread(
        model,
        how.layout,
        how.mesh,
        how.device,
        options=how.options,
        autocast=precision.autocast,
        details=how.details,
        exchange=exchange,
    )


def spread_by_engine(
    model: nn.Module,
    how: Preparation,
    precision: Precision,
    forward_context: ForwardContext,
    *,
    module: nn.Module,
    used: UnusedParameters,
    accumulating: Context = nullcontext,
    parts: ShardTable | None = None,
) -> WholeModel:
    """Make the parallel model for `model`, which another package has wrapped as `module`.

    `used`: finds unused parameters. `parts`: the table of shards, if the package has replaced the parameters.
    """
    return WholeModel(
        module=module,
        accumulating=accumulating,
        used=used,
        model=model,
        parts=ShardTable.of(model, how.layout, how.mesh) if parts is None else parts,
        forward_context=forward_context,
        autocast=precision.autocast,
        host=HostMemory(how.device),
    )
