"""Precision: in which dtype parameters are held and forward is computed, and how losses are scaled for it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.exact.float64 import in_float64

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(precision: str, *, master_weights: bool = False) -> torch.dtype:
    """The dtype of parameters; autocast keeps them in float32, unless the optimizer has a float32 copy of them.

    Without `master_weights` it is also that of batches, of optimizer state and of that copy.
    """
    if master_weights and precision == "bf16":
        return torch.bfloat16
    return torch.float64 if precision == "fp64" else torch.float32


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Code whose float32 matrix products may be computed with fewer digits: `run.float32_matmul`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Precision:
    """Autocast for bf16 and fp16, and for fp16 a loss scaled so that small gradients don't vanish."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name == "fp16" and device.type == "cpu":
            raise UserError("recipe.precision is fp16, which needs an accelerator; use bf16 or fp32 on a CPU")
        self._name = name
        self._device_type = device.type
        self._dtype = _AUTOCAST.get(name)
        self._scaler = GradScaler(device.type, enabled=name == "fp16")

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, and a step is left out where its scaled gradients overflow."""
        return self._scaler.is_enabled()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None)

    def throughout(self) -> AbstractContextManager[None]:
        """What forward, loss, backward and scores run in: with fp64 also what a model casts to float32 is float64."""
        return in_float64(self._name == "fp64")

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients back to their true size, before they are measured and clipped."""
        self._scaler.unscale_(optimizer)

    def update(self, optimizer: Optimizer) -> None:
        """Step the optimizer, unless a scaled gradient overflowed (on any rank, since they are averaged)."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, float]:
        """The scale of the loss and how it came to be; nothing where losses aren't scaled."""
        return self._scaler.state_dict()

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on with a scale that `state` told; with the first one where there is none."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state))
