"""How fast a training was: tokens and floating-point operations a second, and what part of the device's best."""

import time

import torch
import torch.distributed as dist

from samestep.tasks.base import Work

_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 0.3  # of matrix products
_AT_ONCE = 10  # products, before an accelerator is waited for


def speeds(samples_per_second: float, work: Work, precision: str, device: torch.device) -> dict[str, float]:
    """What is known of a training's speed, over all ranks; the same on every rank, and every rank must ask.

    `model_flops_utilisation` (Chowdhery et al. 2022, appendix B) is held against the peak that a matrix product
    in the recipe's precision reaches here, on all ranks at once, rather than against a data sheet's.
    """
    found: dict[str, float] = {}
    if work.tokens is not None:
        found["tokens_per_second"] = samples_per_second * work.tokens
    if work.flops is not None:
        peak = _peak(device, _TYPES[precision])
        found["flops_per_second"] = samples_per_second * work.flops
        found["measured_peak_flops"] = peak
        found["model_flops_utilisation"] = found["flops_per_second"] / peak
    return found


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of all ranks' matrix products, run at the same time."""
    size = 1024 if device.type == "cpu" else 4096
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = one @ other  # the first product prepares the library
    dist.barrier()
    began, products = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for _ in range(_AT_ONCE):
            torch.mm(one, other, out=result)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        products += _AT_ONCE
    mine = 2 * size**3 * products / (time.perf_counter() - began)
    of_all = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(of_all)
    return of_all.item()
