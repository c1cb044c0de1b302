"""A whole drill: the undisturbed run, then a run for each fault, compared with it; as a table in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep import door, environment, subprocess_group
from samestep.display.tables import WIDTH, formatted, numbers, plain_console, table, texts, values_table
from samestep.drill.drill import Drill, DrillRow, Runs, row_of
from samestep.drill.faults import DRILLS
from samestep.drill.soak import SoakReport
from samestep.durations import check_seconds
from samestep.errors import UserError, closest
from samestep.job import Checkpointing, Job
from samestep.limits import check_whole
from samestep.plausibility import shortened
from samestep.progress import phases
from samestep.progress.bars import Bar

FEWEST_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """The results of a drill."""

    layout: str
    steps: int
    fault_step: int
    final_loss: float  # of the undisturbed run
    rows: Sequence[DrillRow]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "steps": self.steps,
            "fault_step": self.fault_step,
            "final_loss": self.final_loss,
            "passed": self.passed,
            "faults": [row.to_json() for row in self.rows],
        }


def chosen(faults: Sequence[str] | None, processes: int) -> list[Drill]:
    """Return the named drills; without names, all that the number of processes allows. Raises UserError."""
    if faults is None:
        return [drill for drill in DRILLS if drill.processes <= processes]
    drills = {drill.name: drill for drill in DRILLS}
    picked = []
    for fault in (text.strip() for text in faults):
        if fault not in drills:
            raise UserError(f'unknown fault "{fault}"; {closest(fault, drills)}')
        if drills[fault].processes > processes:
            raise UserError(f'fault "{fault}" wants {drills[fault].processes} processes; use layout dp2')
        picked.append(drills[fault])
    return picked


@phases.command("drill")
def drill_job(job: Job, *, steps: int, faults: Sequence[str] | None = None, time_limit: float = 600) -> DrillReport:
    """Train a job's first steps undisturbed, and again under each fault.

    Raises UserError for what is wrong with the job, also if the undisturbed run fails.
    """
    if environment.ranks() is not None:
        raise UserError("drill starts its own processes; start it without a launcher")
    check_whole("--steps", steps, least=FEWEST_STEPS)
    check_seconds(time_limit=time_limit)
    job = _of(job, steps)
    layout = door.layout_of(job)
    picked = chosen(faults, layout.size)
    door.check(job, layout)
    with TemporaryDirectory(prefix="samestep-drill-") as place, subprocess_group.signals_raise():
        runs = Runs(job=job, place=Path(place), time_limit=time_limit, step=steps * 3 // 5, rank=layout.size - 1)
        with Bar("drill", 1 + len(picked)) as bar:
            bar.say("undisturbed")
            undisturbed = runs.train("undisturbed")
            if undisturbed.code != 0:
                raise UserError(
                    f"the undisturbed run failed, with exit code {undisturbed.code}:\n{undisturbed.output}"
                )
            bar.advance()
            runs = replace(runs, step_seconds=max(undisturbed.report["own_step_seconds"]))
            rows = []
            for drill in picked:
                bar.say(drill.does)
                rows.append(row_of(drill, drill.run(runs), undisturbed))
                bar.advance()
        return DrillReport(
            layout=str(layout),
            steps=steps,
            fault_step=runs.step,
            final_loss=undisturbed.report["final_loss"],
            rows=rows,
        )


def _of(job: Job, steps: int) -> Job:
    """Return the job of a drill: its first steps, four checkpoints, none of its own injected faults."""
    checkpointing = job.run.checkpoint or Checkpointing()
    checkpoint = replace(checkpointing, every=max(1, steps // 4), folder=None, resume="never", best=None)
    return replace(
        job,
        recipe=shortened(job.recipe, steps),
        run=replace(job.run, checkpoint=checkpoint, inject=(), max_restarts=0, elastic=False, log=(), check=False),
    )


def print_drill(drilled: DrillReport) -> None:
    """Print a row for each fault, and the undisturbed run."""
    console = plain_console(width=WIDTH)
    columns = [
        *texts("fault", whole=True),
        *texts("what happened"),
        *numbers("s to the next step", "steps lost", "final loss", "difference"),
        *texts("weights", ""),
    ]
    undisturbed = ["none", "", "", "", f"{drilled.final_loss:.6f}", "", "", ""]
    title = f"{drilled.layout}, {drilled.steps} steps, a fault in step {drilled.fault_step}"
    console.print(table(columns, [undisturbed, *map(_cells, drilled.rows)], title=title))
    if any(row.changes_result and row.survived for row in drilled.rows):
        console.print("nan: a batch is left out, so the result differs", soft_wrap=True)


def _cells(row: DrillRow) -> list[str]:
    """What a fault did, and how far the run under it ended from the undisturbed one."""
    return [
        row.fault,
        row.happened,
        formatted(row.seconds, "{:.1f}"),
        formatted(row.steps_lost, "{:.0f}"),
        formatted(row.final_loss, "{:.6f}"),
        formatted(row.difference, "{:.1e}"),
        "the same" if row.same_weights else "other",
        "survived" if row.passed else "FAILED",
    ]


def print_soak(soaked: SoakReport) -> None:
    """Print the results of a soak: goodput, recovery times, and whether the weights are bit for bit the same."""
    console = plain_console()
    counts = ", ".join(f"{name} {count}" for name, count in soaked.faults.items())
    rows = {
        "faults": f"{sum(soaked.faults.values())} of {soaked.wanted}, {soaked.between:g} s apart ({counts})",
        "final weights": "the same bits" if soaked.same_weights else "OTHERS",
        "losses": "the same bits" if soaked.same_losses else "OTHERS",
        "samples lost, repeated": f"{soaked.samples_lost}, {soaked.samples_repeated}",
        "goodput": f"{soaked.goodput:.2f}",
        "recovery, median": formatted(soaked.median_recovery, "{:.1f} s"),
        "recovery, slowest": formatted(soaked.slowest_recovery, "{:.1f} s"),
        "left: processes, files": f"{soaked.left_processes}, {soaked.left_files}",
    }
    title = f"{soaked.layout}, {soaked.steps:,} steps under faults, seed {soaked.seed}"
    console.print(values_table(rows, title=title))
    if not soaked.ended:
        console.print(f"the run did not end: {soaked.last_words}", soft_wrap=True)
    elif sum(soaked.faults.values()) < soaked.wanted:
        console.print("the run ended before the last fault; use more --steps", soft_wrap=True)
    console.print("survived" if soaked.passed else "FAILED")
