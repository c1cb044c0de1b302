"""Precision: in which dtype parameters are held and forward is computed, and how losses are scaled for it.

What each precision means: fp64: parameters and everything computed in float64 (`parallel.exact.float64`). fp32: as
the model is. bf16: parameters in float32, products under autocast. fp16: the same with float16, and the loss scaled
against underflow of gradients (Micikevicius et al. 2018, section 3.2), by the same factor on every rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from samestep.errors import UserError
from samestep.parallel.exact.float64 import in_float64
from samestep.torch_internals.optimizers import overflowed

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
    """Set the internal precision of float32 matrix products in a block of code (`run.float32_matmul`)."""
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
        # Initializes the scale on every rank: ranks of earlier pipeline stages have no loss, but unscale gradients.
        self._zero = self._scaler.scale(torch.zeros((), device=device)) if self.scales else None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled; steps whose scaled gradients overflow are then skipped."""
        return self._scaler.is_enabled()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, self._dtype, enabled=self._dtype is not None)

    def throughout(self) -> AbstractContextManager[None]:
        """Context of forward, loss, backward and scores: with fp64, casts of the model to float32 give float64."""
        return in_float64(self._name == "fp64")

    def scaled(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale of fp16, if there is one."""
        return self._scaler.scale(loss)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss that `scaled` returned."""
        loss.backward()

    def unscale(self, optimizer: Optimizer, everyone: dist.ProcessGroup | None = None) -> None:
        """Divide gradients by the loss scale, before their norm is taken and they are clipped.

        `everyone`: the ranks that step together, which all-reduce whether any gradient has overflowed, since ranks
        with different shards, slices or stages have different gradients.
        """
        if self._zero is None:
            return
        self._scaler.unscale_(optimizer)
        by_device = overflowed(self._scaler, optimizer)
        if not by_device:  # this rank has no gradient
            by_device[self._zero.device] = torch.zeros_like(self._zero)
        if everyone is not None:
            of_any = torch.stack([flag.to(self._zero.device) for flag in by_device.values()]).amax()
            dist.all_reduce(of_any, dist.ReduceOp.MAX, everyone)
            for flag in by_device.values():
                flag.copy_(of_any)

    def update(self, optimizer: Optimizer) -> None:
        """Step the optimizer, unless a scaled gradient overflowed on any rank."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def state(self) -> dict[str, float]:
        """State of the loss scaler; empty if losses aren't scaled."""
        return self._scaler.state_dict()

    def restore(self, state: Mapping[str, float]) -> None:
        """Load a loss scaler's state; an empty one keeps the initial scale."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state))
