"""Settings of the parameter server, read from a small YAML file (`run.engine_config`)."""

from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from samestep.data.order import DataPlace
from samestep.errors import LayoutError, UserError
from samestep.field_types import STRICT, Count, Factor, Ranks, Whole, broken_rule
from samestep.layout import Layout
from samestep.limits import MOST_RESTARTS
from samestep.validation import checked_file


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParameterServerSettings:
    """The number of servers, the staleness bound, and the restarts of workers."""

    servers: Ranks = 1  # of all ranks, the first ones
    # Steps that a worker may be ahead of the slowest one. 0: all gradients of a step are summed, the same step.
    staleness: Count | Literal["infinite"] = 0
    delay_compensation: Factor | None = None  # lambda of DC-ASGD; None: none
    sparse_rows: bool = True  # gradients of embedding tables as the rows that were touched, where that is less
    # How often each worker may compute in a new process after the death of the one before, while the others go on;
    # None: it computes in its rank, whose death ends the round.
    worker_restarts: Annotated[Whole, Ge(0), Le(MOST_RESTARTS)] | None = None

    @model_validator(mode="after")
    def _compensates_a_delay(self) -> "ParameterServerSettings":
        if self.delay_compensation is not None and self.synchronous:
            raise broken_rule(
                "delay_compensation",
                f"delay_compensation is {self.delay_compensation}, and with staleness 0 no gradient is delayed; "
                "use staleness: 1 or more, or infinite",
            )
        return self

    @model_validator(mode="after")
    def _restarts_alone(self) -> "ParameterServerSettings":
        if self.worker_restarts is not None and self.synchronous:
            raise broken_rule(
                "worker_restarts",
                f"worker_restarts is {self.worker_restarts}, and with staleness 0 all workers wait for one that is "
                "away; use staleness: 1 or more, or infinite, or run.max_restarts, with which all ranks go on from "
                "the last checkpoint",
            )
        return self

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0

    @property
    def bound(self) -> float:
        """The staleness as a number of steps."""
        return float("inf") if self.staleness == "infinite" else self.staleness


@plain_dataclass(frozen=True, kw_only=True)
class Roles:
    """The ranks that are servers, and those that are workers."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @classmethod
    def of(cls, settings: ParameterServerSettings, ranks: int) -> "Roles":
        """Assign the first ranks to servers, so that rank 0, which writes the records, has all workers' figures."""
        return cls(servers=tuple(range(settings.servers)), workers=tuple(range(settings.servers, ranks)))

    def place(self, rank: int) -> DataPlace:
        """The slice of each global batch that a rank trains on; servers have none."""
        if rank in self.servers:
            return DataPlace(index=0, of=len(self.workers), idle=True)
        return DataPlace(index=self.workers.index(rank), of=len(self.workers))


def read(path: Path | None) -> ParameterServerSettings:
    """Read a file of settings. Raises UserError that names the file and each mistake."""
    if path is None:
        return ParameterServerSettings()
    return checked_file(ParameterServerSettings, path, "a parameter server's settings")


def check_place(settings: ParameterServerSettings, platform: str, device: str, accelerators: int = 0) -> None:
    """Raise UserError where a worker's process can't be forked, or couldn't compute."""
    if settings.worker_restarts is None:
        return
    setting = f"worker_restarts is {settings.worker_restarts}"
    if platform != "linux":
        raise UserError(
            f"{setting}, and a process that computes is safely forked on Linux alone (this is {platform}); "
            "leave it out"
        )
    if device != "cpu":
        raise UserError(
            f"{setting}, and the device is {device}, which a forked process can't use; use run.device: cpu, or leave "
            "worker_restarts out"
        )
    if accelerators:
        raise UserError(
            f"{setting}, and this process sees {accelerators} accelerator{'s' * (accelerators > 1)}, for which "
            "PyTorch starts threads that a forked process lacks; hide them (CUDA_VISIBLE_DEVICES=), or leave "
            "worker_restarts out"
        )


def check_ranks(settings: ParameterServerSettings, layout: Layout) -> None:
    """Raise LayoutError where no rank would be left to work."""
    if layout.size < 2:
        raise LayoutError(
            f'layout "{layout}": engine "parameter-server" needs a server and a worker at least; use dp2 or more'
        )
    if settings.servers >= layout.size:
        raise LayoutError(
            f'layout "{layout}": servers is {settings.servers}, and of {layout.size} ranks none would be a worker; '
            f"use servers: {layout.size - 1} or fewer, or dp{settings.servers + 1} or more"
        )
