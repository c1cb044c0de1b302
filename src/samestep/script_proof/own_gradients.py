"""Gradients as each rank's own loss gives them, before anything is sent: what the reduced ones must be the mean of.

By them a split run is judged where no sample of it can be compared with one process, as with crops that each rank
draws: if the loss is as large as alone, gradients that are the mean of ranks' own are those of all samples together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.recording.differences import TensorDifference, common_module, tensor_difference, together
from samestep.recording.record import RunRecord
from samestep.script_proof.kinds import Finding

STEPS = 2  # the first ones, in which they are recorded
_MOST_NUMBERS = 1 << 24  # of a model's parameters together
_REST = 1e-4  # relative: rounding of a mean over ranks is far below


class OwnGradients:
    """Adds up what backwards give to the parameters of plain models, before hooks of wrappers send it."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self._heard: set[int] = set()

    def listen(self, module: nn.Module) -> None:
        """Hear the parameters of a model; of a sharded one, or a very large one, none."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        plain = all(type(parameter) is nn.Parameter for parameter in parameters)
        if not plain or sum(parameter.numel() for parameter in parameters) > _MOST_NUMBERS:
            return
        for parameter in parameters:
            if id(parameter) not in self._heard:
                self._heard.add(id(parameter))
                self._handles.append(parameter.register_hook(self._adding(id(parameter))))

    def _adding(self, key: int) -> Any:
        def add(gradient: Tensor) -> None:
            value = gradient.detach().double()
            self._sums[key] = value + self._sums[key] if key in self._sums else value.clone()

        return add

    def zeroed(self) -> None:
        self._sums.clear()

    def of(self, parameter: Tensor) -> Tensor | None:
        return self._sums.get(id(parameter))

    def stop(self) -> None:
        """Hear nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sums.clear()


@dataclass(frozen=True, kw_only=True)
class OwnJudgement:
    """Whether a run could be judged by ranks' own gradients, and what is wrong."""

    judged: bool
    finding: Finding | None = None


def judge_by_own(alone: RunRecord, split: RunRecord) -> OwnJudgement:
    """Hold the split run's gradients against the mean of what each rank's loss gives."""
    steps = min(STEPS, split.steps, alone.steps)
    loss = _loss_ratio(alone, split, steps)
    for number in range(steps):
        tensors = _tensors(split, number)
        if not tensors or loss is None:
            return OwnJudgement(judged=False)
        if (finding := _judged(split, number, tensors, loss)) is not None:
            return OwnJudgement(judged=True, finding=finding)
    return OwnJudgement(judged=steps > 0)


def _tensors(split: RunRecord, number: int) -> list[TensorDifference]:
    """Each gradient beside the mean of ranks' own; none where some rank's own isn't known."""
    tensors = []
    for name in split.tensor_names(number, "gradient"):
        gradient, own = split.joined(number, "gradient", name), split.joined(number, "own", name)
        if gradient is None or own is None or len(own.copies) < len(split.ranks):
            return []
        mean = torch.stack([*own.copies]).mean(dim=0)
        tensors.append(tensor_difference(name, mean, gradient.value, usual=mean.square().mean().sqrt().item()))
    return tensors


def _judged(split: RunRecord, number: int, tensors: Sequence[TensorDifference], loss: float) -> Finding | None:
    ranks = len(split.ranks)
    step = split.step(number)[0]
    ratio, rest = together(tensors)
    usual = _usual_ratio(step.clips, step.values.get("scale"))
    at = {"step": number + 1, "what": "gradient"}
    if rest > _REST:
        others = [tensor for tensor in tensors if abs(tensor.ratio / usual - 1) > _REST or tensor.rest > _REST]
        module = common_module([tensor.name for tensor in others]) if len(others) < len(tensors) else None
        facts = {"ratio": ratio / usual}
        return Finding(kind="reduced-otherwise", relative=rest, module=module, facts=facts, **at)
    times = _power(ratio / usual, ranks)
    if times is None:
        facts = {"ratio": ratio / usual}
        return Finding(kind="reduced-otherwise", relative=abs(ratio / usual - 1), facts=facts, **at)
    scale = times + loss
    if scale == 0:
        return None
    factor = float(ranks) ** scale
    kind = "summed" if scale > 0 else "divided-twice"
    return Finding(kind=kind, relative=abs(factor - 1), facts={"ratio": factor, "by": ranks}, **at)


def _usual_ratio(clips: Sequence[Any], scale: float | None) -> float:
    """What clipping and a scaler leave of a gradient."""
    ratio = 1 / scale if scale else 1.0
    for clip in clips:
        if clip["norm"] is not None:
            ratio *= clipped_by(clip["norm"], clip["limit"])
    return ratio


def clipped_by(norm: float, limit: float) -> float:
    """The factor by which `clip_grad_norm_` multiplies gradients of this norm."""
    return limit / (norm + 1e-6) if norm > limit else 1.0


def _power(ratio: float, base: int) -> int | None:
    """-1, 0 or 1, if the ratio is that power of the base."""
    return next((power for power in (-1, 0, 1) if abs(ratio / float(base) ** power - 1) < _REST), None)


def _loss_ratio(alone: RunRecord, split: RunRecord, steps: int) -> int | None:
    """How many times the losses of ranks are those of one process, as a power of the number of ranks."""
    means = [
        math.fsum(loss["value"] for number in range(steps) for step in run.step(number) for loss in step.losses)
        / len(run.ranks)
        for run in (alone, split)
    ]
    if not all(math.isfinite(mean) and mean > 0 for mean in means):
        return None
    power = math.log(means[1] / means[0]) / math.log(len(split.ranks))
    return round(power) if abs(power - round(power)) < _FAR and abs(round(power)) <= 1 else None


_FAR = 0.35  # of a power: losses of other samples are not quite the same
