"""Random numbers that a forward draws: torch.rand, Tensor.bernoulli_, torch.normal and their kin.

One process draws them in the order in which its forward asks. Ranks and micro-batches ask in another order, so each
function here is computed from uniform bits that depend on the sample and the place in the model alone (see
counter_rng.py). Stochastic depth, noise layers, variational samples and random time steps then take the
same numbers under every layout.

A draw belongs to the samples if they are its first dimension, and to the step if it is one number of no dimension,
such as `torch.rand(())`, which layer drop compares with a probability.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def without_override(function: Any) -> Callable[..., Any]:
    """Copy a function of `torch.nn.functional` without its own override check; calls in its body still reach modes.

    Such a function first asks whether a mode overrides it, so a mode that calls it under itself would recurse
    forever.
    """
    names = {name: _nobody for name in function.__code__.co_names if name.startswith("has_torch_function")}
    copy = FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


def _nobody(*tensors: Any) -> bool:
    return False


# From as many tensors of uniform int32 bits as `Draw.streams` says to the numbers of the draw.
Make = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One call of a random function, and how its result is computed from uniform bits.

    `make` is called with `streams` tensors of `shape`, each of independent int32 bits.
    """

    shape: tuple[int, ...]  # of the bits
    device: torch.device
    make: Make
    streams: int = 1  # number of independent numbers for each element
    into: Tensor | None = None  # the tensor that a function such as bernoulli_ fills


def unit(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1) of a dtype, from int32 bits: k / 2^d for as many bits d as the dtype tells apart."""
    digits = _DIGITS.get(dtype, 24)
    return ((bits.to(torch.int64) + 2**31) >> (32 - digits)).to(torch.float64).mul_(2.0**-digits).to(dtype)


_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _open_unit(bits: Tensor) -> Tensor:
    """Uniform float64 numbers in (0, 1), neither end included, so that their logarithm is finite."""
    return (bits.to(torch.float64) + (2**31 + 0.5)) * 2.0**-32


def _normal(first: Tensor, second: Tensor) -> Tensor:
    """Normal float64 numbers from two uniform ones each (Box & Muller 1958)."""
    return (-2 * _open_unit(first).log()).sqrt() * (2 * math.pi * _open_unit(second)).cos()


def _exponential(bits: Tensor) -> Tensor:
    return -_open_unit(bits).log()


def draw_of(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Draw | None:
    """Parse a call of one of PyTorch's random functions; None for other functions."""
    parse = _PARSERS.get(function)
    return None if parse is None else parse(*arguments, **keywords)


def body_of(function: Any) -> Callable[..., Any] | None:
    """The Python body of a random function that calls other functions, which modes can see; None for all others."""
    return _BODIES.get(function)


def _like(tensor: Tensor, options: Mapping[str, Any]) -> tuple[torch.dtype, torch.device]:
    dtype, device = options.get("dtype"), options.get("device")
    return dtype or tensor.dtype, torch.device(device) if device is not None else tensor.device


def _new(size: Sequence[Any], options: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Shape, dtype and device of a factory's call: `torch.rand(2, 3)`, `torch.rand((2, 3))` or `size=(2, 3)`."""
    if "size" in options:
        size = (options["size"],)
    if len(size) == 1 and not isinstance(size[0], int):
        size = size[0]
    dtype, device = options.get("dtype"), options.get("device")
    return (
        tuple(int(length) for length in size),
        dtype or torch.get_default_dtype(),
        torch.device(device) if device is not None else torch.get_default_device(),
    )


def _rand(*size: Any, **options: Any) -> Draw:
    shape, dtype, device = _new(size, options)
    return Draw(shape=shape, device=device, make=lambda bits: unit(bits, dtype), into=options.get("out"))


def _randn(*size: Any, **options: Any) -> Draw:
    shape, dtype, device = _new(size, options)
    return Draw(
        shape=shape, device=device, streams=2, make=lambda a, b: _normal(a, b).to(dtype), into=options.get("out")
    )


def _rand_like(input: Tensor, **options: Any) -> Draw:
    dtype, device = _like(input, options)
    return Draw(shape=tuple(input.shape), device=device, make=lambda bits: unit(bits, dtype))


def _randn_like(input: Tensor, **options: Any) -> Draw:
    dtype, device = _like(input, options)
    return Draw(shape=tuple(input.shape), device=device, streams=2, make=lambda a, b: _normal(a, b).to(dtype))


def _integers(low: int, high: int, dtype: torch.dtype) -> Make:
    """Integers from `low` to `high` - 1, from 32 uniform bits.

    The probability of each number has an error of at most 2^-32.
    """
    return lambda bits: (low + (unit(bits, torch.float64) * (high - low)).floor()).to(dtype)


def _bounds(numbers: Sequence[Any], options: Mapping[str, Any]) -> tuple[int, int]:
    """The range of `randint(high, ...)` or `randint(low, high, ...)`."""
    low, high = options.get("low", 0), options.get("high")
    if len(numbers) == 2:
        low, high = numbers
    elif numbers:
        low, high = (numbers[0], high) if high is not None else (low, numbers[0])
    assert high is not None
    return int(low), int(high)


def _randint(*arguments: Any, **options: Any) -> Draw:
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    sizes = [argument for argument in arguments if not isinstance(argument, int)]
    shape, _, device = _new(sizes, options)
    make = _integers(*_bounds(numbers, options), options.get("dtype") or torch.int64)
    return Draw(shape=shape, device=device, make=make)


def _randint_like(input: Tensor, *numbers: int, **options: Any) -> Draw:
    dtype, device = _like(input, options)
    return Draw(shape=tuple(input.shape), device=device, make=_integers(*_bounds(numbers, options), dtype))


def _bernoulli(input: Tensor, p: float | None = None, **_: Any) -> Draw:
    """Bernoulli samples, with one number for each element; `input` has the probabilities if `p` is None."""
    threshold = input if p is None else p
    return Draw(
        shape=tuple(input.shape),
        device=input.device,
        make=lambda bits: (unit(bits, torch.float64) < threshold).to(input.dtype),
    )


def _bernoulli_(self: Tensor, p: Any = 0.5, **_: Any) -> Draw:
    return Draw(
        shape=tuple(self.shape),
        device=self.device,
        make=lambda bits: (unit(bits, torch.float64) < p).to(self.dtype),
        into=self,
    )


def _uniform_(self: Tensor, *ends: float, **options: float) -> Draw:
    low, high = (
        options.get("from", (*ends, 0.0)[0]),
        options.get("to", (*ends, 0.0, 1.0)[1] if len(ends) != 1 else 1.0),
    )
    return Draw(
        shape=tuple(self.shape),
        device=self.device,
        make=lambda bits: low + (high - low) * unit(bits, self.dtype),
        into=self,
    )


def _normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Draw:
    return Draw(
        shape=tuple(self.shape),
        device=self.device,
        streams=2,
        make=lambda a, b: mean + std * _normal(a, b),
        into=self,
    )


def _exponential_(self: Tensor, lambd: float = 1.0, **_: Any) -> Draw:
    return Draw(shape=tuple(self.shape), device=self.device, make=lambda bits: _exponential(bits) / lambd, into=self)


def _torch_normal(mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Draw:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    if tensors:
        shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
        dtype, device = torch.result_type(tensors[0], tensors[-1]), tensors[0].device
    else:
        shape, dtype, device = _new((size,), options)
    return Draw(
        shape=shape,
        device=device,
        streams=2,
        make=lambda a, b: (mean + std * _normal(a, b)).to(dtype).detach(),
        into=options.get("out"),
    )


def _multinomial(input: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Draw:
    """Sample from weights [..., classes] -> class indices [..., num_samples]."""
    if replacement:
        cumulative = input.detach().double().cumsum(-1)
        return Draw(
            shape=(*input.shape[:-1], num_samples),
            device=input.device,
            make=lambda bits: torch.searchsorted(
                cumulative, unit(bits, torch.float64) * cumulative[..., -1:], right=True
            ).clamp_(max=input.shape[-1] - 1),
        )
    # Of exponential variables with these rates, number k is the smallest with a probability proportional to its
    # weight (Efraimidis & Spirakis 2006).
    return Draw(
        shape=tuple(input.shape),
        device=input.device,
        make=lambda bits: (_exponential(bits) / input.detach()).topk(num_samples, -1, largest=False).indices,
    )


_PARSERS: dict[Any, Callable[..., Draw]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.randint: _randint,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.randint_like: _randint_like,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.normal: _torch_normal,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}
_BODIES: dict[Any, Callable[..., Any]] = {F.gumbel_softmax: without_override(F.gumbel_softmax)}
