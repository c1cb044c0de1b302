"""Modules that a job's ranks import: the fork server imports them before it forks a rank."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from samestep.job import Job
from samestep.loggers import LOGGERS
from samestep.loggers.registry import loggers_of
from samestep.tasks import TASKS

# Shipped tasks with transformers models, and the default type of each model.
_MODEL_TYPES = {"text-classification": "bert", "causal-lm": "llama"}

# Packages that take seconds to import, and what is slow of them. Shipped tasks use them in forked ranks as well.
_SLOW_PACKAGES = {"torchmetrics": "torchmetrics", "transformers": "transformers.modeling_utils"}
_MOST_FILES = 200  # of a user's task that are looked for


def rank_imports(job: Job) -> list[str]:
    """Return the modules that ranks import besides samestep itself: for the layout, and for the task."""
    recipe = job.recipe
    modules = ["torch.distributed.optim"] if "zero1" in job.run.layout else []
    if not isinstance(recipe.task, str):
        return modules
    if recipe.task not in TASKS:
        return [*modules, *_slow_imports_of(Path(recipe.task.rpartition(":")[0]))]
    modules += [TASKS[recipe.task].partition(":")[0], "safetensors.torch"]
    modules += [LOGGERS[log.kind].partition(":")[0] for log in loggers_of(job.run.log) if log.kind in LOGGERS]
    if recipe.task in _MODEL_TYPES:
        modules.append("transformers.modeling_utils")
        kind = recipe.model.get("type", _MODEL_TYPES[recipe.task])
        if isinstance(kind, str) and kind.isidentifier() and "folder" not in recipe.model:
            modules.append(f"transformers.models.{kind}.modeling_{kind}")
    return modules


def _slow_imports_of(file: Path) -> list[str]:
    """The slow packages that a user's file imports, itself or by files beside it; none where it can't be read."""
    names: set[str] = set()
    files = [file] if file.suffix == ".py" else []
    for each in files:  # which grows
        with suppress(OSError, ValueError, SyntaxError, RecursionError):
            if len(files) > _MOST_FILES or not each.is_file():
                continue
            imported = set(_imported(ast.parse(each.read_text(encoding="utf-8"))))
            names |= imported
            beside = (each.with_name(f"{name}.py") for name in sorted(imported - _SLOW_PACKAGES.keys()))
            files += [other for other in beside if other not in files]
    return [module for name, module in _SLOW_PACKAGES.items() if name in names]


def _imported(module: ast.Module) -> Iterator[str]:
    """Top packages of what a file imports when it is imported, not later in a function."""
    for node in module.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
