"""Noise: how far rounding alone moves a model's steps, measured where a proof finds more than its fixed tolerance.

One process takes the steps again with the last bits of what it rounds changed (`last_bits`). Each tensor's tolerance
is a multiple of how far that moves it. A tolerance in which a mistake might hide is none: the proof then says that it
can't tell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from samestep.engines.base import Trainer
from samestep.engines.native.trainer import NativeTrainer
from samestep.job import Job
from samestep.launch.world import World, join
from samestep.layout import Layout
from samestep.parallel.complex_parameters import as_real
from samestep.progress import phases
from samestep.ranks import DeviceChoice
from samestep.recipe import Recipe
from samestep.tasks.base import Task
from samestep.training.fit import Training
from samestep.training.last_bits import LastBitsChanged
from samestep.training.rounding import difference, largest, pairs, relative, relative_tensors
from samestep.verification.steps import AVERAGE, Reference, buffers_of, in_one_process, take, weights_of

# Tolerance in multiples of the measured noise.
_TIMES = 20.0
# No tolerance above this: the smallest difference of a planted mistake was 2e-6.
_MOST = 1e-6
_BITS = (1, 2)  # which bit is changed, in each measurement
# Rounding may take a branch, such as another query's match, in some measurements and not in others. So where a
# quantity has noise and differs by more than that, it is measured up to as often as this.
_MOST_MEASUREMENTS = 8


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The largest relative differences that changed last bits make, as those of a proof."""

    quantities: Mapping[str, float]  # loss, grad_norm, metrics
    tensors: Mapping[str, float]  # parameters and buffers, by name

    def of(self, name: str) -> float:
        """The noise of a quantity or a tensor; at least the median's, as a small one may have little by chance."""
        if name in self.quantities:
            return self.quantities[name]
        return max(self.tensors.get(name, 0.0), median(self.tensors.values() or [0.0]))


@dataclass(frozen=True, kw_only=True)
class NoiseFound:
    """What of a layout's differences rounding explains."""

    verdict: Literal["rounding", "more than rounding", "can't tell"]
    where: str  # the quantity or tensor that decided
    difference: float
    noise: float
    steps: int

    def words(self) -> str:
        """Describe the measurement in one line."""
        measured = (
            f"changing the last bit of all that one process's steps round moves {self.where} by "
            f"{self.noise:.1e}; this layout moves it by {self.difference:.1e}"
        )
        if self.verdict == "rounding":
            return f"this model amplifies rounding: {measured}, which is rounding"
        if self.verdict == "more than rounding":
            return f"it is more than rounding: {measured}"
        fewer = "; with fewer --steps rounding is amplified less" if self.steps > 1 else ""
        return f"can't tell rounding from a mistake: {measured}, and a mistake might be as small{fewer}"


def judge(differences: Mapping[str, float], noise: Noise, fixed: float, steps: int) -> NoiseFound:
    """Hold differences, by quantity or tensor, against the noise. Those below the fixed tolerance are rounding."""
    above = {name: value for name, value in differences.items() if value >= fixed}

    def found(verdict: Literal["rounding", "more than rounding", "can't tell"], where: str) -> NoiseFound:
        return NoiseFound(verdict=verdict, where=where, difference=above[where], noise=noise.of(where), steps=steps)

    def share(name: str) -> float:
        return above[name] / max(fixed, _TIMES * noise.of(name))

    worst = max(above, key=share)
    if share(worst) >= 1:
        return found("more than rounding", worst)
    blunt = max(above, key=lambda name: noise.of(name))
    return found("can't tell" if _TIMES * noise.of(blunt) > _MOST else "rounding", blunt)


class NoiseMeasurement:
    """Measures a reference's noise when a proof first asks for it, and further where the proof needs that."""

    def __init__(self, job: Job, task: Task, steps: int, reference: Reference, device: DeviceChoice = "auto") -> None:
        """`device` as for `reference`; the steps are taken in this process."""
        self._job = in_one_process(job, device="cpu" if device == "cpu" else None)
        self._task, self._steps, self._known = task, steps, reference
        self._measured: list[Noise] = []

    def judge(self, differences: Mapping[str, float], fixed: float) -> NoiseFound:
        """Hold differences, by quantity or tensor, against the noise."""
        if not self._measured:
            self._measure(len(_BITS))
        judged = judge(differences, self._noise(), fixed, self._steps)
        while judged.verdict == "more than rounding" and judged.noise >= fixed:
            if len(self._measured) >= _MOST_MEASUREMENTS:
                break
            self._measure(1)
            judged = judge(differences, self._noise(), fixed, self._steps)
        return judged

    @phases.status(lambda: "measuring what rounding does to these steps")
    def _measure(self, times: int) -> None:
        """Take the reference's steps again, with other last bits changed."""
        run = self._job.run
        with join(alone=True, device=run.device, threads=run.threads) as world:
            for number in range(len(self._measured), len(self._measured) + times):
                changed = LastBitsChanged(_BITS[number % len(_BITS)], seed=number // len(_BITS))
                self._measured.append(_measured(self._job, self._task, world, self._steps, self._known, changed))

    def _noise(self) -> Noise:
        """The largest of all measurements."""
        first = self._measured[0]
        return Noise(
            quantities={name: max(noise.quantities[name] for noise in self._measured) for name in first.quantities},
            tensors={name: max(noise.tensors[name] for noise in self._measured) for name in first.tensors},
        )


def _measured(
    job: Job, task: Task, world: World, steps: int, reference: Reference, last_bits_changed: LastBitsChanged
) -> Noise:
    training = Training(job, task, world, Layout(), held_out=reference.held_out)
    trainer = training.session.trainer
    assert isinstance(trainer, NativeTrainer)
    with last_bits_changed:
        taken = take(training, steps, "with last bits changed")
    quantities = {
        "loss": largest(relative(a, b) for a, b in pairs(taken.losses, reference.losses)),
        "grad_norm": largest(relative(a, b) for a, b in pairs(taken.grad_norms, reference.grad_norms)),
        "metrics": difference(taken.metrics, reference.metrics),
    }
    return Noise(quantities=quantities, tensors=_of_tensors(trainer, job.recipe, reference))


def _of_tensors(trainer: Trainer, recipe: Recipe, reference: Reference) -> dict[str, float]:
    """The differences of parameters and changed buffers from the reference's, as a proof has them."""
    expected = load_file(reference.parameters)
    moves: Mapping[str, Any] = load_file(reference.rounding) if reference.rounding is not None else {}
    weights = {name: as_real(value).cpu() for name, value in weights_of(trainer, recipe)}
    floor = torch.cat([value.double().flatten() for value in weights.values()]).square().mean().sqrt().item()
    differences = {
        name: relative_tensors(here, expected[name], floor, moves.get(name.removesuffix(AVERAGE)))
        for name, here in weights.items()
    }
    buffers = buffers_of(trainer)
    for name, theirs in reference.buffers.items():
        here, theirs = as_real(buffers[name]).double().cpu(), as_real(theirs).double().cpu()
        rounding = torch.full_like(theirs, reference.most_rounding)
        differences[of_buffer(name)] = relative_tensors(here, theirs, floor, rounding)
    return differences


A_BUFFER = " (a buffer)"


def of_buffer(name: str) -> str:
    """The name under which a buffer is compared."""
    return f"{name}{A_BUFFER}"
