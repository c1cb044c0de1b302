"""From an engine's name to the engine, and whether it can take a layout on this host."""

import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

from samestep.engines import ENGINES
from samestep.engines.base import Engine
from samestep.errors import LayoutError, UserError, closest
from samestep.layout import Layout, axis_in_words
from samestep.parallel.pipeline import schedule


def resolve(engine: Any) -> Engine:
    """The engine of that name, or the engine object itself. Raises UserError where there is none."""
    if isinstance(engine, Engine):
        return engine
    if engine not in ENGINES:
        raise UserError(f'run.engine is "{engine}"; {closest(str(engine), ENGINES)}')
    return pkgutil.resolve_name(ENGINES[engine])()


def check(engine: Engine, layout: Layout, precision: str, config: Path | None = None) -> None:
    """Raise UserError for what this engine can't do, or can't do with what is installed."""
    able = engine.abilities
    if config is not None and able.config is None:
        raise UserError(
            f'run.engine_config is {config}, and engine "{engine.name}" has no configuration file of its own; '
            f"leave it out, or use engine {', '.join(name for name in ENGINES if resolve(name).abilities.config)}"
        )
    if config is not None and not config.is_file():
        raise UserError(f"run.engine_config is {config}, which is no file; use {able.config}")
    for module, command in able.packages.items():
        if importlib.util.find_spec(module) is None:
            raise UserError(f'engine "{engine.name}" needs {module}, which is not installed; {command}')
    for name in layout.split_axes():
        if name not in able.axes:
            raise LayoutError(
                f'layout "{layout}": engine "{engine.name}" does not split {name} yet; '
                f"it splits {', '.join(map(axis_in_words, sorted(able.axes))) or 'nothing'}"
            )
    for option in ("recompute", "offload", "attention"):
        for value in getattr(layout, option).split("+"):
            if value not in getattr(able, option):
                raise LayoutError(f'layout "{layout}": engine "{engine.name}" has no {option}={value} yet')
    schedule.check(layout)
    if layout.offloads_parameters and layout.zero < 2:
        offload = "parameters" if layout.offloads("parameters") else "parameters-disk"
        raise LayoutError(f'layout "{layout}": offload={offload} is for shards of parameters; use fsdp2 or zero2x2')
    if layout.sequence == "split" and layout.tensor == 1:
        raise LayoutError(
            f'layout "{layout}": sequence=split is for the ranks of tensor parallel; use tp2 sequence=split'
        )
    if layout.attention == "ring" and layout.context == 1:
        raise LayoutError(
            f'layout "{layout}": attention=ring is for the ranks of context parallel; use cp2 attention=ring'
        )
    if precision not in able.precisions:
        known = ", ".join(sorted(able.precisions))
        raise UserError(f'recipe.precision is {precision}, which engine "{engine.name}" does not have; use {known}')
    engine.check(layout, precision, config)
