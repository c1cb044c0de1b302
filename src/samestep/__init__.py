"""samestep: train a PyTorch model over several processes; every layout takes the same step as one process."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep import tasks as tasks
    from samestep.api import dry_run, train, verify
    from samestep.comparison.compare import compare
    from samestep.comparison.results import Comparison
    from samestep.convert.convert import export_model
    from samestep.data.types import Batch, Samples
    from samestep.errors import (
        CheckpointError,
        InterruptedJobError,
        LayoutError,
        NonFiniteError,
        NotSavedError,
        RankFailedError,
        UserError,
    )
    from samestep.hooks import Ask, Hooks
    from samestep.inference import evaluate, load_model
    from samestep.job import Checkpointing, Job, Run
    from samestep.job_check import CheckResult, check
    from samestep.layout import Layout
    from samestep.parallel.exact.sample_dims import draws_along
    from samestep.recipe import (
        SGD,
        AdamW,
        Average,
        EarlyStop,
        Evaluation,
        Group,
        LoRA,
        NamedOptimizer,
        Recipe,
        Schedule,
    )
    from samestep.tasks.base import Task, Work
    from samestep.tasks.losses import Gather, alone
    from samestep.tasks.turns import InTurns, Turn
    from samestep.training.result import TrainResult
    from samestep.training.session import Session, session
    from samestep.training.usage import Usage
    from samestep.verification.proof import Proof

__version__: str  # samestep.version.VERSION

# Where each public name lives. They are imported when they are first used, so that `import samestep` and
# `samestep --help` don't wait for torch.
_HOME = {
    "train": "samestep.api",
    "verify": "samestep.api",
    "dry_run": "samestep.api",
    "check": "samestep.job_check",
    "CheckResult": "samestep.job_check",
    "evaluate": "samestep.inference",
    "load_model": "samestep.inference",
    "export_model": "samestep.convert.convert",
    "compare": "samestep.comparison.compare",
    "Comparison": "samestep.comparison.results",
    "session": "samestep.training.session",
    "Session": "samestep.training.session",
    "TrainResult": "samestep.training.result",
    "Usage": "samestep.training.usage",
    "Proof": "samestep.verification.proof",
    "Recipe": "samestep.recipe",
    "AdamW": "samestep.recipe",
    "SGD": "samestep.recipe",
    "NamedOptimizer": "samestep.recipe",
    "Group": "samestep.recipe",
    "Average": "samestep.recipe",
    "Schedule": "samestep.recipe",
    "Evaluation": "samestep.recipe",
    "LoRA": "samestep.recipe",
    "EarlyStop": "samestep.recipe",
    "Hooks": "samestep.hooks",
    "Ask": "samestep.hooks",
    "Job": "samestep.job",
    "Run": "samestep.job",
    "Layout": "samestep.layout",
    "Task": "samestep.tasks.base",
    "Batch": "samestep.data.types",
    "Samples": "samestep.data.types",
    "Work": "samestep.tasks.base",
    "InTurns": "samestep.tasks.turns",
    "Turn": "samestep.tasks.turns",
    "Gather": "samestep.tasks.losses",
    "alone": "samestep.tasks.losses",
    "draws_along": "samestep.parallel.exact.sample_dims",
    "UserError": "samestep.errors",
    "CheckpointError": "samestep.errors",
    "Checkpointing": "samestep.job",
    "LayoutError": "samestep.errors",
    "RankFailedError": "samestep.errors",
    "InterruptedJobError": "samestep.errors",
    "NonFiniteError": "samestep.errors",
    "NotSavedError": "samestep.errors",
}

__all__ = [
    "SGD",
    "AdamW",
    "Ask",
    "Average",
    "Batch",
    "CheckResult",
    "CheckpointError",
    "Checkpointing",
    "Comparison",
    "EarlyStop",
    "Evaluation",
    "Gather",
    "Group",
    "Hooks",
    "InTurns",
    "InterruptedJobError",
    "Job",
    "Layout",
    "LayoutError",
    "LoRA",
    "NamedOptimizer",
    "NonFiniteError",
    "NotSavedError",
    "Proof",
    "RankFailedError",
    "Recipe",
    "Run",
    "Samples",
    "Schedule",
    "Session",
    "Task",
    "TrainResult",
    "Turn",
    "Usage",
    "UserError",
    "Work",
    "alone",
    "check",
    "compare",
    "draws_along",
    "dry_run",
    "evaluate",
    "export_model",
    "load_model",
    "session",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that `import samestep` alone doesn't import PyTorch."""
    if name == "__version__":
        from samestep.version import VERSION

        return VERSION
    if name == "tasks":
        return import_module("samestep.tasks")
    if name not in _HOME:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != _HOME[name]:
            raise
        raise ImportError(
            f"samestep.{name}: only the prover is installed (samestep-prove); use pip install samestep"
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
