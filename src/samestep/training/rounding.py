"""Differences between the tensors of two trainings, and bounds on what rounding alone explains.

In float64, parameters are compared with a fixed tolerance, after subtracting what the rounding of gradients may have
changed (`Rounding`): AdamW moves an element whose gradient is nearly zero by a full step in the sign that rounding
gives it.

In float32 and bfloat16 there is no fixed tolerance, so rounding is measured. One process takes the same steps several
times, with the batch in other orders and in micro-batches. The distance of these runs from float64 is this job's
rounding error; a layout in the same precision may be a few times as far. How far AdamW may move each element is
computed from the gradients' measured rounding (`GradientNoise`) and subtracted first, on both sides.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from samestep.parallel.complex_parameters import as_real


def relative_tensors(tensor: Tensor, reference: Tensor, floor: float, rounding: Tensor | None = None) -> float:
    """max|mine - theirs| / max(max|theirs|, floor), after subtracting `rounding`, the allowance of each element."""
    if tensor.shape != reference.shape:
        return math.inf
    if tensor.numel() == 0:
        return 0.0
    scale = max(reference.abs().max().item(), floor)
    differences = (tensor - reference).abs()
    apart = (differences if rounding is None else (differences - rounding).clamp(min=0)).max().item()
    return _or_infinity(apart / scale if apart and scale else apart)


def difference(value: Any, reference: Any) -> float:
    """The largest relative difference between two nests of numbers; infinite where their shapes differ.

    The thresholds of a curve are left out: they are predictions, rounded to float32 so that equal ones stay
    equal, and a difference in the sixteenth digit may round to another float32.
    """
    if isinstance(reference, Mapping):
        if not isinstance(value, Mapping) or value.keys() != reference.keys():
            return math.inf
        return largest(difference(value[name], reference[name]) for name in reference if name != "thresholds")
    if isinstance(reference, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(reference):
            return math.inf
        return largest(difference(a, b) for a, b in zip(value, reference, strict=True))
    if isinstance(reference, (int, float)) and isinstance(value, (int, float)):
        if (math.isnan(reference) and math.isnan(value)) or value == reference:
            return 0.0  # undefined or infinite for both, such as the recall of a class without samples
        return relative(float(value), float(reference))
    return 0.0 if value == reference else math.inf


def pairs(values: Sequence[float], reference: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Zip two sequences; yield a pair of NaN first where their lengths differ."""
    if len(values) != len(reference):
        yield math.nan, math.nan
    yield from zip(values, reference, strict=False)


def relative(value: float, reference: float) -> float:
    """|mine - theirs| / |theirs|; infinite where one is not a number."""
    apart = abs(value - reference)
    return _or_infinity(apart / abs(reference) if apart and reference else apart)


def _or_infinity(value: float) -> float:
    """Replace NaN by infinity, so that no comparison with a tolerance passes it."""
    return math.inf if math.isnan(value) else value


def largest(values: Iterator[float] | Any) -> float:
    """The largest difference; 0 if there are none."""
    return max(values, default=0.0)


# Assumed rounding error of a gradient element relative to the global gradient norm: 4 eps of float64. In models with
# batch norm, another order of the samples changed the biases before it by a thirtieth of what this allows.
_ROUNDING = 4 * 2.0**-52


class Rounding:
    """Accumulates, over steps, how far the rounding of gradients may move each element of each parameter."""

    def __init__(self) -> None:
        self._steps = 0
        self._largest: dict[str, Tensor] = {}  # largest |gradient| of each element so far
        self.moves: dict[str, Tensor] = {}

    def add(
        self, gradients: Iterable[tuple[str, Tensor]], norm: float, settings: Mapping[str, tuple[float, float]]
    ) -> None:
        """Add a step's gradients and their norm, both as the optimizer saw them.

        `settings`: learning rate and eps by parameter; parameters without an entry have an optimizer that does not
        divide by the gradient's size.

        AdamW divides by the root of a mean of squares, to which each of n steps contributes about its square / n.
        """
        self._steps += 1
        for name, gradient in gradients:
            if name not in settings:
                continue
            lr, eps = settings[name]
            size = as_real(gradient).abs()
            largest = torch.maximum(self._largest.get(name, torch.zeros_like(size)), size)
            move = lr * _ROUNDING * norm / (largest / self._steps**0.5 + eps)
            self._largest[name] = largest
            self.moves[name] = self.moves.get(name, torch.zeros_like(move)) + move


# Tolerance, in multiples of the measured rounding. No correct layout of the tests used more than a fifth of it.
_TIMES = 20.0
_HALF_STEP = 2.0**-24  # unit roundoff of float32
_TIMES_MOVED = 4.0  # the same for a gradient's measured rounding, from which moves are computed

Settings = Mapping[str, tuple[float, float]]  # learning rate and eps by parameter


def state_name(parameter: str, key: str) -> str:
    """The name under which a tensor of a parameter's optimizer state is compared."""
    return f"{parameter} ({key})"


@dataclass(frozen=True, kw_only=True)
class RoundingFound:
    """Distance of a layout's tensors from those in float64, as a share of what the measured rounding allows."""

    parameters: float  # the largest share over all parameters; 1 is the limit
    worst_parameter: str
    optimizer_state: float | None  # None: the engine's state can't be read
    worst_state: str
    update: float | None = None  # see `update_rule`; None: no rule, or the state can't be read
    worst_update: str = ""

    @property
    def same(self) -> bool:
        """Whether all that was compared is within what rounding allows."""
        judged = (self.parameters, self.optimizer_state, self.update)
        return all(share < 1 for share in judged if share is not None)

    def words(self) -> str:
        """Describe, in one line, the share of the allowed rounding that each quantity uses."""
        state = (
            "the optimizer's state can't be read of this engine"
            if self.optimizer_state is None
            else f"the optimizer's state {self.optimizer_state:.2g} ({self.worst_state})"
        )
        update = (
            ""
            if self.update is None
            else f"; of the rounding of the optimizer's rule the update has {self.update:.2g} ({self.worst_update})"
        )
        return (
            f"of the measured rounding that is allowed, the parameters have {self.parameters:.2g} "
            f"({self.worst_parameter}), {state}{update}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same, "words": self.words()}


def worst_of(ranks: Sequence[RoundingFound]) -> RoundingFound | None:
    """The worst parameters, optimizer state and update over several ranks; None for an empty sequence."""
    if not ranks:
        return None
    parameters = max(ranks, key=lambda rank: rank.parameters)
    state = max(ranks, key=lambda rank: rank.optimizer_state or 0.0)
    update = max(ranks, key=lambda rank: rank.update or 0.0)
    return replace(
        parameters,
        optimizer_state=state.optimizer_state,
        worst_state=state.worst_state,
        update=update.update,
        worst_update=update.worst_update,
    )


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """The rounding allowed for each tensor, as measured in one process."""

    typical: Mapping[str, float]  # by tensor: root mean square rounding error of an element
    moves: Path  # safetensors, by parameter: what is subtracted from each element's difference
    steps: float = 0.0  # largest relative difference of a step's loss or gradient norm


@dataclass(kw_only=True)
class GradientFiles:
    """Files with the float64 gradients as the optimizer saw them, one file per step."""

    folder: Path
    steps: int = 0
    settings: list[Settings] = field(default_factory=list)

    def add(self, gradients: Iterable[tuple[str, Tensor]], settings: Settings) -> None:
        """Write the gradients of the next step, and keep its learning rates and eps."""
        save_file(
            {name: as_real(gradient).cpu().contiguous() for name, gradient in gradients}, self._file(self.steps)
        )
        self.settings.append(settings)
        self.steps += 1

    def of(self, step: int) -> dict[str, Tensor]:
        """Read a step's gradients by parameter; complex ones are pairs of real numbers."""
        return load_file(self._file(step))

    def _file(self, step: int) -> Path:
        return self.folder / f"gradients-{step}.safetensors"


class GradientNoise:
    """Elementwise largest difference between float32 and float64 gradients of each step, over the float32 runs."""

    def __init__(self, files: GradientFiles) -> None:
        self._files = files
        self._largest: list[dict[str, Tensor]] = [{} for _ in range(files.steps)]  # by step and parameter

    def add(self, step: int, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Compare a step's float32 gradients with the float64 ones; keep the largest difference of each element."""
        exact = self._files.of(step)
        for name, gradient in gradients:
            rounded = as_real(gradient).cpu().double()
            apart = (rounded - exact.get(name, torch.zeros_like(rounded))).abs()
            before = self._largest[step].get(name)
            self._largest[step][name] = apart if before is None else torch.maximum(before, apart)

    def moves(self) -> dict[str, Tensor]:
        """Bound how far the rounding of gradients may move each element under an optimizer such as AdamW.

        An element whose gradient is zero in every run has no rounding, and does not move. AdamW divides by the root
        of a mean of squares, to which each of the n steps so far contributes about its square / n.
        """
        moves: dict[str, Tensor] = {}
        largest: dict[str, Tensor] = {}
        for step, noise in enumerate(self._largest):
            exact = self._files.of(step)
            for name, (lr, eps) in self._files.settings[step].items():
                if name not in exact or name not in noise:
                    continue
                apart = noise[name]
                size = torch.maximum(largest.get(name, torch.zeros_like(apart)), exact[name].abs())
                largest[name] = size
                typical = torch.full_like(apart, _root_mean_square(apart))
                rounded = torch.where((apart == 0) & (size == 0), apart, torch.maximum(apart, typical))
                move = lr * _TIMES_MOVED * rounded / (size / (step + 1) ** 0.5 + eps)
                moves[name] = moves.get(name, torch.zeros_like(move)) + move.clamp(max=2 * lr)
        return moves


def measure(
    exact: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    runs: Sequence[Mapping[str, Tensor]],
    moves: Mapping[str, Tensor],
) -> dict[str, float]:
    """The root mean square rounding error of an element, by tensor: the largest over the runs.

    In a tensor of few elements the measured error may be small by chance. So each tensor is allowed at least the
    median tensor's error relative to its update, and the unit roundoff of float32. `before`: the parameters before
    the first step.
    """
    typical: dict[str, float] = {}
    updates: dict[str, float] = {}
    for name, value in exact.items():
        value = as_real(value).double()
        apart = [_beyond(as_real(run[name]).double() - value, moves.get(name)) for run in runs]
        typical[name] = max(_root_mean_square(error) for error in apart)
        start = as_real(before[name]).double() if name in before else torch.zeros_like(value)
        updates[name] = _root_mean_square(value - start)
    usual = median([typical[name] / updates[name] for name in typical if updates[name]] or [0.0])
    return {
        name: max(error, usual * updates[name], _HALF_STEP * _root_mean_square(as_real(exact[name])))
        for name, error in typical.items()
    }


def share_of_rounding(tensor: Tensor, reference: Tensor, move: Tensor | None, typical: float) -> float:
    """Distance of a tensor from its float64 reference as a share of the allowed rounding: below 1 is accepted."""
    if tensor.shape != reference.shape:
        return math.inf
    apart = _root_mean_square(_beyond(tensor.double() - reference, move))
    if math.isnan(apart):
        return math.inf
    return apart / (_TIMES * typical) if typical else (math.inf if apart else 0.0)


def largest_named(differences: Iterator[tuple[str, float]]) -> tuple[str, float]:
    """The name and the value of the largest difference; ("", 0) if there are none."""
    return max(differences, key=lambda named: named[1], default=("", 0.0))


def _beyond(difference: Tensor, move: Tensor | None) -> Tensor:
    """Subtract from each element's difference the move that rounding explains."""
    return difference if move is None else (difference.abs() - move.to(difference)).clamp(min=0)


def _root_mean_square(values: Tensor) -> float:
    """The root mean square of a tensor's elements, in float64; 0 for an empty tensor."""
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0
