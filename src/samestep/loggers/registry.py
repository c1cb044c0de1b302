"""From the loggers that a job names to their classes, and what is checked of them before any rank starts."""

import pkgutil
from collections.abc import Mapping, Sequence

from samestep.errors import UserError, closest
from samestep.extras import EXTRAS, is_installed, need
from samestep.job import Log
from samestep.loggers import LOGGERS
from samestep.loggers.base import Logger
from samestep.plugins import LOGGER_PLUGINS

_BY_DEFAULT = "tensorboard"


def logger_names() -> list[str]:
    """The names of the shipped loggers, and of those of other packages."""
    return sorted({*LOGGERS, *LOGGER_PLUGINS.names()})


def resolve(kind: str) -> type[Logger]:
    """The class of a logger. Raises UserError where there is none, or its package isn't installed."""
    if kind not in LOGGERS:
        added = LOGGER_PLUGINS.load(kind, Logger)
        if added is None:
            raise UserError(f'run.log has "{kind}"; {closest(kind, logger_names())}')
        return added
    if kind in EXTRAS:  # it is called as the package that it needs
        need(f"run.log: [{kind}]", kind)
    return pkgutil.resolve_name(LOGGERS[kind])


def loggers_of(log: Sequence[Log] | None) -> Sequence[Log]:
    """The loggers that a job means: of None, TensorBoard where it is installed."""
    if log is not None:
        return log
    return (Log(kind=_BY_DEFAULT),) if is_installed(_BY_DEFAULT) else ()


def check_loggers(log: Sequence[Log] | None, environ: Mapping[str, str]) -> None:
    """Raise UserError for a logger that is unknown, named twice, not installed, or without the key that it needs."""
    if log is None:
        return
    kinds = [settings.kind for settings in log]
    for settings in log:
        if kinds.count(settings.kind) > 1:
            raise UserError(f"run.log has {settings.kind} twice; name it once")
        resolve(settings.kind).check(settings, environ)
