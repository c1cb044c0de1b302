"""Optimizer state in bf16 or in 8 bits: what Adam keeps of a matrix from step to step, with fewer digits.

A step is computed as ever: the averages of some parameters become numbers of the parameter's dtype, PyTorch's
optimizer steps, and the new averages are rounded. What a rank keeps of a matrix is then

    float32  4 (parameter) + 4 (gradient) + 8 (two averages) bytes a parameter
    bf16     4 + 4 + 4
    8bit     4 + 4 + 2, and 8 bytes for each block of 256 numbers

Biases and norms keep their averages as they are: they are few.

A second average with a beta of 0.999 changes by a thousandth of itself in a step, and bf16 has eight bits: rounded to
the nearest number it would stand still. So numbers are rounded up or down by chance, the nearer neighbour the more
often, and are right on average. Chance is a function of the count of steps and of a number's position in its
parameter (`exact/counter_rng.py`), so every layout rounds alike; a rank that holds a part of a parameter doesn't know
these positions, nor the blocks, and the parameter's owner steps the whole (`whole.py`).

8 bits: a block of 256 numbers is divided by its largest, and each becomes one of 256 numbers between -1 and 1, or 0
and 1, that lie closer the smaller they are (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization",
section 2; torchao and bitsandbytes have the same ones).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.parallel.exact.counter_rng import columns, draw, key_of, split
from samestep.parallel.optimizer.joined import loss_of
from samestep.parallel.optimizer.lots import Lot, lots
from samestep.parallel.sharding import local
from samestep.torch_internals.operators import DisableTorchFunction

BLOCK = 256  # numbers of a parameter, one after the other, that share a scale
_DECADES = 7  # of which the numbers of 8 bits are
_AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # of Adam's state, and whether it has a sign
_FEWEST_DIMENSIONS = 2  # of a parameter whose averages are rounded
_OF_16_BITS = 0xFFFF


class StateFormat(Protocol):
    """A storage format of Adam's averages."""

    def kept(self, values: Tensor, chance: Tensor, *, signed: bool) -> dict[str, Tensor]:
        """Encode values; the keys of the result are suffixes of the state's key.

        `chance`: uniform int32 numbers, one for each value, [values].
        """
        ...

    def values(self, kept: Mapping[str, Tensor], dtype: torch.dtype, *, signed: bool) -> Tensor:
        """Decode values into a dtype, in their original shape."""
        ...


class BFloat16:
    """bf16, with stochastic rounding."""

    def kept(self, values: Tensor, chance: Tensor, *, signed: bool) -> dict[str, Tensor]:
        """Round to bf16 stochastically, so that the expected value is exact; the shape is unchanged."""
        exact = values.to(torch.float32)
        # bf16 is the upper half of float32. Adding a random lower half carries into the upper half with a probability
        # proportional to the lower half.
        up = exact.view(torch.int32) + (chance.view(values.shape) & _OF_16_BITS)
        rounded = (up & ~_OF_16_BITS).view(torch.float32)
        return {"": torch.where(exact.isfinite(), rounded, exact).to(torch.bfloat16)}

    def values(self, kept: Mapping[str, Tensor], dtype: torch.dtype, *, signed: bool) -> Tensor:
        """Cast bf16 to `dtype`."""
        return kept[""].to(dtype)


class EightBits:
    """8-bit codes of a table of 256 numbers, times the largest magnitude of a block of values."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, torch.device], Tensor] = {}

    def kept(self, values: Tensor, chance: Tensor, *, signed: bool) -> dict[str, Tensor]:
        """Codes [values] in uint8 and scales [blocks] in float32, rounded at random to a neighbour.

        The last block is padded with zeros, whose codes are dropped.
        """
        exact = values.reshape(-1).to(torch.float32)
        empty = -exact.numel() % BLOCK
        blocks = nn.functional.pad(exact, (0, empty)).view(-1, BLOCK)
        chances = nn.functional.pad(chance.reshape(-1), (0, empty)).view(-1, BLOCK)
        scale = blocks.abs().amax(1)  # [blocks]
        relative = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        numbers = self._numbers(signed, values.device)
        lower = (torch.bucketize(relative, numbers, right=True) - 1).clamp_(0, len(numbers) - 2)
        below, above = numbers[lower], numbers[lower + 1]
        up = (relative - below) / (above - below) > ((chances >> 8) & 0xFFFFFF) * 2.0**-24
        codes = lower + up
        if not signed:
            # With a second average of zero and a first one that is not, a step would have no measure.
            codes = torch.where(relative > 0, codes.clamp(min=1), codes)
        return {
            "_codes": codes.to(torch.uint8).view(-1)[: exact.numel()].view(values.shape),
            "_scale": scale,
        }

    def values(self, kept: Mapping[str, Tensor], dtype: torch.dtype, *, signed: bool) -> Tensor:
        """Table of the codes times the scale of each block."""
        codes, scale = kept["_codes"], kept["_scale"]
        relative = self._numbers(signed, codes.device)[codes.reshape(-1).to(torch.int64)]
        scales = scale.repeat_interleave(BLOCK, output_size=BLOCK * scale.numel())[: codes.numel()]
        return (relative * scales).view(codes.shape).to(dtype)

    def _numbers(self, signed: bool, device: torch.device) -> Tensor:
        """The table of 256 numbers on a device, made once."""
        if (signed, device) not in self._known:
            numbers = torch.tensor(numbers_of_8_bits(signed=signed), dtype=torch.float32)
            self._known[signed, device] = numbers if device.type == "cpu" else numbers.pin_memory().to(device)
        return self._known[signed, device]


def numbers_of_8_bits(*, signed: bool) -> list[float]:
    """The 256 numbers, ascending: 0, 1, and in each decade twice as many as in the one below, equally far apart."""
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade if signed else decade + 1)
        for number in range(count):
            value = (0.1 + 0.9 * (number + 0.5) / count) * 10.0 ** (decade + 1 - _DECADES)
            numbers += [value, -value] if signed else [value]
    return sorted(numbers)


FORMATS: Mapping[str, Callable[[], StateFormat]] = {"bf16": BFloat16, "8bit": EightBits}


class RoundedState(Optimizer):
    """Steps parameters by Adam of the given kind, and keeps its averages of matrices in a format.

    `state` is what is kept: `step`, and of each average what the format makes of it.
    """

    def __init__(self, params: Iterable[Any], *, kind: Callable[..., Optimizer], state: str, **settings: Any) -> None:
        super().__init__(params, settings)
        self._format = FORMATS[state]()
        self._lots = [_lot_of(kind, settings, self.param_groups, lot) for lot in lots(self.param_groups)]
        for lot in self._lots:
            lot.complete(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for lot in self._lots:
            inner = lot.optimizer.state
            for parameter in lot.stepped:
                if parameter.grad is not None and parameter in self.state:
                    inner[parameter] = self._unpacked(parameter, self.state[parameter])
            lot.step(self.param_groups)
            for parameter, state in inner.items():
                self.state[parameter] = self._packed(parameter, state)
            inner.clear()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take state in the dtypes that it has, which PyTorch would change to the parameter's."""
        numbers = (parameter for group in self.param_groups for parameter in group["params"])
        fused = {p: bool(group.get("fused")) for group in self.param_groups for p in group["params"]}
        for number, parameter in enumerate(numbers):
            state = state_dict["state"].get(number)
            if state:
                there = local(parameter.detach()).device
                self.state[parameter] = {
                    key: value if key == "step" and not fused[parameter] else value.to(there)
                    for key, value in state.items()
                }

    def stepping(self) -> Iterator[Optimizer]:
        """The optimizers that compute the steps."""
        for lot in self._lots:
            yield lot.optimizer

    def _packed(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        if parameter.ndim < _FEWEST_DIMENSIONS:
            return dict(state)
        kept = {key: value for key, value in state.items() if key not in _AVERAGES}
        with DisableTorchFunction():  # proofs compute in float64 what others ask for in float32
            for average, signed in _AVERAGES.items():
                values = state[average]
                packed = self._format.kept(values, _chance(state["step"], average, values), signed=signed)
                kept |= {f"{average}{behind}": value for behind, value in packed.items()}
        return kept

    def _unpacked(self, parameter: Tensor, kept: Mapping[str, Any]) -> dict[str, Any]:
        if parameter.ndim < _FEWEST_DIMENSIONS:
            return dict(kept)
        state = {key: value for key, value in kept.items() if not key.startswith(tuple(_AVERAGES))}
        with DisableTorchFunction():
            for average, signed in _AVERAGES.items():
                packed = {
                    key.removeprefix(average): value
                    for key, value in kept.items()
                    if key.removeprefix(average) in ("", "_codes", "_scale")
                }
                state[average] = self._format.values(packed, parameter.dtype, signed=signed)
        return state


def _lot_of(
    kind: Callable[..., Optimizer],
    settings: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    lot: Mapping[int, Sequence[nn.Parameter]],
) -> Lot:
    return Lot(
        kind, settings, groups, lot, {parameter: parameter for of_group in lot.values() for parameter in of_group}
    )


def _chance(step: Tensor, average: str, values: Tensor) -> Tensor:
    """Uniform int32 numbers [values], as a function of the step, the average and each value's position."""
    key = split(step.reshape(1).to(torch.int64), key_of(average))
    if key.device != values.device:  # the step count is on the CPU, so reading it does not wait for a device
        key = torch.full([1], int(key.item()), dtype=torch.int64, device=values.device)
    row = values.shape[-1]
    rows = torch.arange(values.numel() // max(row, 1), device=values.device)
    return draw(key, [rows], columns(torch.arange(row, device=values.device))).reshape(-1)
