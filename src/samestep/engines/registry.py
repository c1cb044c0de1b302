"""From an engine's name to the engine."""

import pkgutil
from typing import Any

from samestep.engines import ENGINES
from samestep.engines.base import Engine
from samestep.errors import UserError, closest


def resolve(engine: Any) -> Engine:
    """The engine of that name, or the engine object itself. Raises UserError where there is none."""
    if isinstance(engine, Engine):
        return engine
    if engine not in ENGINES:
        raise UserError(f'run.engine is "{engine}"; {closest(str(engine), ENGINES)}')
    return pkgutil.resolve_name(ENGINES[engine])()
