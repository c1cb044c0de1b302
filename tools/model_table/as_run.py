"""Holds what `samestep check` says of a model's layouts beside what a training under each does."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import samestep
from model_table.entry import Entry, NotMadeError, task_of
from samestep.job import Job, Run
from samestep.job_check import check_layouts

_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A pair of a model and a layout: what each command came to."""

    model: str
    layout: str
    checked: str  # "same", or the reason or failure
    ran: str  # "trained", or the reason or failure

    @property
    def alike(self) -> bool:
        """Whether the training went as the check had said: to its end, or to the same refusal."""
        return self.ran == ("trained" if self.checked == "same" else self.checked)

    def words(self) -> str:
        if self.alike:
            return f"{self.model}, {self.layout}: alike ({self.ran[:80]})"
        return f"{self.model}, {self.layout}: NOT alike\n    check: {self.checked}\n    train: {self.ran}"


def compare(entry: Entry, layouts: Sequence[str]) -> Iterator[Compared]:
    """Check a model once for all layouts, and train it for two steps under each."""
    try:
        task = task_of(entry)
    except NotMadeError:
        return
    recipe = samestep.Recipe(task=task, batch=6, steps=_STEPS, clip=0.5, optimizer=samestep.AdamW(lr=1e-3))
    job = Job(recipe=recipe, run=Run(device="cpu", threads=1))
    try:
        found = check_layouts(job, layouts)
    except samestep.UserError as error:
        yield from (_trained(entry, recipe, layout, str(error)) for layout in layouts)
        return
    broken = next((finding.text for finding in found.contract if finding.kept is False), None)
    rows = {row.layout: row for row in found.layouts}
    for layout in layouts:
        row = rows.get(layout)
        said = broken if row is None else row.reason or row.failure or row.verdict
        yield _trained(entry, recipe, layout, said or "")


def _trained(entry: Entry, recipe: samestep.Recipe, layout: str, checked: str) -> Compared:
    with tempfile.TemporaryDirectory(prefix="samestep-models-") as folder:
        try:
            samestep.train(recipe, layout=layout, device="cpu", threads=1, folder=Path(folder) / "run", check=True)
        except (samestep.UserError, samestep.RankFailedError) as error:
            return Compared(model=entry.name, layout=layout, checked=checked, ran=str(error))
    return Compared(model=entry.name, layout=layout, checked=checked, ran="trained")
