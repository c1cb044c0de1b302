"""From an engine's name to the engine: one of samestep's own, or of another distribution that declares it."""

import pkgutil
from typing import Any

from samestep.engines import ENGINES
from samestep.engines.base import Engine
from samestep.errors import UserError, closest
from samestep.plugins import ENGINE_PLUGINS


def engine_names() -> list[str]:
    """The names of samestep's engines and of those that installed distributions add."""
    return sorted({*ENGINES, *ENGINE_PLUGINS.names()})


def resolve(engine: Any) -> Engine:
    """The engine of that name, or the engine object itself. Raises UserError where there is none."""
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, str) and engine in ENGINES:
        return pkgutil.resolve_name(ENGINES[engine])()
    added = ENGINE_PLUGINS.load(str(engine), Engine)
    if added is None:
        raise UserError(f'run.engine is "{engine}"; {closest(str(engine), engine_names())}')
    if getattr(added, "name", None) != engine:
        raise UserError(
            f'run.engine is "{engine}", and {added.__module__}:{added.__qualname__} has another name '
            f"({getattr(added, 'name', None)!r}); use the same name in its class and its entry point"
        )
    return added()
