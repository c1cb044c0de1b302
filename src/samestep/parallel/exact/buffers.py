"""Buffers and caches that a training forward changes, and which are refused or switched off.

Buffers that a forward fills from its samples would differ between ranks; key-value caches would grow in recomputed
layers; buffers that every forward updates, such as spectral norm's vectors, would be updated once a micro-batch.

`keep_no_cache` is called before the model is spread; `RepeatedForwards` and `check_buffers` only check the first
step, as a forward that changes a buffer there does so in later steps too, and each check costs a copy or a message.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.valueless import has_values
from samestep.torch_internals.tensors import version_of


@dataclass(frozen=True, kw_only=True)
class Version:
    """What tells whether a buffer was written to."""

    shape: torch.Size
    written: tuple[int, int]  # its id, and its version counter
    checksum: Tensor | None  # []: what is written through `.data`, as codebooks do, leaves the counter as it was


Versions = dict[str, Version]


def versions(model: nn.Module) -> Versions:
    """The version of each buffer, by name. No device is waited for."""
    return {
        name: Version(
            shape=buffer.shape,
            written=(id(buffer), version_of(buffer)),
            checksum=_sum(buffer) if has_values(buffer) else None,
        )
        for name, buffer in model.named_buffers()
    }


def check_buffers(model: nn.Module, before: Versions, group: dist.ProcessGroup) -> None:
    """Raise UserError if a step has left a buffer with different values on different ranks. Every rank asks."""
    after = versions(model)
    buffers = dict(model.named_buffers())
    if not all(map(has_values, (*model.parameters(), *buffers.values()))):
        return
    device = next(model.parameters()).device
    # With offload, parameters are in host memory while buffers are on the accelerator.
    sums = torch.zeros(1 + len(buffers), dtype=torch.float64, device=device)
    changed = torch.zeros_like(sums)
    for place, (name, version) in enumerate(after.items(), 1):
        assert version.checksum is not None
        sums[place] = version.checksum
        changed[place] = _is_filled(before.get(name), version)
    # [3, 1 + buffers]: maximum, negated minimum, and whether changed. Index 0 is no buffer, so that the message is
    # never empty.
    message = torch.cat([sums, -sums, changed])
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    # One read for all, as each read waits for the accelerator.
    for name, (high, negative_low, any_changed) in zip(["", *buffers], message.view(3, -1).T.tolist(), strict=True):
        if any_changed and high != -negative_low:
            raise UserError(
                f"the buffer {name} of the model has other values on other ranks after a step: its forward fills it "
                "from the samples that it sees, which are not the global batch; batch norm's own statistics are kept "
                "the same; where this buffer is a mean or a sum over the batch, have the task's batch_buffers() give "
                f'{{"{name}": "mean"}} or "sum", and else make it a function of the step alone'
            )


def _is_filled(before: Version | None, after: Version) -> bool | Tensor:
    """Whether a buffer was written to. A buffer of a new shape is a cache, whose size follows the inputs."""
    if before is None or before.checksum is None or after.checksum is None:
        return before is None or before.shape == after.shape
    if before.shape != after.shape:
        return False
    return before.written != after.written or before.checksum.to(after.checksum.device) != after.checksum


def _sum(buffer: Tensor) -> Tensor:
    """A checksum of a buffer."""
    flat = as_real(buffer.detach()).double().flatten()
    # Weighted by position, so that permutations differ. NaN and infinity are replaced by numbers, since NaN would
    # differ from itself.
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().nan_to_num()


def keep_no_cache(model: nn.Module) -> None:
    """Disable the key-value cache of a transformers model, which is for generating text.

    The modules get a copy of the configuration, from which a task may make its next model.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if getattr(config, "use_cache", False) is True:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].use_cache = False
            vars(module)["config"] = copies[id(config)]


class RepeatedForwards:
    """Checks in the first step that repeated forwards of a module change no buffer."""

    def __init__(self, model: nn.Module, joined: Collection[str] = ()) -> None:
        """`joined`: buffers that are combined over the forwards of a step, which may be repeated."""
        self._model = model
        self._joined = joined
        self._moved: list[str] = []
        self._done = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of forwards of modules that have already run in this step, and of recomputation."""
        if self._done:
            yield
            return
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if name not in self._joined}
        yield
        for name, buffer in self._model.named_buffers():
            values = before.get(name)
            # A buffer of another shape, or a new one, is a cache for the size of the inputs, and no state.
            if values is not None and values.shape == buffer.shape and not _equal(values, buffer):
                self._moved.append(name)

    def check(self, why: str) -> None:
        """Raise UserError on every rank if a buffer has changed. Every rank asks after the first step."""
        if self._done:
            return
        self._done = True
        names: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(names, self._moved[0] if self._moved else None)
        moved = next((name for name in names if name is not None), None)
        if moved is not None:
            owner, _, key = moved.rpartition(".")
            if key in ("weight_u", "weight_v"):
                raise UserError(
                    f"the buffer {moved} is moved on by every training forward, and {why}; it is of "
                    "torch.nn.utils.spectral_norm; use torch.nn.utils.parametrizations.spectral_norm, which computes "
                    "the same and moves on once a step here"
                )
            raise UserError(
                f"the buffer {moved} is moved on by every training forward of {owner or 'the model'}, and {why}; "
                "one process runs one forward a step, so use one micro-batch a rank (run.micro_batch: null), no "
                "recompute and no pp, such as dp2 or fsdp2, or tp2 if samples fill it; where the buffer is a mean or "
                f'a sum over the batch, have the task\'s batch_buffers() give {{"{moved}": "mean"}} or "sum"'
            )


def _equal(before: Tensor, after: Tensor) -> bool:
    """Whether a buffer is unchanged; NaN counts as equal to NaN."""
    if not (has_values(before) and has_values(after)):
        return True
    return before.dtype == after.dtype and torch.equal(before.nan_to_num(), after.detach().nan_to_num())
