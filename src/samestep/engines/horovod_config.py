"""Horovod's settings for a job: a small YAML file, since Horovod itself has none."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from annotated_types import Gt, Le
from pydantic.dataclasses import dataclass
from torch import Tensor

from samestep import environment
from samestep.errors import UserError
from samestep.recipe import STRICT
from samestep.validation import checked


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
    """What of Horovod can be chosen; None: what its variables say, and else its own default."""

    compression: Literal["none", "fp16"] = "none"  # of gradients on their way; fp16 is no longer the same step
    fusion_threshold_mb: Annotated[float, Gt(0), Le(65536)] | None = None  # gradients are sent together up to this
    cycle_time_ms: Annotated[float, Gt(0), Le(60000)] | None = None  # how often it looks for gradients to send
    messages: Literal["gloo", "mpi"] = "gloo"  # mpi: in ranks of mpirun, by a Horovod that was built with it

    def variables(self) -> dict[str, str]:
        """The variables from which Horovod takes them when it starts."""
        found = {}
        if self.fusion_threshold_mb is not None:
            found["HOROVOD_FUSION_THRESHOLD"] = str(round(self.fusion_threshold_mb * 2**20))
        if self.cycle_time_ms is not None:
            found["HOROVOD_CYCLE_TIME"] = str(self.cycle_time_ms)
        if self.messages == "mpi":
            found |= {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
        return found

    def bytes_sent(self, parameter: Tensor) -> int:
        """Bytes of the message of a parameter's gradient."""
        return parameter.numel() * (2 if self.compression == "fp16" else parameter.element_size())


def read(path: Path | None) -> Settings:
    """Read a file of settings. Raises UserError that names the file and each mistake."""
    if path is None:
        return Settings()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: no YAML file of Horovod's settings: {error}") from None
    try:
        settings = checked(Settings, {} if values is None else values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if settings.messages == "mpi" and not environment.under_mpirun():
        raise UserError(
            f"{path}: messages is mpi, and no mpirun started this process; `mpirun -np 2 samestep ...`, "
            "`horovodrun --mpi -np 2 samestep ...`, or messages: gloo, would do"
        )
    return settings


def check_built(settings: Settings) -> None:
    """Raise UserError where this Horovod can't send as the settings say."""
    if settings.messages == "gloo":
        return
    import horovod.torch as hvd  # pyright: ignore[reportMissingImports]

    if not hvd.mpi_built():
        raise UserError(
            "Horovod's messages are to go by MPI, and it was built without; `apt-get install libopenmpi-dev` and "
            "`make horovod`, or messages: gloo, would do"
        )
