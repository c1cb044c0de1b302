"""Compares a layout's ordered steps with those of one process bit for bit, and times both."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.one_process import Tensors
from samestep.job import Job
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.state_shards import MODEL, OPTIMIZER
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.run_folder import name_of
from samestep.tasks.base import Task
from samestep.training.fit import Training

_WARM_UP = 2  # steps that are not timed: state and buffers are made in them


@dataclass(frozen=True, kw_only=True)
class BitsTaken:
    """Results of one side's steps; parameters and optimizer state are in the checkpoint."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    metrics: Sequence[Mapping[str, Any]]  # after the first step and after the last
    checkpoint: Path
    ordered_seconds: float  # of a step, the median
    fast_seconds: float


@dataclass(frozen=True, kw_only=True)
class BitsRow:
    """One layout compared with one process: what differs in its bits, and the step times of both kinds of sum."""

    layout: str
    steps: int = 0
    differs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what -> where, in words
    ordered_seconds: float | None = None  # of a step, the median
    fast_seconds: float | None = None
    reason: str | None = None  # why the layout was refused
    failure: str | None = None  # what went wrong in the ranks

    @property
    def same_bits(self) -> bool:
        return self.reason is None and self.failure is None and not any(self.differs.values())

    @property
    def passed(self) -> bool:
        """Whether the bits are the same, or the layout was refused."""
        return self.reason is not None or self.same_bits

    @property
    def verdict(self) -> str:
        """One of refused, failed, same bits, OTHER BITS."""
        if self.reason is not None:
            return "refused"
        if self.failure is not None:
            return "failed"
        return "same bits" if self.same_bits else "OTHER BITS"

    @property
    def cost(self) -> float | None:
        """Time of an ordered step / time of a fast step."""
        return self.ordered_seconds / self.fast_seconds if self.ordered_seconds and self.fast_seconds else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "same_bits": self.same_bits, "cost": self.cost, "verdict": self.verdict}


def take_bits(
    job: Job, task: Task, world: World, layout: Layout, steps: int, folder: Path, threads: int
) -> BitsTaken:
    """Take a job's first steps with ordered sums, save them into `folder`, and time fast steps with `threads`."""
    ordered = Training(job, task, world, layout)
    losses: list[float] = []
    grad_norms: list[float] = []
    metrics: list[dict[str, Any]] = []
    seconds: list[float] = []
    total = min(steps, ordered.total_steps)
    with Bar(f"verify --bits: {layout}", total, shown=ordered.session.is_main, unit="step") as bar:
        for loss, grad_norm, taken in _timed(ordered, steps):
            losses.append(loss)
            grad_norms.append(grad_norm)
            seconds.append(taken)
            bar.advance(told=f"loss {loss:.6g}")
            if len(losses) == 1:
                metrics.append(ordered.evaluate())
        metrics.append(ordered.evaluate(bar))
    ordered.session.save(folder, step=len(losses))
    ordered.session.close()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fast = Training(replace(job, run=replace(job.run, reduction="fast")), task, world, layout)
        with phases.phase("timing steps with sums in any order"):
            fast_seconds = [taken for *_, taken in _timed(fast, steps)]
    finally:
        torch.set_num_threads(before)
    return BitsTaken(
        losses=losses,
        grad_norms=grad_norms,
        metrics=metrics,
        checkpoint=folder / name_of(len(losses)),
        ordered_seconds=_typical(seconds),
        fast_seconds=_typical(fast_seconds),
    )


def _timed(training: Training, steps: int) -> Iterator[tuple[float, float, float]]:
    """Loss, gradient norm and seconds of each step."""
    taken = training.steps(stop=steps)
    while True:
        began = time.perf_counter()
        step = next(taken, None)
        if step is None:
            return
        loss, grad_norm = step[1].loss.item(), step[1].grad_norm.item()
        yield loss, grad_norm, time.perf_counter() - began


def _typical(seconds: Sequence[float]) -> float:
    return median(seconds[_WARM_UP:] or seconds)


def compare_bits(layout: str, split: BitsTaken, alone: BitsTaken) -> BitsRow:
    """Hold what a layout's steps gave against what one process's did. Both checkpoints are read tensor by tensor."""
    ours, whole = Tensors(split.checkpoint), Tensors(alone.checkpoint)
    names = sorted({*ours.entries, *whole.entries})
    return BitsRow(
        layout=layout,
        steps=len(alone.losses),
        differs={
            "losses": _numbers("step", split.losses, alone.losses),
            "gradient norms": _numbers("step", split.grad_norms, alone.grad_norms),
            "parameters": list(_tensors(ours, whole, [name for name in names if name.startswith(MODEL)])),
            "optimizer state": list(_tensors(ours, whole, [name for name in names if name.startswith(OPTIMIZER)])),
            "metrics": [
                f"after step {step}"
                for step, a, b in zip((1, len(alone.losses)), split.metrics, alone.metrics, strict=True)
                if repr(a) != repr(b)  # every digit, and NaN like NaN
            ],
        },
        ordered_seconds=split.ordered_seconds,
        fast_seconds=split.fast_seconds,
    )


def _numbers(of: str, split: Sequence[float], alone: Sequence[float]) -> list[str]:
    """Return the numbers whose bits differ; `hex` distinguishes 0.0 from -0.0."""
    if len(split) != len(alone):
        return [f"{len(split)} of {len(alone)} {of}s"]
    return [f"{of} {number}" for number, (a, b) in enumerate(zip(split, alone, strict=True)) if a.hex() != b.hex()]


def _tensors(ours: Tensors, whole: Tensors, names: Sequence[str]) -> Iterator[str]:
    """Which tensors differ, and in how many numbers."""
    for name in names:
        if name not in ours.entries or name not in whole.entries:
            yield f"{name} (on one side alone)"
            continue
        split, alone = ours.read(name), whole.read(name)
        if split.shape != alone.shape or split.dtype != alone.dtype:
            yield f"{name} (of another shape or type)"
        elif other := _other_bits(split, alone):
            yield f"{name} ({other} of {alone.numel()} numbers)"


def _other_bits(one: Tensor, other: Tensor) -> int:
    """Count the numbers whose bits differ."""
    a, b = (as_real(tensor).reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (one, other))
    return int((a != b).any(1).sum())
