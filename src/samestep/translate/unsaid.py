"""The keys of a job that other tools' configurations can't express, with the reasons."""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from samestep.job import Job, Run
from samestep.recipe import Recipe
from samestep.validation import shown

_SCRIPT = "the script says it"
_LAUNCHER = "the tool's launcher says it"

# All keys of a job that a writer may omit. The tests fail for a key that is neither in a writer nor here.
REASONS = {
    "recipe.task": _SCRIPT,
    "recipe.data": _SCRIPT,
    "recipe.model": _SCRIPT,
    "recipe.args": _SCRIPT,
    "recipe.seed": "the script seeds its generators",
    "recipe.batch": _SCRIPT,
    "recipe.virtual_ranks": "only samestep sums over virtual ranks",
    "recipe.steps": _SCRIPT,
    "recipe.epochs": _SCRIPT,
    "recipe.optimizer": "the script makes it",
    "recipe.groups": "the script makes the optimizer's groups",
    "recipe.schedule": "the script makes it",
    "recipe.average": "the script averages",
    "recipe.clip": "the script clips",
    "recipe.precision": _SCRIPT,
    "recipe.dropout": "the model says it",
    "recipe.attention_dropout": "the model says it",
    "recipe.master_weights": "the script makes its optimizer",
    "recipe.communication": "the script registers the hook or makes the optimizer",
    "recipe.evaluation": "the script evaluates",
    "recipe.adapter": "the script puts adapters into its model",
    "recipe.early_stop": "the script ends its loop",
    "run.processes": "the layout's sizes say it",
    "run.engine": "the file is another engine's",
    "run.engine_config": "the file is another engine's",
    "run.micro_batch": "the script's data loader and its accumulation say it",
    "run.cut_at": "stages are those that the script's pipeline module has",
    "run.device": "the ranks take the accelerator that they find",
    "run.threads": "OMP_NUM_THREADS says it",
    "run.bind": "the launcher binds ranks",
    "run.transport": "other engines send through back ends of their own",
    "run.workers": "the script's data loader says it",
    "run.check": "a script has no task to check",
    "run.compile": "the script compiles",
    "run.float32_matmul": "the script sets it",
    "run.loss_chunk": "the script computes its loss",
    "run.reduction": "other engines sum in the order of their messages",
    "run.group_by_length": "the script's data loader deals samples out as they come",
    "run.bucket_mb": "the script wraps its model",
    "run.sparse_rows": "the script sends its gradients",
    "run.share_replicas": "the ranks of other engines keep a replica each",
    "run.profile": "only samestep profiles its steps",
    "run.tensor_plan": "the tool's own plan is taken",
    "run.expert_plan": "the tool's own plan is taken",
    "run.folder": _SCRIPT,
    "run.overwrite": _SCRIPT,
    "run.offload_folder": "nothing is offloaded to it",
    "run.checkpoint": "the script saves and loads",
    "run.log": "the script says it",
    "run.hooks": "the script calls its own code",
    "run.rank_lines": "only samestep prints them",
    "run.max_restarts": _LAUNCHER,
    "run.hang_limit": "only samestep watches its ranks",
    "run.grace_period": "only samestep's ranks take a signal as notice",
    "run.on_nonfinite": "the script looks at its losses",
    "run.elastic": _LAUNCHER,
    "run.min_processes": _LAUNCHER,
    "run.inject": "only samestep commits faults",
}


def unsaid(job: Job, expressed: Collection[str]) -> list[str]:
    """A remark for each key that differs from its default and is not in the written file."""
    sections = {"recipe": (job.recipe, Recipe(task="")), "run": (job.run, Run())}
    remarks = []
    for section, (own, plain) in sections.items():
        for field in fields(own):
            key, value = f"{section}.{field.name}", getattr(own, field.name)
            if key not in expressed and value != getattr(plain, field.name):
                remarks.append(f"{key} = {shown(_short(value))}: {REASONS[key]}")
    return remarks


def _short(value: Any) -> Any:
    return getattr(value, "name", None) or (value if isinstance(value, (str, int, float, dict)) else str(value))
