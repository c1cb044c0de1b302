"""Compares the tensors that a rank holds with those of one process, which rank 0 has in files.

A rank holds some of the parameters whole, or after a gather all of them; one process's are sent to it one at a time.
So a proof takes the memory of one tensor more, on hosts that share no files too.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from samestep.engines.base import Trainer
from samestep.parallel.complex_parameters import as_real
from samestep.training.nonfinite_values import NonFiniteValue, first_parameter
from samestep.training.rounding import (
    RoundingFound,
    largest_named,
    relative_tensors,
    share_of_rounding,
    state_name,
)
from samestep.verification.noise import of_buffer
from samestep.verification.steps import AVERAGE, Reference

# Relative difference of a tensor in float64. Sums in another order differ by some 1e-15, a planted mistake by 2e-6 at
# least; in between lies what a deep model makes of rounding, which `noise` measures where it is more than this.
TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Comparison of a rank's parameters with one process's."""

    worst: float  # the largest relative difference
    where: str  # the parameter with it
    floor: float  # the root mean square of all parameters
    nonfinite: NonFiniteValue | None  # the first parameter that is not finite
    beyond: Mapping[str, float]  # the tensors that differ by the fixed tolerance of float64 or more


def compare_parameters(
    named: Sequence[tuple[str, Tensor]], expected_run: Reference | None, device: torch.device, rounding_is_known: bool
) -> Compared:
    """Compare this rank's parameters `named` with the reference, which rank 0 has. Collective.

    A parameter's difference is max|a - b| / max(max|b|, root mean square of all parameters). The floor is for
    parameters whose true gradient is zero, such as the biases of attention's keys: they start at zero, and all that
    moves them is rounding. If AdamW amplifies that beyond the tolerance (see `Rounding`), the rounding is subtracted.
    """
    reference = load_file(expected_run.parameters) if expected_run is not None else None
    moves = (
        load_file(expected_run.rounding) if expected_run is not None and expected_run.rounding is not None else None
    )
    floor = root_mean_square(parameter for _, parameter in named)
    worst, where, nonfinite = 0.0, named[0][0], None
    beyond: dict[str, float] = {}
    for name, value in named:
        value = as_real(value).to(device)  # offloaded ones are in the host's memory
        expected = from_rank_0(_in(reference, name), value, device)
        apart = relative_tensors(value, expected, floor)
        if rounding_is_known and TOLERANCE <= _on_any_rank(apart, device) < math.inf:
            apart = relative_tensors(
                value, expected, floor, rounding=from_rank_0(_in(moves, name.removesuffix(AVERAGE)), value, device)
            )
        if apart >= TOLERANCE:
            beyond[name] = apart
        if apart > worst:
            worst, where = apart, name
        nonfinite = nonfinite or first_parameter("", 0, {name: value})
    return Compared(worst=worst, where=where, floor=floor, nonfinite=nonfinite, beyond=beyond)


def compare_buffers(trainer: Trainer, expected: Reference, compared: Compared) -> Compared:
    """Compare in the same way the buffers that the reference's steps have changed, such as running statistics.

    A running mean may average numbers that cancel out, and then it is rounding too: it has the parameters' floor. It
    follows a bias before it, whose movement by rounding is subtracted.
    """
    state = trainer.state()
    for name, theirs in expected.buffers.items():
        value, theirs = as_real(state[name]).double(), as_real(theirs).double()
        apart = relative_tensors(value, theirs, compared.floor)
        if TOLERANCE <= apart < math.inf:
            rounding = torch.full_like(theirs, expected.most_rounding)
            apart = relative_tensors(value, theirs, compared.floor, rounding=rounding)
        if apart >= TOLERANCE:
            compared = replace(compared, beyond={**compared.beyond, of_buffer(name): apart})
        if apart > compared.worst:
            compared = replace(compared, worst=apart, where=of_buffer(name))
    return compared


def shares_of_rounding(
    trainer: Trainer,
    weights: Sequence[tuple[str, Tensor]],
    expected: Reference,
    reference: Reference | None,
    device: torch.device,
) -> RoundingFound:
    """Compare parameters and optimizer state with the measured rounding."""
    assert expected.allowed is not None
    typical = expected.allowed.typical
    values = load_file(reference.parameters) if reference is not None else None
    moves = load_file(expected.allowed.moves) if reference is not None else None

    def compared(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, float]]:
        """Yield each parameter's difference as a share of the measured rounding."""
        for name, tensor in tensors:
            tensor = as_real(tensor).to(device)
            theirs = from_rank_0(_in(values, name), tensor, device)
            move = from_rank_0(_in(moves, name), tensor, device)
            yield name, share_of_rounding(tensor, theirs, move, typical.get(name, 0.0))

    worst_parameter, parameters = largest_named(compared(weights))
    state = [
        (state_name(name, key), value)
        for name, key, value in (trainer.optimizer_state(expected.state_keys) if expected.state_keys else ())
        if state_name(name, key) in typical
    ]
    worst_state, of_state = largest_named(compared(state))
    return RoundingFound(
        parameters=parameters,
        worst_parameter=worst_parameter,
        optimizer_state=of_state if state else None,
        worst_state=worst_state,
    )


def _in(tensors: Mapping[str, Tensor] | None, name: str) -> Tensor | None:
    return None if tensors is None else tensors.get(name)


def from_rank_0(value: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
    """Broadcast a tensor from rank 0, in float64; zeros shaped as `like` if rank 0 has None. Collective."""
    zeros = torch.zeros(like.shape, dtype=torch.float64, device=device)
    values = zeros if value is None else value.double().to(device, copy=True).contiguous()
    dist.broadcast(values, src=0)
    return values


def _on_any_rank(value: float, device: torch.device) -> float:
    """Return the largest value over all ranks. Collective."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """The root mean square of all numbers of some tensors; 0 if there are none."""
    squares = numbers = 0.0
    for tensor in tensors:
        squares += as_real(tensor).square().sum().item()
        numbers += as_real(tensor).numel()
    return math.sqrt(squares / numbers) if numbers else 0.0
