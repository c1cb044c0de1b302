"""Ready: a job that has passed all checks, as its ranks get it."""

from dataclasses import dataclass, field, replace
from typing import Any

from samestep.job import Job
from samestep.layout import Layout
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.tasks.registry import resolve


class BuiltTask:
    """A recipe's task, built at its first use in each process, and once.

    To another process go the facts that this one has found by trying the task's model (`Task.tried_facts`), so that
    ranks don't try it again. The task itself stays: a rank builds its own from the recipe.
    """

    def __init__(self, task: Task | None = None) -> None:
        self._task = task
        self._facts: Any = None

    def of(self, recipe: Recipe) -> Task:
        """The task, of the recipe that names it."""
        if self._task is None:
            self._task = resolve(recipe, self._facts)
        return self._task

    def __getstate__(self) -> dict[str, Any]:
        return {"_task": None, "_facts": self._facts if self._task is None else self._task.tried_facts()}


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A job that has passed all checks, with its layout and its task; it can be sent to the job's ranks."""

    job: Job  # as the engine's own configuration completes it; its `run.layout` is the text, for printing
    layout: Layout  # with the size of every axis
    built: BuiltTask = field(default_factory=BuiltTask, repr=False)

    @property
    def task(self) -> Task:
        """The job's task, the same object at each use in a process."""
        return self.built.of(self.job.recipe)

    def of(self, job: Job, layout: Layout | None = None) -> "Ready":
        """The same task in a job with other settings that need no check, or under a layout that was checked."""
        return replace(self, job=job, layout=layout or self.layout)
