"""The plan of a job: its layouts rehearsed one after the other, ranked by the time of a step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from samestep.api import rehearse_job
from samestep.errors import UserError
from samestep.job import Job
from samestep.job_plan.machine import TargetMachine
from samestep.job_plan.predict import Prediction, predict
from samestep.layout import Layout
from samestep.progress import phases
from samestep.sizes import decimal_size
from samestep.training.rehearsal import Rehearsal

LIMIT = 120.0  # seconds of rehearsing

_FINEST = 4  # micro-batches for each pipeline rank in the finer trial: bubbles take an eighth of the step then
_SCHEDULES = (
    "interleaved-1f1b",
    "zbv-zero-bubble",
)  # tried with two stages a rank for the best pipelines
_REFINED = 2  # number of the best pipelines to refine

# Layouts that are looked at, simple ones first, and the most slices and stages that models are cut into.
_DATA = ("dp{}", "zero1x{}", "zero2x{}", "fsdp{}")
_OTHERS = ("tp{}", "tp{} sequence=split", "pp{}", "cp{}", "cp{} attention=ring")
_PAIRS = (
    "dp{0} tp{1}", "zero1x{0} tp{1}", "fsdp{0} tp{1}", "fsdp{0} tp{1} sequence=split", "pp{0} dp{1}",
    "pp{0} zero1x{1}", "dp{0} fsdp{1}", "pp{0} tp{1}", "fsdp{0} cp{1}", "dp{0} cp{1}",
)  # fmt: skip
_TRIPLES = ("pp{0} dp{1} tp{2}", "pp{0} zero1x{1} tp{2}", "dp{0} fsdp{1} tp{2}")
_LARGEST_TENSOR, _LARGEST_PIPELINE = 8, 16


@dataclass(frozen=True, kw_only=True)
class PlanCandidate:
    """A layout with a micro-batch size (None: as few micro-batches as possible)."""

    layout: str
    micro_batch: int | None

    @cached_property
    def sizes(self) -> Layout:
        """The layout, read once."""
        return Layout.parse(self.layout)

    def of(self, job: Job) -> Job:
        """Return the job with this layout."""
        run = replace(job.run, layout=self.layout, micro_batch=self.micro_batch, processes=None)
        return replace(job, run=run)

    def __str__(self) -> str:
        return self.layout if self.micro_batch is None else f"{self.layout}, micro-batches of {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """Predictions of all layouts, fastest first: those that fit, then those that don't."""

    machine: TargetMachine
    predictions: Sequence[Prediction]
    refused: Sequence[tuple[str, str]]  # layout -> why the job can't have it
    untried: Sequence[str]  # for lack of time
    rehearsed: Sequence[tuple[PlanCandidate, Sequence[Rehearsal]]]

    @property
    def fitting(self) -> Sequence[Prediction]:
        return [prediction for prediction in self.predictions if prediction.fits]

    @property
    def best(self) -> Prediction:
        """The fastest that fits. Raises UserError where nothing does."""
        if fitting := self.fitting:
            return fitting[0]
        least = min(self.predictions, key=lambda prediction: prediction.peak_bytes)
        raise UserError(
            f'no layout fits on {self.machine.devices} x {self.machine.name}: the smallest, "{least.layout}", needs '
            f"{decimal_size(least.peak_bytes)} a rank; use more devices or a smaller batch"
        )

    def again(self, job: Job, machine: TargetMachine) -> "JobPlan":
        """Predict the same layouts with other rates."""
        predictions = [
            predict(candidate.of(job), candidate.sizes, machine, ranks) for candidate, ranks in self.rehearsed
        ]
        return replace(self, machine=machine, predictions=_ranked(predictions))

    def to_json(self) -> dict[str, Any]:
        """Layouts ranked, those that were refused with the reason, and those that weren't tried."""
        rates = self.machine.rates
        return {
            "machine": self.machine.name,
            "devices": self.machine.devices,
            "rates": rates.to_json() if rates else None,
            "layouts": [prediction.to_json() for prediction in self.predictions],
            "refused": [{"layout": layout, "reason": reason} for layout, reason in self.refused],
            "untried": list(self.untried),
        }


def plan_job(
    job: Job, machine: TargetMachine, *, limit: float = LIMIT, say: Callable[[str], None] = lambda text: None
) -> JobPlan:
    """Rehearse the layouts of a job on a machine, within `limit` seconds.

    First every layout with the job's micro-batches; for those that don't fit, variants with less memory; then other
    schedules and more micro-batches for the best pipelines. Raises UserError, about the simplest layout, if the job
    can have none.
    """
    alone = replace(job, run=replace(job.run, device="cpu"))
    queue = [PlanCandidate(layout=text, micro_batch=job.run.micro_batch) for text in _wanted(machine)]
    planned: list[tuple[PlanCandidate, Sequence[Rehearsal], Prediction]] = []
    refused: list[tuple[str, str]] = []
    began, refined = time.monotonic(), False
    while not planned or time.monotonic() - began < limit:
        if not queue and not refined:
            queue, refined = _finer(job, [(layout_, prediction) for layout_, _, prediction in planned]), True
        if not queue:
            break
        candidate = queue.pop(0)
        say(str(candidate))
        layout = candidate.sizes
        try:
            with phases.phase(f"rehearsing {candidate}", once="rehearsing"), phases.muted():
                ranks = rehearse_job(candidate.of(alone), layout.size)
        except UserError as error:
            refused.append((str(candidate), str(error)))
            continue
        planned.append((candidate, ranks, predict(candidate.of(job), layout, machine, ranks)))
        if not planned[-1][2].fits:
            queue += _smaller(job, candidate, layout)
    if not planned:
        raise UserError(refused[0][1])
    return JobPlan(
        machine=machine,
        predictions=_ranked([prediction for _, _, prediction in planned]),
        refused=refused,
        untried=[str(layout_) for layout_ in queue],
        rehearsed=[(candidate, ranks) for candidate, ranks, _ in planned],
    )


def layouts_of(devices: int) -> Iterator[str]:
    """Yield layouts for a number of devices: with one axis, two, and three."""
    if devices == 1:
        yield "single"
        return
    for form in (*_DATA, *_OTHERS):
        if _sensible(text := form.format(devices)):
            yield text
    pairs = [(a, devices // a) for a in range(2, devices) if devices % a == 0]
    for form in _PAIRS:
        yield from filter(_sensible, (form.format(*pair) for pair in pairs))
    triples = [(a, b // c, c) for a, b in pairs for c in range(2, b) if b % c == 0]
    for form in _TRIPLES:
        yield from filter(_sensible, (form.format(*triple) for triple in triples))


def _sensible(text: str) -> bool:
    """Whether tensor and pipeline sizes are within the usual bounds."""
    for part in text.split():
        if part.startswith("tp") and int(part[2:]) > _LARGEST_TENSOR:
            return False
        if part.startswith("pp") and int(part[2:]) > _LARGEST_PIPELINE:
            return False
    return True


def _smaller(job: Job, candidate: PlanCandidate, layout: Layout) -> list[PlanCandidate]:
    """Return variants of a candidate with less memory: smaller micro-batches, and recomputation."""
    if candidate.micro_batch != job.run.micro_batch:
        return []
    variants = []
    samples = candidate.micro_batch or -(-job.recipe.batch // layout.data_ranks)
    if layout.pipeline == 1 and samples > 1:
        fewer = 1 if layout.recompute == "full" else max(samples // 4, 1)
        variants.append(replace(candidate, micro_batch=fewer))
    if layout.recompute == "none":
        variants.append(replace(candidate, layout=f"{candidate.layout} recompute=full"))
    return variants


def _finer(job: Job, predictions: Sequence[tuple[PlanCandidate, Prediction]]) -> list[PlanCandidate]:
    """Return variants of the best fitting pipelines with other schedules and more micro-batches."""
    pipelines = [
        candidate for candidate, prediction in predictions if prediction.fits and candidate.sizes.pipeline > 1
    ]
    seconds = {candidate: prediction.seconds for candidate, prediction in predictions}
    tried: list[PlanCandidate] = []
    for candidate in sorted(pipelines, key=lambda pipeline: seconds[pipeline])[:_REFINED]:
        layout = candidate.sizes
        tried += [replace(candidate, layout=f"{candidate.layout} schedule={name} stages=2") for name in _SCHEDULES]
        fine = job.recipe.batch // layout.data_ranks // (_FINEST * layout.pipeline)
        if candidate.micro_batch is None and fine:
            tried.append(replace(candidate, micro_batch=fine))
    return tried


def _wanted(machine: TargetMachine) -> list[str]:
    """Return the layouts of all devices; on shared cores, also one process with all of them."""
    alone = ["single"] if machine.cluster is None and machine.devices > 1 else []
    return [*alone, *layouts_of(machine.devices)]


def _ranked(predictions: Sequence[Prediction]) -> list[Prediction]:
    return sorted(predictions, key=lambda prediction: (not prediction.fits, prediction.seconds))
