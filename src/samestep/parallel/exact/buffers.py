"""Buffers and caches that a training forward changes, and which are refused or switched off.

Buffers that a forward fills from its samples would differ between ranks; key-value caches would grow in recomputed
layers; buffers that every forward moves on, such as spectral norm's vectors, would move once a micro-batch.

Who looks when: `keep_no_cache` before the model is spread, `RepeatedForwards` and `check_buffers` in the first step
alone. What moves a buffer there would move it in later steps too, and each look costs a copy or a message.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.valueless import has_values

Versions = dict[str, tuple[int, int, torch.Size]]


def versions(model: nn.Module) -> Versions:
    """Which tensor each buffer is, how often it was written to, and its shape."""
    return {name: (id(buffer), buffer._version, buffer.shape) for name, buffer in model.named_buffers()}


def check_buffers(model: nn.Module, before: Versions, group: dist.ProcessGroup) -> None:
    """Raise UserError where a step has left other values in a buffer on other ranks. Every rank of a group asks."""
    after = versions(model)
    buffers = dict(model.named_buffers())
    if not all(map(has_values, (*model.parameters(), *buffers.values()))):
        return
    device = next(model.parameters()).device
    # Under an offload parameters are in the host's memory, while buffers stay on the accelerator.
    sums = torch.zeros(1 + len(buffers), dtype=torch.float64, device=device)
    for place, buffer in enumerate(buffers.values(), 1):
        sums[place] = _sum(buffer)
    changed = torch.tensor([0, *(_is_filled(before.get(name), each) for name, each in after.items())], device=device)
    # The largest and, with the sign turned, the smallest of all ranks.
    # [3, 1 + buffers]. The number at index 0 stands for no buffer and is always 0: the message is never empty.
    message = torch.cat([sums, -sums, changed.double()])
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    # Read all at once: each read waits for the accelerator.
    for name, (high, negative_low, any_changed) in zip(["", *buffers], message.view(3, -1).T.tolist(), strict=True):
        if any_changed and high != -negative_low:
            raise UserError(
                f"the buffer {name} of the model has other values on other ranks after a step: its forward fills it "
                "from the samples that it sees, which are not the global batch; batch norm's own statistics are kept "
                "the same; where this buffer is a mean or a sum over the batch, have the task's batch_buffers() give "
                f'{{"{name}": "mean"}} or "sum", and else make it a function of the step alone'
            )


def _is_filled(before: tuple[int, int, torch.Size] | None, after: tuple[int, int, torch.Size]) -> bool:
    """Whether a buffer was written to. One of another shape is a cache, which is as long as a rank's inputs."""
    return before != after and (before is None or before[2] == after[2])


def _sum(buffer: Tensor) -> Tensor:
    """A number that differs where buffers do, but for rare cases."""
    flat = as_real(buffer.detach()).double().flatten()
    # Weighted by position, so that a permutation of values is seen. NaN and infinity become numbers, or no two
    # buffers that hold one would be the same.
    return (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().nan_to_num()


def keep_no_cache(model: nn.Module) -> None:
    """Make a transformers model keep no keys and values of a forward, which are for generating text.

    A task may make its next model of the same configuration, so the modules get a copy of it.
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
    """Watches buffers while a step, the first one, runs modules that have run in it before."""

    def __init__(self, model: nn.Module, joined: Collection[str] = ()) -> None:
        """`joined`: buffers that are joined over the forwards of a step, however many there are."""
        self._model = model
        self._joined = joined
        self._moved: list[str] = []
        self._done = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forwards of modules that have run in this step before, and around their recomputation."""
        if self._done:
            yield
            return
        before = {name: buffer.clone() for name, buffer in self._model.named_buffers() if name not in self._joined}
        yield
        for name, buffer in self._model.named_buffers():
            values = before.get(name)
            # A cache that another size of inputs makes again, or that is made late, is no state of the training.
            if values is not None and values.shape == buffer.shape and not _equal(values, buffer):
                self._moved.append(name)

    def check(self, why: str) -> None:
        """Raise UserError, on every rank, where a buffer has moved. Every rank asks, when a step is done."""
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
                "recompute and no pp, such as dp2 or fsdp2; where the buffer is a mean or a sum over the batch, "
                f'have the task\'s batch_buffers() give {{"{moved}": "mean"}} or "sum"'
            )


def _equal(before: Tensor, after: Tensor) -> bool:
    """Whether a buffer is what it was, NaN counting as equal to NaN."""
    if not (has_values(before) and has_values(after)):
        return True
    return before.dtype == after.dtype and torch.equal(before.nan_to_num(), after.detach().nan_to_num())
