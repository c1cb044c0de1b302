"""Modules that a job's ranks import: the fork server imports them before it forks a rank."""

from pathlib import Path

from samestep.job import Job
from samestep.loggers import LOGGERS
from samestep.loggers.registry import loggers_of
from samestep.script_proof.imports import imports_of
from samestep.tasks import TASKS

# Shipped tasks with transformers models, and the default type of each model.
_MODEL_TYPES = {"text-classification": "bert", "causal-lm": "llama"}

# Packages that take seconds to import, and what is slow of them. Shipped tasks use them in forked ranks as well.
_SLOW_PACKAGES = {"torchmetrics": "torchmetrics", "transformers": "transformers.modeling_utils"}


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
    packages = {module.partition(".")[0] for module, _ in imports_of([str(file)])}
    return [module for name, module in _SLOW_PACKAGES.items() if name in packages]
