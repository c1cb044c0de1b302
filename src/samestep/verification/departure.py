"""Finds where a proof's steps first depart and what that looks like, by the records and kinds of script proofs.

A failed proof is repeated on both sides: in each forward of a step every module's output is recorded as two numbers
for each sample, and after it the parameters and the optimizer's averages of gradients. They are compared in the order
of computation: the initial weights, the samples, the forward and the gradients, the update.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.base import Checkpointed, StepReport, Trainer
from samestep.engines.native.trainer import NativeTrainer
from samestep.job import Job, Run
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.state_shards import OPTIMIZER, innermost
from samestep.recipe import SGD, Recipe
from samestep.recording.activations import Activations
from samestep.recording.calls import ModelCalls, listen_to_modules
from samestep.recording.differences import RoundingLimits, TensorDifference, common_module, tensor_difference
from samestep.recording.forward import Keys, first_module_apart, rows_of_forward
from samestep.recording.record import RankStep, Row
from samestep.recording.samples import rows_of
from samestep.script_proof.gradients import StepPair, gradient_finding
from samestep.script_proof.kinds import Finding
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.rounding import relative
from samestep.verification.noise import A_BUFFER
from samestep.verification.parts import PartWeights, gathered, parts_of, weights_of_parts
from samestep.verification.steps import save, take

# Optimizer state that accumulates gradients: after the first step it is a multiple of the gradient.
_GRADIENTS = ("exp_avg", "momentum_buffer")
_MOST_STEPS = 10  # steps compared at most
# Relative to a tensor's norm. In all correct layouts of the tests, gradients stay below these limits. Under AdamW
# rounding may move a number by a whole step, so parameters are compared only in float64, with a wider limit.
_LIMITS = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2}
_PARAMETERS_LIMIT = 1e-6
_INITIAL_LIMIT = 1e-7  # of weights that were drawn alike; an engine may hold them in float32
_SETTINGS_LIMIT = 1e-9
_UNEXPLAINED = ("gradients-differ", "lost-micro-batches")


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
                gradients = _gradients(recipe, trainer, before, weights)
                save({**weights, **_saved_gradients(gradients)}, _file(folder, len(forwards)))
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
        self._before: dict[str, Tensor] = {}  # weights
        self._gradients_before: Mapping[str, Tensor] = {}

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
        tensors = self._differences(gradients, _read_gradients(self._reference(self._step)))
        parts = len(batch.micro_batches)
        pair = StepPair(
            number=self._step,
            alone=[_rank_step(alone, told[0].loss, 1)],
            split=[_rank_step(each, told[1].loss, parts) for each in ranks],
            tensors=tensors,
            limits=RoundingLimits(common=self._limit, own={}),
            forward_eps=self._limit / 100,
        )
        keys = _keys(alone, [forward for each in ranks for forward in each])
        finding: Finding | None = self._on_rank_0(lambda: gradient_finding(pair, keys) or _forward(pair, keys))
        if finding is not None and finding.kind in _UNEXPLAINED:
            by_parts = self._by_parts(finding, batch, gradients) if self._replicated else None
            # Small gradients alone don't tell that micro-batches are lost: the parts do.
            plain = replace(finding, kind="gradients-differ")
            finding = by_parts or self._on_rank_0(lambda: _forward(pair, keys)) or plain
        self._gradients_before = gradients
        return finding

    def _by_parts(self, finding: Finding, batch: StepBatch, gradients: Mapping[str, Tensor]) -> Finding | None:
        """Explain gradients by the weights that the samples of each rank and micro-batch have in them."""
        names = [name for name in self._before if name in gradients]
        parts = gathered(parts_of(self._recipe, self._task, self._before, names, batch, self._world.device))
        if not parts:
            return None

        def fitted() -> Finding | None:
            known = _read_gradients(self._reference(self._step))
            others = [_joined(each, names) for each in (self._gradients_before, self._before) if each]
            weights = weights_of_parts(parts, _joined(known, names), _joined(gradients, names), others)
            return None if weights is None else _of_weights(finding, weights)

        return self._on_rank_0(fitted)

    def _update(self, weights: Mapping[str, Tensor]) -> Finding | None:
        """Compare the weights after a step of equal gradients, in float64: AdamW makes whole steps of rounding."""
        if not self._exact:
            return None
        tensors = self._differences(weights, self._reference(self._step))
        limits = RoundingLimits(common=_PARAMETERS_LIMIT, own={})
        known = bool(self._gradients_before)  # else nothing is known of the gradients, and so of the update
        kind, apart = "ranks-differ", [each for each in tensors if limits.ranks_exceeded(each)]
        if not apart or not known:
            kind, apart = "update-differs", [each for each in tensors if limits.exceeded(each)]
        if not apart:
            return None
        worst = max(max(each.apart, each.ranks_apart) for each in apart)
        module = common_module([each.name for each in apart]) if len(apart) < len(tensors) else None
        kind = kind if known else "weights-differ"
        return Finding(kind=kind, step=self._step + 1, what="parameters", relative=worst, module=module)

    def _loss(self, told: tuple[_Report, _Report]) -> Finding | None:
        apart = relative(told[1].loss, told[0].loss)
        if apart <= self._limit:
            return None
        return Finding(kind="loss-differs", step=self._step + 1, what="loss", relative=apart)

    def _differences(self, mine: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> list[TensorDifference]:
        """Compare tensors that every rank holds whole with those of one process, which rank 0 has. Collective."""
        usual = self._on_rank_0(lambda: _usual(known.values()))
        tensors = []
        for name, value in mine.items():
            theirs = self._from_rank_0(known.get(name, torch.zeros_like(value, dtype=torch.float64)))
            first = self._from_rank_0(value.double())
            tensors.append(
                tensor_difference(name, theirs, value.double(), usual=usual, copies=(first, value.double()))
            )
        return [_of_all_ranks(ranks) for ranks in zip(*self._of_ranks(tensors), strict=True)]

    def _from_rank_0(self, value: Tensor) -> Tensor:
        value = value.double().to(self._world.device, copy=True).contiguous()
        dist.broadcast(value, src=0)
        return value.cpu()


def _of_all_ranks(ranks: Sequence[TensorDifference]) -> TensorDifference:
    """One difference of those that ranks see of a tensor: the largest; missing where it is 0 on every rank."""
    worst = max(ranks, key=lambda each: each.apart)
    worst = replace(worst, ranks_apart=max(each.ranks_apart for each in ranks))
    missing = worst.square > 0 and all(each.split_square == 0 for each in ranks)
    return replace(worst, missing=True, apart=math.inf) if missing else worst


def _samples(step: int, alone: Sequence[Mapping[str, Any]], ranks: Sequence[tuple[Any, bool]]) -> Finding | None:
    """Compare the samples of a step: each of one process's must be on one rank, once."""
    if any(repeats for _, repeats in ranks):  # a rank without samples joins in with another's, at weight 0
        return None
    keys = _keys(alone, [forward for forwards, _ in ranks for forward in forwards])
    if keys is None:
        return None
    known = Counter(row for forward in alone for row in rows_of_forward(forward, keys.alone))
    of_ranks = [
        Counter(row for each in forwards for row in rows_of_forward(each, keys.split)) for forwards, _ in ranks
    ]
    split = sum(of_ranks, Counter[Row]())
    if split == known or not all(of_ranks) or not {*split} <= {*known}:  # rounded inputs have other hashes
        return None
    repeated, lost = (split - known).total(), (known - split).total()
    shares = {"relative": (repeated + lost) / known.total(), "step": step, "what": "samples"}
    if all(each == of_ranks[0] for each in of_ranks):
        facts = {"samples": len(split), "rows": split.total()}
        return Finding(kind="same-samples", facts=facts, **shares)
    if repeated:
        return Finding(kind="padded-sampler", facts={"count": repeated}, **shares)
    return Finding(kind="lost-samples", facts={"count": lost}, **shares)


def _keys(alone: Sequence[Mapping[str, Any]], split: Sequence[Mapping[str, Any]]) -> Keys | None:
    """The inputs that all forwards have; None where there is none."""
    inputs = [set(forward["rows"]) for forward in (*alone, *split)]
    shared = sorted(set.intersection(*inputs)) if alone and split else []
    return Keys(alone=shared, split=shared) if shared else None


def _rank_step(forwards: Sequence[Mapping[str, Any]], loss: float, parts: int) -> RankStep:
    """A step's record of one rank, with the step's loss in as many parts as it has micro-batches."""
    losses = [{"value": loss / parts, "targets": None, "after": number + 1} for number in range(parts)]
    values = {"forwards": [{"counts": {}, **each} for each in forwards], "losses": losses, "clips": []}
    return RankStep(folder=Path(), values=values)


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


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter, whole, in host memory."""
    return {name: as_real(value).detach().cpu().clone() for name, value in trainer.parameters()}


_GRADIENT = " (gradient)"


def _gradients(
    recipe: Recipe, trainer: Trainer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Multiples of the gradients by their parameters' names: the optimizer's averages, or plain SGD's updates.

    Empty for an optimizer of which neither is known.
    """
    averages = _averages(trainer)
    if averages or recipe.groups or not isinstance(recipe.optimizer, SGD):
        return averages
    return {name: before[name].double() - value.double() for name, value in after.items()}


def _averages(trainer: Trainer) -> dict[str, Tensor]:
    """The optimizer's averages of gradients, whole, as this rank holds them or, of other parts, the others do."""
    if not isinstance(trainer, Checkpointed):
        return {name: as_real(value).cpu().clone() for name, _, value in trainer.optimizer_state(_GRADIENTS)}
    pieces = {}
    for place, piece in trainer.pieces().items():
        name, _, key = place.removeprefix(OPTIMIZER).rpartition(".")
        if place.startswith(OPTIMIZER) and key in _GRADIENTS:
            boxes = [(box.offsets, as_real(box.values).detach().cpu().clone()) for box in piece.boxes]
            pieces[name] = tuple(piece.shape), boxes
    ranks: list[Mapping[str, Any]] = [pieces]
    if dist.is_initialized():
        ranks = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, pieces)
    wholes: dict[str, Tensor] = {}
    for of_rank in (*ranks, pieces):  # its own last: copies may differ
        for name, (shape, boxes) in of_rank.items():
            for offsets, values in boxes:
                if name not in wholes:
                    # As real numbers a complex tensor has one dimension more.
                    wholes[name] = torch.zeros((*shape, *values.shape[len(shape) :]), dtype=values.dtype)
                place = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=False))
                wholes[name][place] = values
    # In the order of the model, on every rank.
    return {name: wholes[name] for name, _ in trainer.parameters() if name in wholes}


def _saved_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}{_GRADIENT}": value for name, value in gradients.items()}


def _read_gradients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix(_GRADIENT): value for name, value in tensors.items() if name.endswith(_GRADIENT)}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().reshape(-1) for name in names])


def _usual(tensors: Iterable[Tensor]) -> float:
    """Return the root mean square of all numbers."""
    squares = numbers = 0.0
    for each in tensors:
        squares += each.double().square().sum().item()
        numbers += each.numel()
    return math.sqrt(squares / numbers) if numbers else 0.0


def _file(folder: Path, step: int) -> Path:
    """Of the tensors after a step; -1: before the first."""
    return folder / f"looked-{step}.safetensors"
