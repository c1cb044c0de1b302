"""Trackio: https://huggingface.co/docs/trackio, a local database and page. `args` go to `trackio.init`."""

from collections.abc import Mapping

import trackio  # pyright: ignore[reportMissingImports]

from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger


class Trackio(Logger):
    """One run of Trackio."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        self.identity = run.identity or settings.name or f"{run.name}-{run.folder.name}"
        arguments = {
            "project": settings.project or "samestep",
            "name": self.identity,
            "config": dict(run.config),
            "resume": "allow" if run.identity is not None else "never",
            **settings.args,
        }
        self._run = trackio.init(**arguments)

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Nothing can be missing."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: trackio.Markdown(text)}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
