"""Finds where a proof's steps first depart and what that looks like, by the records and kinds of script proofs.

A failed proof is repeated on both sides: in each forward of a step every module's output is recorded as two numbers
for each sample, and after it the parameters and the optimizer's averages of gradients. They are compared in the order
of computation: the initial weights, the samples, the forward and the gradients, the update.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from samestep.engines.base import StepReport, Trainer
from samestep.job import Job, Run
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.recording.activations import Activations
from samestep.recording.calls import ModelCalls, listen_to_modules
from samestep.recording.differences import common_module
from samestep.recording.forward import Keys, ModuleDifference, first_module_apart
from samestep.recording.record import RankStep
from samestep.recording.samples import rows_of
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.rounding import relative, relative_tensors, state_name
from samestep.verification.steps import save, take

# Optimizer state that accumulates gradients: after the first step it is a multiple of the gradient.
_GRADIENTS = ("exp_avg", "momentum_buffer")
_MOST_STEPS = 10  # steps compared at most
# Relative to a tensor's largest number, or to the root mean square of all. In all correct layouts of the tests,
# gradients stay below these limits. Under AdamW rounding may move a number by a whole step, so parameters are
# compared only in float64, with a wider limit.
_LIMITS = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2}
_PARAMETERS_LIMIT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Records of the reference's steps."""

    folder: Path  # with a file of tensors for each step
    reports: Sequence["_Report"]
    forwards: Sequence[Sequence[Mapping[str, Any]]]  # by step


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a step reports of itself, and the decay of each group of its optimizer."""

    loss: float
    lr: float
    decays: Sequence[tuple[float, int]]  # with the number of parameters; empty of an engine's own optimizer

    @classmethod
    def of(cls, trainer: Trainer, report: StepReport) -> "_Report":
        decays: list[tuple[float, int]] = []
        if isinstance(trainer, NativeTrainer):
            groups = [group for each in innermost(trainer.optimizer) for group in each.param_groups]
            decays = [(float(group.get("weight_decay", 0.0)), len(group["params"])) for group in groups]
        return cls(loss=report.loss.item(), lr=report.lr, decays=decays)


class _Watch:
    """Records the forwards of a model in training, like the recorder of scripts."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.calls = ModelCalls(self._begins, self._ends)
        self._root: nn.Module | None = None

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether a call starts a model's forward. A block that is recomputed in backward does not."""
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return False
        if self._root is None:
            self._root = module
        rows = rows_of(args, kwargs) if module is self._root else None
        if rows is None:
            return False
        self.forwards.append({"rows": dict(rows.hashes)})
        self.calls.activations = Activations(module, "", rows.batch)
        return True

    def _ends(self, _: Any) -> None:
        self.forwards[-1]["activations"] = self.calls.take_activations()


@contextmanager
def _watched() -> Iterator[_Watch]:
    """Record every forward of a model within a block."""
    watch = _Watch()
    end = listen_to_modules(watch.calls.called)
    try:
        yield watch
    finally:
        end()


def look(job: Job, task: Task, steps: int, folder: Path) -> Looked:
    """Record the steps of one process in float64. `job` is from `proof_job`."""
    given = job.run
    alone = Run(device=given.device, threads=given.threads, workers=given.workers)

    recipe = replace(job.recipe, precision="fp64", communication=None)
    reports: list[_Report] = []
    forwards: list[list[dict[str, Any]]] = []
    with join(alone=True, device=alone.device, threads=alone.threads) as world:
        training = Training(replace(job, recipe=recipe, run=alone), task, world, Layout())
        trainer = training.session.trainer
        before = _weights(trainer)
        save(before, _file(folder, -1))
        with _watched() as watch:

            def after(_: StepBatch, report: StepReport) -> None:
                """After each step: save its gradients and weights to a file, and note the rest."""
                nonlocal before
                weights = _weights(trainer)
                save({**weights, **_gradients(recipe, trainer, before, weights)}, _file(folder, len(forwards)))
                before = weights
                reports.append(_Report.of(trainer, report))
                forwards.append(watch.forwards)
                watch.forwards = []

            take(training, min(steps, _MOST_STEPS), "where it departs: one process", after)
    return Looked(folder=folder, reports=reports, forwards=forwards)


def find(job: Job, task: Task, world: World, layout: Layout, steps: int, known: Looked | None) -> Finding | None:
    """Take the same steps on this rank under a layout, and find where they first depart; rank 0 has `known`.

    None if they don't depart in the compared steps. Every rank returns the same.
    """
    training = Training(job, task, world, layout)
    with _watched() as watch:
        comparison = _Comparison(job=job, task=task, training=training, known=known, world=world, watch=watch)
        comparison.begin()
        take(training, min(steps, _MOST_STEPS), f"where it departs: {layout}", comparison.after)
    return comparison.found


class _Comparison:
    """Compares each step of a layout with the reference, until one departs."""

    def __init__(
        self, *, job: Job, task: Task, training: Training, known: Looked | None, world: World, watch: _Watch
    ) -> None:
        self.found: Finding | None = None
        self._recipe = job.recipe
        self._task = task
        self._training = training
        self._trainer = training.session.trainer
        self._known = known
        self._world = world
        self._watch = watch
        self._limit = _LIMITS[job.recipe.precision]
        self._exact = job.recipe.precision == "fp64"
        self._step = 0
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Compare the weights before the first step."""
        self._before = _weights(self._trainer)
        values = self._reference(-1)
        tensors = self._differences(self._before, values)
        limits = RoundingLimits(common=_INITIAL_LIMIT, own={})
        if own := [each.name for each in tensors if each.ranks_apart > limits.common]:
            kind, names, worst = "weights-not-broadcast", own, max(each.ranks_apart for each in tensors)
        elif other := [each.name for each in tensors if limits.exceeded(each)]:
            kind, names, worst = "other-initial-weights", other, max(each.apart for each in tensors)
        else:
            return
        module = common_module(names) if len(names) < len(tensors) else None
        self.found = Finding(kind=kind, step=0, what="initial weights", relative=worst, module=module)

    def after(self, batch: StepBatch, report: StepReport) -> None:
        """After each step, until a departure is found: compare samples, forwards and gradients, and the update."""
        forwards, self._watch.forwards = self._watch.forwards, []
        if self.found is None:
            weights = _weights(self._trainer)
            ranks = self._of_ranks((forwards, any(each.weight == 0 for each in batch.micro_batches)))
            alone = self._known.forwards[self._step] if self._known is not None else []
            told = self._told(_Report.of(self._trainer, report))
            self.found = (
                self._on_rank_0(lambda: _samples(self._step + 1, alone, ranks) if self._replicated else None)
                or self._settings(told)
                or self._gradient(batch, alone, [each for each, _ in ranks], weights, told)
                or self._update(weights)
                or self._loss(told)
            )
            self._before = weights
        self._step += 1

    @property
    def _replicated(self) -> bool:
        """Whether every rank computes whole samples, and no sample is another rank's too."""
        layout = self._training.session.layout
        return layout.data_ranks == layout.size

    def _of_ranks(self, mine: Any) -> list[Any]:
        ranks: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(ranks, mine)
        return ranks

    def _on_rank_0(self, find: Callable[[], Any]) -> Any:
        """What rank 0, which has the reference, finds."""
        answer = [find() if self._known is not None else None]
        dist.broadcast_object_list(answer)
        return answer[0]

    def _told(self, mine: _Report) -> tuple[_Report, _Report]:
        """The step's reports: of one process, and of this layout."""
        known = self._known
        return self._on_rank_0(lambda: (known.reports[self._step], mine) if known is not None else None)

    def _reference(self, step: int) -> dict[str, Tensor]:
        return load_file(_file(self._known.folder, step)) if self._known is not None else {}

    def _settings(self, told: tuple[_Report, _Report]) -> Finding | None:
        """Compare learning rate and weight decay, which the update shows only together with the gradient."""
        alone, split = told
        step = self._step + 1
        if abs(split.lr - alone.lr) > _SETTINGS_LIMIT * abs(alone.lr):
            facts = {"alone": alone.lr, "split": split.lr}
            kind = "learning-rate-scaled" if alone.lr else "learning-rate"
            facts |= {"ratio": split.lr / alone.lr} if alone.lr else {}
            apart = abs(split.lr - alone.lr) / abs(alone.lr) if alone.lr else math.inf
            return Finding(kind=kind, step=step, what="learning rate", relative=apart, facts=facts)
        if len(alone.decays) != len(split.decays):
            return None
        for (known, count), (other, _) in zip(alone.decays, split.decays, strict=True):
            if known != other:
                facts = {"alone": known, "split": other, "count": count}
                return Finding(kind="weight-decay", step=step, what="weight decay", relative=math.inf, facts=facts)
        return None

    def _gradient(
        self,
        batch: StepBatch,
        alone: Sequence[Mapping[str, Any]],
        ranks: Sequence[Sequence[Mapping[str, Any]]],
        weights: Mapping[str, Tensor],
        told: tuple[_Report, _Report],
    ) -> Finding | None:
        """Compare the forward and the gradients of all ranks."""
        gradients = _gradients(self._recipe, self._trainer, self._before, weights)
        tensors = self._differences(gradients, self._reference(self._step))
        parts = len(batch.micro_batches)
        pair = StepPair(
            number=self._step,
            alone=[_rank_step(alone, told[0].loss, 1)],
            split=[_rank_step(each, told[1].loss, parts) for each in ranks],
            tensors=tensors,
            limits=RoundingLimits(common=self._limit, own={}),
        )
        keys = _keys(alone, [forward for each in ranks for forward in each])
        found: Finding | None = self._on_rank_0(lambda: gradient_finding(pair, keys) or _forward(pair, keys))
        if found is not None and found.kind in _UNEXPLAINED and self._replicated:
            return self._by_parts(found, batch, gradients) or found
        return found

    def _by_parts(self, found: Finding, batch: StepBatch, gradients: Mapping[str, Tensor]) -> Finding | None:
        """Explain gradients by the weights that the samples of each rank and micro-batch have in them."""
        device = self._world.device
        parts = gathered(parts_of(self._recipe, self._task, self._before, batch, device))
        earlier = self._earlier
        if not parts or {*gradients} != {*self._before}:
            return None

        def fitted() -> Finding | None:
            values = self._reference(self._step)
            alone, split = (
                torch.cat([each[_gradient_name(name)].double().reshape(-1) for name in self._before])
                for each in (values, {_gradient_name(name): value for name, value in gradients.items()})
            )
            weights = weights_of_parts(parts, alone, split, earlier(values))
            return None if weights is None else _of_weights(found, weights, len(batch.micro_batches))

        return self._on_rank_0(fitted)
