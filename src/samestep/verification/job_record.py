"""Records a job's steps like the recorder of scripts: forwards, losses, settings, and files of tensors.

The tensors of one process's steps are in files, and those of a layout's ranks in their memory: ranks may be on other
hosts, and each holds every tensor whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.loader import StepBatch
from samestep.engines.base import Checkpointed, StepReport, Trainer
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.state_shards import OPTIMIZER, innermost
from samestep.recipe import SGD, Recipe
from samestep.recording.activations import Activations
from samestep.recording.calls import ModelCalls, listen_to_modules
from samestep.recording.record import RankRecord, RankStep, RunRecord
from samestep.recording.samples import rows_of
from samestep.script_proof.updates import SETTINGS

# Optimizer state that accumulates gradients: after the first step it is a multiple of the gradient.
_AVERAGES = ("exp_avg", "momentum_buffer")


class Watch:
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

    def step(self, trainer: Trainer, batch: StepBatch, report: StepReport) -> RankStep:
        """Return the record of the step that was taken, with the step's loss in as many parts as micro-batches."""
        forwards, self.forwards = self.forwards, []
        parts = len(batch.micro_batches)
        losses = [
            {"value": report.loss.item() / parts, "targets": None, "after": number + 1} for number in range(parts)
        ]
        values = {
            "forwards": [{"counts": {}, **forward} for forward in forwards],
            "losses": losses,
            "clips": [],
            "groups": _groups(trainer, report.lr),
            "tensors": {},
        }
        return RankStep(folder=Path(), values=values)


@contextmanager
def watched() -> Iterator[Watch]:
    """Record every forward of a model within a block."""
    watch = Watch()
    end = listen_to_modules(watch.calls.called)
    try:
        yield watch
    finally:
        end()


def run_of(ranks: Sequence[Sequence[RankStep]]) -> RunRecord:
    """The record of a run whose ranks have taken these steps."""
    return RunRecord(
        ranks=[RankRecord(steps=steps, evaluations=(), gathered=(), loaded=(), end={}) for steps in ranks]
    )


def _groups(trainer: Trainer, lr: float) -> list[dict[str, Any]]:
    """Settings of each group of parameters in a step with the rate `lr`; that alone of an engine's own optimizer."""
    rate_alone = [{"names": [], "options": {"lr": lr}}]
    if not isinstance(trainer, NativeTrainer):
        return rate_alone
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = [
        {
            "names": [names.get(id(parameter), "") for parameter in group["params"]],
            # A schedule has set the groups' own rates for the next step already.
            "options": {**{name: value for name, value in group.items() if name in SETTINGS}, "lr": lr},
        }
        for optimizer in innermost(trainer.optimizer)
        for group in optimizer.param_groups
    ]
    return groups or rate_alone  # of a rank without a shard to step


def with_settings_of(split: RunRecord, alone: RunRecord) -> RunRecord:
    """Give the groups of a layout's optimizers the names of one process's: copies and shards have none.

    Of groups that are not those of one process, the rate alone is compared.
    """
    own_names = [group["names"] for group in alone.ranks[0].steps[0].values["groups"]]

    def named(step: RankStep) -> RankStep:
        groups = step.values["groups"]
        if len(groups) != len(own_names):
            groups = [{"names": own_names[0], "options": {"lr": groups[0]["options"]["lr"]}}]
        else:
            groups = [{**group, "names": names} for group, names in zip(groups, own_names, strict=True)]
        return RankStep(folder=step.folder, values={**step.values, "groups": groups})

    return run_of([[named(step) for step in rank.steps] for rank in split.ranks])


def weights_of_step(trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter, whole, in host memory."""
    return {name: as_real(value).detach().cpu().clone() for name, value in trainer.parameters()}


_GRADIENT = " (gradient)"


def gradients_of_step(
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
        return {name: as_real(value).cpu().clone() for name, _, value in trainer.optimizer_state(_AVERAGES)}
    pieces = {}
    for place, piece in trainer.pieces().items():
        name, _, key = place.removeprefix(OPTIMIZER).rpartition(".")
        if place.startswith(OPTIMIZER) and key in _AVERAGES:
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


def saved_gradients(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}{_GRADIENT}": value for name, value in gradients.items()}


def read_gradients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix(_GRADIENT): value for name, value in tensors.items() if name.endswith(_GRADIENT)}


def file_of_step(folder: Path, step: int) -> Path:
    """Of the tensors after a step; -1: before the first."""
    return folder / f"looked-{step}.safetensors"
