"""Finds where a proof's steps first depart and what that looks like, by the records and kinds of script proofs.

A failed proof is repeated on both sides: in each forward of a step every module's output is recorded as two numbers
for each sample, and after it the parameters and the optimizer's averages of gradients. They are compared in the order
of computation: the initial weights, the samples, the forward and the gradients, the update.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from samestep.data.loader import StepBatch
from samestep.engines.base import StepReport
from samestep.job import Job
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.recording.differences import RoundingLimits, TensorDifference, tensor_difference
from samestep.recording.forward import Keys, first_module_apart, rows_of_forward
from samestep.recording.record import RankStep, Row, RunRecord
from samestep.script_proof.gradients import StepPair, gradient_finding
from samestep.script_proof.kinds import Finding
from samestep.script_proof.updates import initial_finding, settings_finding, update_finding
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.rounding import relative
from samestep.verification.job_record import (
    Watch,
    file_of_step,
    gradients_of_step,
    read_gradients,
    run_of,
    saved_gradients,
    watched,
    weights_of_step,
    with_settings_of,
)
from samestep.verification.noise import A_BUFFER
from samestep.verification.parts import PartWeights, gathered, parts_of, weights_of_parts
from samestep.verification.steps import in_one_process, save, take
from samestep.verification.tensors import from_rank_0, root_mean_square

_MOST_STEPS = 10  # steps compared at most
# Relative to a tensor's norm. In all correct layouts of the tests, gradients stay below these limits. Under AdamW
# rounding may move a number by a whole step, so parameters are compared only in float64, with a wider limit.
_LIMITS = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2}
_PARAMETERS_LIMIT = 1e-6
_INITIAL_LIMIT = 1e-7  # of weights that were drawn alike; an engine may hold them in float32
# Kinds of gradients that the weights of the ranks' samples may explain better.
_UNEXPLAINED = ("gradients-differ", "lost-micro-batches", "backward-differs", "loss-of-own-rows")


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Records of the reference's steps."""

    folder: Path  # with a file of tensors for each step
    record: RunRecord  # of one rank, without the tensors


def look(job: Job, task: Task, steps: int, folder: Path) -> Looked:
    """Record the steps of one process in float64. `job` is from `proof_job`."""
    job = in_one_process(job)
    taken: list[RankStep] = []
    with join(alone=True, device=job.run.device, threads=job.run.threads) as world:
        training = Training(job, task, world, Layout())
        trainer = training.session.trainer
        before = weights_of_step(trainer)
        save(before, file_of_step(folder, -1))
        with watched() as watch:

            def after(batch: StepBatch, report: StepReport) -> None:
                """After each step: save its gradients and weights to a file, and record the rest."""
                nonlocal before
                weights = weights_of_step(trainer)
                gradients = gradients_of_step(job.recipe, trainer, before, weights)
                save({**weights, **saved_gradients(gradients)}, file_of_step(folder, len(taken)))
                before = weights
                taken.append(watch.step(trainer, batch, report))

            take(training, min(steps, _MOST_STEPS), "where it departs: one process", after)
    return Looked(folder=folder, record=run_of([taken]))


def find(job: Job, task: Task, world: World, layout: Layout, steps: int, reference: Looked | None) -> Finding | None:
    """Take the same steps on this rank under a layout, and find where they first depart; rank 0 has `reference`.

    None if they don't depart in the compared steps. Every rank returns the same.
    """
    training = Training(job, task, world, layout)
    with watched() as watch:
        comparison = _Comparison(job=job, task=task, training=training, reference=reference, world=world, watch=watch)
        comparison.begin()
        take(training, min(steps, _MOST_STEPS), f"where it departs: {layout}", comparison.after)
    return comparison.found


class _Comparison:
    """Compares each step of a layout with the reference, until one departs."""

    def __init__(
        self, *, job: Job, task: Task, training: Training, reference: Looked | None, world: World, watch: Watch
    ) -> None:
        self.found: Finding | None = None
        self._recipe = job.recipe
        self._task = task
        self._training = training
        self._trainer = training.session.trainer
        self._known = reference
        self._world = world
        self._watch = watch
        self._limit = _LIMITS[job.recipe.precision]
        self._exact = job.recipe.precision == "fp64"
        self._step = 0
        self._taken: Sequence[list[RankStep]] = [[] for _ in range(world.world_size)]  # by rank
        self._before: dict[str, Tensor] = {}  # weights
        self._gradients_before: Mapping[str, Tensor] = {}

    def begin(self) -> None:
        """Compare the weights before the first step."""
        self._before = weights_of_step(self._trainer)
        tensors = self._differences(self._before, self._reference(-1))
        limits = RoundingLimits(common=_INITIAL_LIMIT, own={})
        nothing = run_of([])
        self.found = initial_finding(tensors, limits, nothing, nothing)

    def after(self, batch: StepBatch, report: StepReport) -> None:
        """After each step, until a departure is found: compare samples, settings, gradients, and the update."""
        taken = self._watch.step(self._trainer, batch, report)
        if self.found is None:
            weights = weights_of_step(self._trainer)
            # A rank without samples of its own joins in with another's, at weight 0.
            repeats = any(micro_batch.weight == 0 for micro_batch in batch.micro_batches)
            ranks = self._of_ranks((taken, repeats))
            for steps, (step, _) in zip(self._taken, ranks, strict=True):
                steps.append(step)
            self.found = (
                (None if any(repeats for _, repeats in ranks) else self._on_rank_0(self._samples))
                or self._on_rank_0(lambda: settings_finding(self._step, *self._runs))
                or self._gradient(batch, weights)
                or self._update(weights)
                or self._on_rank_0(self._loss)
            )
            self._before = weights
        self._step += 1

    @property
    def _runs(self) -> tuple[RunRecord, RunRecord]:
        """The records of one process and of the layout, on rank 0."""
        assert self._known is not None
        alone = self._known.record
        return alone, with_settings_of(run_of(self._taken), alone)

    def _samples(self) -> Finding | None:
        """Compare the samples if every rank computes whole ones, and none is another rank's too."""
        return _samples(self._step, *self._runs) if self._replicated else None

    @property
    def _replicated(self) -> bool:
        """Whether every rank computes whole samples, and no sample is another rank's too."""
        layout = self._training.session.layout
        return layout.data_ranks == layout.size

    def _of_ranks(self, own: Any) -> list[Any]:
        ranks: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(ranks, own)
        return ranks

    def _on_rank_0(self, find: Callable[[], Any]) -> Any:
        """What rank 0, which has the reference, finds."""
        answer = [find() if self._known is not None else None]
        dist.broadcast_object_list(answer)
        return answer[0]

    def _reference(self, step: int) -> dict[str, Tensor]:
        return load_file(file_of_step(self._known.folder, step)) if self._known is not None else {}

    def _gradient(self, batch: StepBatch, weights: Mapping[str, Tensor]) -> Finding | None:
        """Compare the forward and the gradients of all ranks."""
        gradients = gradients_of_step(self._recipe, self._trainer, self._before, weights)
        compared = self._differences(gradients, read_gradients(self._reference(self._step)))
        tensors = [
            replace(tensor, missing=True, apart=math.inf) if _is_zero(tensor) else tensor for tensor in compared
        ]

        def judged() -> tuple[Finding | None, Finding | None]:
            """What the gradients look like, and the forward."""
            alone, split = (run.step(self._step) for run in self._runs)
            pair = StepPair(
                number=self._step,
                alone=alone,
                split=split,
                tensors=tensors,
                limits=RoundingLimits(common=self._limit, own={}),
                forward_eps=self._limit / 100,
            )
            keys = _keys(self._step, *self._runs)
            return gradient_finding(pair, keys), _forward(pair, keys)

        finding, forward = self._on_rank_0(judged)
        finding = finding or forward
        if finding is not None and finding.kind in _UNEXPLAINED:
            by_parts = self._by_parts(finding, batch, gradients) if self._replicated else None
            # Small gradients alone don't tell that micro-batches are lost: the parts do.
            finding = by_parts or forward or replace(finding, kind="gradients-differ")
        self._gradients_before = gradients
        return finding

    def _by_parts(self, finding: Finding, batch: StepBatch, gradients: Mapping[str, Tensor]) -> Finding | None:
        """Explain gradients by the weights that the samples of each rank and micro-batch have in them."""
        names = [name for name in self._before if name in gradients]
        parts = gathered(parts_of(self._recipe, self._task, self._before, names, batch, self._world.device))
        if not parts:
            return None

        def fitted() -> Finding | None:
            expected = read_gradients(self._reference(self._step))
            others = [_joined(tensors, names) for tensors in (self._gradients_before, self._before) if tensors]
            weights = weights_of_parts(parts, _joined(expected, names), _joined(gradients, names), others)
            return None if weights is None else _of_weights(finding, weights)

        return self._on_rank_0(fitted)

    def _update(self, weights: Mapping[str, Tensor]) -> Finding | None:
        """Compare the weights after a step of equal gradients, in float64: AdamW makes whole steps of rounding."""
        if not self._exact:
            return None
        tensors = self._differences(weights, self._reference(self._step))
        limits = RoundingLimits(common=_PARAMETERS_LIMIT, own={})
        finding: Finding | None = self._on_rank_0(
            lambda: update_finding(self._step, tensors, limits, *self._runs, gradients=self._limit)
        )
        if finding is None or self._gradients_before:
            return finding
        return replace(finding, kind="weights-differ")  # nothing is known of the gradients, and so of the update

    def _loss(self) -> Finding | None:
        alone, split = (math.fsum(loss["value"] for loss in run.step(self._step)[0].losses) for run in self._runs)
        apart = relative(split, alone)
        if apart <= self._limit:
            return None
        return Finding(kind="loss-differs", step=self._step + 1, what="loss", relative=apart)

    def _differences(self, own: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> list[TensorDifference]:
        """Compare tensors that every rank holds whole with those of one process, which rank 0 has. Collective."""
        usual = self._on_rank_0(lambda: root_mean_square(value.double() for value in references.values()))
        tensors = []
        for name, value in own.items():
            expected = from_rank_0(references.get(name), value, self._world.device).cpu()
            first = from_rank_0(value, value, self._world.device).cpu()
            tensors.append(
                tensor_difference(name, expected, value.double(), usual=usual, copies=(first, value.double()))
            )
        return [_of_all_ranks(ranks) for ranks in zip(*self._of_ranks(tensors), strict=True)]


def _of_all_ranks(ranks: Sequence[TensorDifference]) -> TensorDifference:
    """One difference of those that ranks see of a tensor: the largest."""
    worst = max(ranks, key=lambda tensor: tensor.apart)
    return replace(
        worst,
        ranks_apart=max(tensor.ranks_apart for tensor in ranks),
        split_square=max(tensor.split_square for tensor in ranks),
    )


def _is_zero(tensor: TensorDifference) -> bool:
    """Whether a tensor is zero on every rank, and not in one process."""
    return tensor.square > 0 and tensor.split_square == 0


def _samples(number: int, alone: RunRecord, split: RunRecord) -> Finding | None:
    """Compare the samples of a step: each of one process's must be on one rank, once."""
    keys = _keys(number, alone, split)
    if keys is None:
        return None
    (expected,) = (_rows(step, keys.alone) for step in alone.step(number))
    ranks = [_rows(step, keys.split) for step in split.step(number)]
    total = sum(ranks, Counter[Row]())
    if total == expected or not all(ranks) or not {*total} <= {*expected}:  # rounded inputs have other hashes
        return None
    repeated, lost = (total - expected).total(), (expected - total).total()
    shares = {"relative": (repeated + lost) / expected.total(), "step": number + 1, "what": "samples"}
    if all(rank == ranks[0] for rank in ranks):
        facts = {"samples": len(total), "rows": total.total()}
        return Finding(kind="same-samples", facts=facts, **shares)
    if repeated:
        return Finding(kind="padded-sampler", facts={"count": repeated}, **shares)
    return Finding(kind="lost-samples", facts={"count": lost}, **shares)


def _rows(step: RankStep, keys: Sequence[str]) -> Counter[Row]:
    return Counter(row for forward in step.forwards for row in rows_of_forward(forward, keys))


def _keys(number: int, alone: RunRecord, split: RunRecord) -> Keys | None:
    """The inputs that all forwards of a step have; None where there is none."""
    runs = [[forward for step in run.step(number) for forward in step.forwards] for run in (alone, split)]
    inputs = [set(forward["rows"]) for forwards in runs for forward in forwards]
    shared = sorted(set.intersection(*inputs)) if all(runs) else []
    return Keys(alone=shared, split=shared) if shared else None


def _forward(pair: StepPair, keys: Keys | None) -> Finding | None:
    """A forward that differs though the gradients don't, as far as they are known."""
    module = first_module_apart(pair.alone, pair.split, keys, eps=pair.forward_limit) if keys is not None else None
    if module is None:
        return None
    step = pair.number + 1
    return Finding(
        kind="forward-differs", step=step, what="forward", relative=module.relative, module=module.module or None
    )


def _of_weights(finding: Finding, weights: PartWeights) -> Finding | None:
    """What the weights of parts look like; None where all are alike."""
    if weights.mean_of_means:
        facts = {"name": "count", "counts": ", ".join(f"{count:.6g}" for count in weights.counts)}
        return replace(finding, kind="mean-of-means", facts=facts)
    if weights.even:
        return None
    return replace(finding, kind="parts-weighted", facts={"weights": ", ".join(f"{r:.4g}" for r in weights.ratios)})


def after_equal_steps(differences: Mapping[str, float], worst_parameter: str, tolerance: float) -> Finding | None:
    """What is left of a proof's differences where no step departs: a buffer, or the metrics."""
    if differences["parameters"] > tolerance and worst_parameter.endswith(A_BUFFER):
        name = worst_parameter.removesuffix(A_BUFFER)
        return Finding(kind="buffer", step=0, what="buffers", relative=differences["parameters"], module=name)
    metrics = differences["metrics"]
    if metrics > tolerance:
        return Finding(kind="evaluation-differs", step=0, what="evaluation", relative=metrics)
    return None


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().reshape(-1) for name in names])
