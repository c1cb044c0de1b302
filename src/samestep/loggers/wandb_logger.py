"""Weights & Biases: https://docs.wandb.ai. `args` go to `wandb.init`, such as `{mode: offline, tags: [first]}`."""

import netrc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import wandb  # pyright: ignore[reportMissingImports]

from samestep.errors import UserError
from samestep.job import Log
from samestep.loggers.base import LoggedRun, Logger

_HOST = "https://api.wandb.ai"
_WITHOUT_KEY = ("offline", "disabled", "shared")


class WandB(Logger):
    """One run of Weights & Biases, which a resumed training goes on with."""

    def __init__(self, settings: Log, run: LoggedRun) -> None:
        arguments = {
            "project": settings.project or "samestep",
            "name": settings.name or run.name,
            "dir": str(run.folder),
            "config": dict(run.config),
            "id": run.identity,
            "resume": "allow" if run.identity is not None else None,
            "settings": wandb.Settings(console="off", silent=True),
            **settings.args,
        }
        self._run = wandb.init(**arguments)
        self.identity = self._run.id

    @classmethod
    def check(cls, settings: Log, environ: Mapping[str, str]) -> None:
        """Raise UserError where the service would ask for a key, and none is there."""
        mode = settings.args.get("mode") or environ.get("WANDB_MODE", "online")
        if mode in _WITHOUT_KEY or environ.get("WANDB_API_KEY") or _in_netrc(environ):
            return
        raise UserError(
            "run.log has wandb, and there is no key for it; set WANDB_API_KEY, call wandb login once, or use "
            "{kind: wandb, args: {mode: offline}}"
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: wandb.Html(f"<pre>{_escaped(text)}</pre>")}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _in_netrc(environ: Mapping[str, str]) -> bool:
    """Whether `wandb login` has left a key for the service's host."""
    host = urlsplit(environ.get("WANDB_BASE_URL", _HOST)).hostname or ""
    file = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(file).authenticators(host) is not None
    return False
