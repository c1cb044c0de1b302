"""`samestep.check`: is a task's contract kept, and which layouts can its model have? Each layout is tried."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep import door
from samestep.api import verify_layouts
from samestep.contract.check import ContractFinding, examine
from samestep.display.tables import formatted, numbers, plain_console, table, texts
from samestep.job import Job, Run
from samestep.layout import Layout, unsized
from samestep.parallel.experts.find import has_experts
from samestep.progress import phases
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.tasks.turns import turns_of
from samestep.training.example import example_of
from samestep.training.fit import build_model
from samestep.validation import checked
from samestep.verification.matrix import MatrixRow

# Each mesh axis alone, over two ranks; one start of the ranks tries all.
LAYOUTS = (
    "dp2",
    "zero1x2",
    "zero2x2",
    "fsdp2",
    "fsdp2 recompute=full",
    "tp2",
    "tp2 sequence=split",
    "pp2",
    "cp2",
)
EXPERTS = "ep2"  # of models that have experts
_STEPS = 2
_HELD_OUT = 32  # samples that are evaluated

_KEPT = {True: "kept", False: "BROKEN", None: "?"}


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Results of checking a job: its contract, and the layouts if the contract holds."""

    job: str
    contract: Sequence[ContractFinding]
    layouts: Sequence[MatrixRow]

    @property
    def kept(self) -> bool:
        """Whether the whole contract holds."""
        return all(finding.kept for finding in self.contract)

    @property
    def passed(self) -> bool:
        """Whether the contract is kept, and every layout took the same step or was refused with a reason."""
        return self.kept and all(row.passed for row in self.layouts)

    def to_json(self) -> dict[str, Any]:
        """Findings about the contract, and a row for each layout that was tried."""
        return {
            "job": self.job,
            "contract": [asdict(finding) for finding in self.contract],
            "kept": self.kept,
            "layouts": [row.to_json() for row in self.layouts],
        }


def check(recipe: Recipe, *, layouts: Sequence[str] | None = None, **run: Any) -> CheckResult:
    """Check a recipe's task on its first samples, and try layouts of its model for two steps each in float64.

    `layouts`: None tries each axis over two processes, that of experts where the model has some.
    `run` takes the keys of a job file's `run:` section but layout and processes. Raises UserError for what is wrong
    with the job besides its task.
    """
    return check_layouts(Job(recipe=recipe, run=checked(Run, run, prefix=("run",))), layouts)


@phases.command("check")
def check_layouts(job: Job, layouts: Sequence[str] | None = None) -> CheckResult:
    """Check a job in the same way; its own layout is ignored."""
    # Compressed communication is left out: it takes another step by design.
    recipe = replace(job.recipe, communication=None)
    if not unsized(job.run.layout):
        Layout.parse(job.run.layout, job.run.processes)  # it is ignored, but what can't be read is a mistake
    # What belongs to a layout goes with it.
    ignored: dict[str, Any] = {"processes": None, "engine_config": None, "cut_at": None}
    alone = replace(job, recipe=recipe, run=replace(job.run, layout="single", **ignored))
    ready = door.check(alone)
    task = ready.task
    named = job.recipe.task
    name = job.name or (named if isinstance(named, str) else type(named).__name__)
    with phases.phase("checking the task's contract"):
        contract = examine(alone, ready.layout, task)
    if not all(finding.kept for finding in contract):
        return CheckResult(job=name, contract=contract, layouts=())
    if layouts is None:
        layouts = (*LAYOUTS, EXPERTS) if _has_experts(alone, task) else LAYOUTS
    seen = replace(alone, run=replace(alone.run, check=False))
    return CheckResult(
        job=name,
        contract=contract,
        layouts=verify_layouts(seen, layouts, steps=_STEPS, held_out=_HELD_OUT, task=task),
    )


def _has_experts(job: Job, task: Task) -> bool:
    """Whether the model has experts, so that layouts with ep apply."""
    model = build_model(task, job.recipe).model
    return has_experts(model, example_of(task, task.train_set(), turns_of(task)), job.run.expert_plan)


def print_checked(result: CheckResult) -> None:
    """Print the parts of the contract, then the layouts that the model can have, and why it can't have the others."""
    console = plain_console()
    columns = [*texts("part", "", whole=True), *texts("")]
    rows = [[row.part, _KEPT[row.kept], row.text if row.kept else ""] for row in result.contract]
    console.print(table(columns, rows, title=f"the contract of {result.job}"))
    for finding in result.contract:
        if finding.kept is not True:
            console.print(f"{finding.part}: {finding.text}", soft_wrap=True)
            why = "is broken" if finding.kept is False else "was not looked at"
            console.print(f"The contract {why}, so no layout was tried.", soft_wrap=True)
            return
    rows = []
    for row in result.layouts:
        largest = max(row.proof.max_relative_difference.values()) if row.proof else None
        rows.append([row.layout, row.verdict, formatted(largest, "{:.1e}")])
    columns = [*texts("layout", "", whole=True), *numbers("largest difference", whole=True)]
    console.print(table(columns, rows, title="layouts, each tried for two steps versus one process in float64"))
    for row in result.layouts:
        if row.reason or row.failure:
            console.print(f"{row.verdict}: {row.reason or row.failure}", soft_wrap=True)
