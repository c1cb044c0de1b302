"""What a logger is: the protocol that each of `LOGGERS` implements."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.job import Log


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger is told of the run whose numbers it gets."""

    folder: Path  # of the run
    name: str  # of the job, or of the task
    config: Mapping[str, Any]  # the job as in a job file
    environ: Mapping[str, str]
    first_step: int = 0  # above 0 after a resume: what an earlier start has sent of this step and later ones is stale
    identity: str | None = None  # what an earlier start of the same run has left in `Logger.identity`


class Logger(ABC):
    """Sends numbers and texts of one run to one service, from rank 0. Made before the first step."""

    # What a later start of the same run needs to go on with the service's record; None: nothing.
    identity: str | None = None

    @abstractmethod
    def __init__(self, settings: Log, run: LoggedRun) -> None:
        """Open the service's record of the run."""

    @classmethod
    @abstractmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Raise UserError for what would fail when it is opened, such as a key that is missing; before any rank."""

    @abstractmethod
    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Send finite values by their names, such as train/loss, of a step."""

    @abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Send a text, such as what a model wrote at an evaluation."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Send what is left. `failed`: whether the training ended by an error."""

    def leave(self) -> None:  # noqa: B027 (most have changed nothing)
        """Undo what the logger has changed in this process, after an error of it; the training goes on without it."""
