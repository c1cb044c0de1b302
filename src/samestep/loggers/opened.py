"""The loggers of a run while it trains: opened once, fed each step, left out as soon as one fails."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from samestep.errors import UserError, first_line
from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger
from samestep.loggers.registry import loggers_of, resolve

IDENTITIES_FILE = "loggers.json"  # of the run's folder: what each service calls the run


class OpenLoggers:
    """Sends numbers and texts to each logger of a job. The training goes on without one that fails."""

    def __init__(self, log: Sequence[Log] | None, run: LoggedRun) -> None:
        """Open the loggers. Raises UserError for one that can't be opened before the first step."""
        self._open: dict[str, Logger] = {}
        file = run.folder / IDENTITIES_FILE
        known = _identities(file) if run.first_step else {}
        for settings in loggers_of(log):
            try:
                logger = resolve(settings.kind)(settings, replace(run, identity=known.get(settings.kind)))
            except OSError:
                raise
            except Exception as error:  # whatever the code of a service raises
                text = f"run.log: {settings.kind} can't be opened: {_told(error)}"
                if not run.first_step:
                    self.close(failed=True)
                    raise UserError(f"{text}; repair that, or leave {settings.kind} out of run.log") from error
                _warn(f"{text}; the training goes on without it")
            else:
                self._open[settings.kind] = logger
        named = {kind: logger.identity for kind, logger in self._open.items() if logger.identity is not None}
        if named:
            file.write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite values."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._each(lambda logger: logger.numbers(step, finite))

    def text(self, step: int, name: str, text: str) -> None:
        """Send a text."""
        self._each(lambda logger: logger.text(step, name, text))

    def close(self, *, failed: bool) -> None:
        """Send what is left, and close all."""
        self._each(lambda logger: logger.close(failed=failed))
        self._open.clear()

    def _each(self, act: Callable[[Logger], None]) -> None:
        """Call `act` with each logger; after an error, warn and leave that one out from now on."""
        for kind, logger in list(self._open.items()):
            try:
                act(logger)
            except Exception as error:  # whatever the code of a service raises, also of an earlier value
                del self._open[kind]
                with suppress(Exception):
                    logger.leave()
                _warn(f"run.log: {kind} failed: {_told(error)}; the training goes on without it")


def _identities(file: Path) -> dict[str, str]:
    """What the services call the run, as an earlier start has left it; empty where that can't be read."""
    with suppress(OSError, ValueError):
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return {str(kind): value for kind, value in values.items() if isinstance(value, str)}
    return {}


def _told(error: Exception) -> str:
    """The first line of an error, with its kind unless it is the system's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _warn(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)
