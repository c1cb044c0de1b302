"""The plan of a job: its layouts rehearsed one after the other, ranked by the time of a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from samestep.api import rehearse_job
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.layouts import layouts_of
from samestep.job_plan.machine import Machine
from samestep.job_plan.predict import Prediction, predict
from samestep.layout import Layout
from samestep.training.rehearsal import Rehearsal

LIMIT = 120.0  # seconds of rehearsing


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What was found, fastest first: what fits, then what does not."""

    machine: Machine
    predictions: Sequence[Prediction]
    refused: Sequence[tuple[str, str]]  # layouts that the job can't have, and why
    untried: Sequence[str]  # for want of time
    rehearsed: Sequence[tuple[Layout, Sequence[Rehearsal]]]

    @property
    def fitting(self) -> Sequence[Prediction]:
        return [each for each in self.predictions if each.fits]

    @property
    def best(self) -> Prediction:
        """The fastest that fits. Raises UserError where nothing does."""
        if found := self.fitting:
            return found[0]
        least = min(self.predictions, key=lambda each: each.peak_bytes)
        raise UserError(
            f'no layout fits on {self.machine.devices} x {self.machine.name}: the smallest, "{least.layout}", needs '
            f"{least.peak_bytes / 1e9:.2f} GB a rank; use more devices or a smaller batch"
        )

    def again(self, job: Job, machine: Machine) -> "JobPlan":
        """The same layouts by other rates."""
        found = [predict(job, layout, machine, ranks) for layout, ranks in self.rehearsed]
        return replace(self, machine=machine, predictions=_ranked(found))

    def to_json(self) -> dict[str, Any]:
        rates = self.machine.rates
        return {
            "machine": self.machine.name,
            "devices": self.machine.devices,
            "rates": rates.to_json() if rates else None,
            "layouts": [each.to_json() for each in self.predictions],
            "refused": [{"layout": layout, "reason": reason} for layout, reason in self.refused],
            "untried": list(self.untried),
        }


def plan_job(
    job: Job, machine: Machine, *, limit: float = LIMIT, say: Callable[[str], None] = lambda text: None
) -> JobPlan:
    """Rehearse the layouts of a job on a machine, for so many seconds at most.

    Raises UserError where no layout can be had, with what is wrong with the simplest one.
    """
    alone = replace(job, run=replace(job.run, device="cpu"))
    queue = _wanted(machine)
    found: list[tuple[Layout, Sequence[Rehearsal], Prediction]] = []
    refused: list[tuple[str, str]] = []
    began = time.monotonic()
    while queue and (not found or time.monotonic() - began < limit):
        text = queue.pop(0)
        say(text)
        layout = Layout.parse(text)
        try:
            ranks = rehearse_job(replace(alone, run=replace(alone.run, layout=text, processes=None)), layout.size)
        except UserError as error:
            refused.append((text, str(error)))
            continue
        found.append((layout, ranks, predict(job, layout, machine, ranks)))
        if not found[-1][2].fits and layout.recompute == "none":
            queue.append(f"{text} recompute=full")
    if not found:
        raise UserError(refused[0][1])
    return JobPlan(
        machine=machine,
        predictions=_ranked([each for _, _, each in found]),
        refused=refused,
        untried=queue,
        rehearsed=[(layout, ranks) for layout, ranks, _ in found],
    )


def _wanted(machine: Machine) -> list[str]:
    """Layouts of all devices; where ranks share a host's cores, one process with all of them as well."""
    alone = ["single"] if machine.cluster is None and machine.devices > 1 else []
    return [*alone, *layouts_of(machine.devices)]


def _ranked(found: Sequence[Prediction]) -> list[Prediction]:
    return sorted(found, key=lambda each: (not each.fits, each.seconds))
