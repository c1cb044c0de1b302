"""SwanLab: https://docs.swanlab.cn. `args` go to `swanlab.init`, such as `{mode: offline}`."""

from collections.abc import Mapping
from pathlib import Path

import swanlab  # pyright: ignore[reportMissingImports]

from samestep.errors import UserError
from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger

_WITHOUT_KEY = ("local", "offline", "disabled")


class SwanLab(Logger):
    """One run of SwanLab."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        arguments = {
            "project": settings.project or "samestep",
            "name": settings.name or run.name,
            "config": dict(run.config),
            "log_dir": str(run.folder / "swanlab"),
            "id": run.identity,
            "resume": "allow" if run.identity is not None else None,
            **settings.args,
        }
        self._run = swanlab.init(**{name: value for name, value in arguments.items() if value is not None})
        self.identity = self._run.id

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Raise UserError where the service would ask for a key, and none is there."""
        mode = settings.args.get("mode") or environ.get("SWANLAB_MODE", "online")
        home = Path(environ.get("HOME", "~")).expanduser()
        if mode in _WITHOUT_KEY or environ.get("SWANLAB_API_KEY") or (home / ".swanlab" / ".netrc").exists():
            return
        raise UserError(
            "run.log has swanlab, and there is no key for it; set SWANLAB_API_KEY, call swanlab login once, or use "
            "{kind: swanlab, args: {mode: offline}}"
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: swanlab.Text(text)}, step=step)

    def close(self, *, failed: bool) -> None:
        swanlab.finish(state="crashed" if failed else "success")
