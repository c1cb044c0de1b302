"""Finds the first module at which a proof's steps depart, with the recorder of script proofs.

A failed proof is repeated on both sides: in each forward of a step every module's output is recorded as two numbers
for each sample, and after it the parameters and the optimizer's averages of gradients. They are compared in the order
of computation: the forward, the gradients, the update.
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
class Departure:
    """The first difference between a layout's steps and those of one process."""

    step: int  # from 1
    what: str  # forward, loss, gradient, parameters
    module: str | None  # or parameter; None: all of them, or unknown
    relative: float

    def words(self) -> str:
        """Describe the departure in one line."""
        where = f" of {self.module}" if self.module else ""
        return f"first difference: step {self.step}, {self.what}{where} (relative {self.relative:.2g})"


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Records of the reference's steps."""

    folder: Path  # with a file of tensors for each step
    losses: Sequence[float]
    forwards: Sequence[Sequence[Mapping[str, Any]]]  # by step


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
    forwards: list[list[dict[str, Any]]] = []
    with join(alone=True, device=alone.device, threads=alone.threads) as world:
        training = Training(replace(job, recipe=recipe, run=alone), task, world, Layout())
        with _watched() as watch:

            def after(_: StepReport) -> None:
                """After each step: save its gradients and weights to a file, and its forwards to the list."""
                tensors = dict(_tensors(training.session.trainer))
                save({name: value.cpu().clone() for name, value in tensors.items()}, _file(folder, len(forwards)))
                forwards.append(watch.forwards)
                watch.forwards = []

            taken = take(training, min(steps, _MOST_STEPS), "where it departs: one process", after)
    return Looked(folder=folder, losses=taken.losses, forwards=forwards)


def find(job: Job, task: Task, world: World, layout: Layout, steps: int, known: Looked | None) -> Departure | None:
    """Take the same steps on this rank under a layout, and find where they first depart; rank 0 has `known`.

    None if they don't depart in the compared steps. Every rank returns the same.
    """
    training = Training(job, task, world, layout)
    comparison = _Comparison(training=training, known=known, world=world, precision=job.recipe.precision)
    with _watched() as watch:
        comparison.watch = watch
        take(training, min(steps, _MOST_STEPS), f"where it departs: {layout}", comparison.after)
    return comparison.found


class _Comparison:
    """Compares each step of a layout with the reference, until one departs."""

    def __init__(self, *, training: Training, known: Looked | None, world: World, precision: str) -> None:
        self.watch = _Watch()
        self.found: Departure | None = None
        self._training = training
        self._known = known
        self._world = world
        self._limit = _LIMITS[precision]
        self._exact = precision == "fp64"
        self._step = 0

    def after(self, report: StepReport) -> None:
        """After each step, until a departure is found: compare forwards, then gradients and weights."""
        forwards, self.watch.forwards = self.watch.forwards, []
        if self.found is None:
            self.found = self._forward(forwards, report.loss.item()) or self._update()
        self._step += 1

    def _forward(self, forwards: Sequence[Mapping[str, Any]], loss: float) -> Departure | None:
        """Compare the forwards of all ranks on rank 0, and broadcast the result."""
        everyone: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(everyone, forwards)
        answer: list[Any] = [None]
        if self._known is not None:
            answer = [self._first_module(self._known, [each for mine in everyone for each in mine], loss)]
        dist.broadcast_object_list(answer)
        return answer[0]

    def _first_module(self, known: Looked, split: Sequence[Mapping[str, Any]], loss: float) -> Departure | None:
        """Return the first module whose output differs for the same rows, else a differing loss."""
        alone = known.forwards[self._step]
        module = _module_apart(alone, split, eps=self._limit / 100)
        if module is not None:
            return self._departure("forward", module.module or None, module.relative)
        apart = relative(loss, known.losses[self._step])
        return self._departure("loss", None, apart) if not apart <= self._limit else None

    def _update(self) -> Departure | None:
        """Return the first gradient or weight that differs, in the order of the model."""
        values = load_file(_file(self._known.folder, self._step)) if self._known is not None else {}
        named = {name: value.cpu() for name, value in _tensors(self._training.session.trainer)}
        gradients = {name: value for name, value in named.items() if name.endswith(")")}
        found = self._departing("gradient", gradients, values, self._limit)
        if found is None and self._exact:
            weights = {name: value for name, value in named.items() if name not in gradients}
            found = self._departing("parameters", weights, values, _PARAMETERS_LIMIT)
        return found

    def _departing(
        self, what: str, mine: Mapping[str, Tensor], values: Mapping[str, Tensor], limit: float
    ) -> Departure | None:
        """Compare tensors that every rank holds whole, each with the reference; the largest difference counts."""
        floor = _usual(mine.values())
        apart = {}
        for name, value in mine.items():
            theirs = values.get(name, torch.zeros_like(value, dtype=torch.float64)).to(self._world.device)
            dist.broadcast(theirs, src=0)
            apart[name] = relative_tensors(value.double(), theirs.cpu(), floor)
        everyone: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(everyone, apart)
        most = {name: max(each[name] for each in everyone) for name in apart}
        names = [name for name, value in most.items() if not value <= limit]
        if not names:
            return None
        module = common_module([name.partition(" (")[0] for name in names])
        worst = max(most[name] for name in names)
        return self._departure(what, module if len(names) < len(most) else None, worst)

    def _departure(self, what: str, module: str | None, apart: float) -> Departure:
        return Departure(step=self._step + 1, what=what, module=module, relative=apart)


def _module_apart(
    alone: Sequence[Mapping[str, Any]], split: Sequence[Mapping[str, Any]], *, eps: float
) -> ModuleDifference | None:
    inputs = [set(forward["rows"]) for forward in (*alone, *split)]
    shared = sorted(set.intersection(*inputs)) if alone and split else []
    if not shared:
        return None
    mine, theirs = ([RankStep(folder=Path(), values={"forwards": list(each)})] for each in (alone, split))
    return first_module_apart(mine, theirs, Keys(alone=shared, split=shared), eps=eps)


def _tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, and the optimizer's averages of its gradients where they can be read."""
    yield from ((name, as_real(value)) for name, value in trainer.parameters())
    yield from ((state_name(name, key), as_real(value)) for name, key, value in trainer.optimizer_state(_GRADIENTS))


def _usual(tensors: Iterable[Tensor]) -> float:
    """Return the root mean square of all numbers."""
    squares = numbers = 0.0
    for each in tensors:
        squares += each.double().square().sum().item()
        numbers += each.numel()
    return math.sqrt(squares / numbers) if numbers else 0.0


def _file(folder: Path, step: int) -> Path:
    return folder / f"looked-{step}.safetensors"
