"""What a rank of a DeepSpeed engine holds, and the whole parameters and state gathered from all ranks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engines.deepspeed.start import without_deprecations
from samestep.layout import Layout
from samestep.parallel.holdings import Holdings, state_tensors


def whole_parameters(model: nn.Module, package: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole and in `dtype`; every rank must ask."""
    for name, parameter in model.named_parameters():
        with without_deprecations():
            value = whole(parameter, package, dtype)
        yield name, value


def whole_state(model: nn.Module, package: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole model's state dict on the CPU of every rank; every rank must ask."""
    with without_deprecations():
        return {
            name: (whole(value, package, dtype) if isinstance(value, nn.Parameter) else value.detach()).cpu().clone()
            for name, value in model.state_dict(keep_vars=True).items()
        }


def whole(parameter: Tensor, package: Any, dtype: torch.dtype) -> Tensor:
    """A parameter that DeepSpeed may have sharded; every rank that has a shard must ask."""
    if parameter.dtype != dtype and parameter.requires_grad and hasattr(parameter, "_hp_mapping"):
        # ZeRO keeps float32 numbers beside those that forward computes with.
        exact = package.utils.safe_get_full_fp32_param(parameter)
        if exact is not None:
            return exact.detach().to(dtype)
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().to(dtype)
    if parameter.dtype != dtype and parameter.requires_grad:
        return package.utils.safe_get_full_fp32_param(parameter).detach().to(dtype)
    with package.zero.GatheredParameters([parameter]):
        return parameter.detach().clone().to(dtype)


def holdings(engine: Any, layout: Layout) -> Holdings:
    """What this rank holds between two steps; DeepSpeed lets go of the gradients in each."""
    counted: set[int] = set()
    model: nn.Module = engine.module
    parameters = _once((getattr(p, "ds_tensor", p).detach() for p in model.parameters()), counted)
    gradients = _once((p.grad for p in model.parameters() if p.grad is not None), counted)
    state = _once(_optimizer_tensors(engine), counted)
    host: list[Tensor] = []
    if engine.zero_use_cpu_optimizer():  # on disk too: it steps in the host's memory
        host, state = [*gradients, *state], []
        gradients = []
    if layout.offloads_parameters:
        host, parameters = [*host, *parameters], []
    return Holdings(
        parameters=parameters, gradients=gradients, optimizer_state=state, host=host, disk=list(_on_disk(engine))
    )


def _on_disk(engine: Any) -> Iterator[Tensor]:
    """What is in files, as tensors of its sizes without memory."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is not None:
        for info in swapper.swap_params_info.values():
            yield torch.empty(info.num_tensors(), info.numel(), dtype=info.dtype(), device="meta")


def _optimizer_tensors(engine: Any) -> Iterator[Tensor]:
    """State of the optimizer that steps, and what DeepSpeed keeps for it: float32 copies and buffers of gradients."""
    for group in engine.basic_optimizer.param_groups:
        yield from (p.detach() for p in group["params"])
        yield from (p.grad for p in group["params"] if p.grad is not None)
    yield from state_tensors(engine.basic_optimizer)


def _once(tensors: Iterable[Tensor], counted: set[int]) -> list[Tensor]:
    """Those whose memory has not been counted yet."""
    new = []
    for tensor in tensors:
        place = tensor.data_ptr()
        if tensor.numel() and place not in counted:
            counted.add(place)
            new.append(tensor)
    return new
